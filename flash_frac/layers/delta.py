"""DeltaMixer, a layer that looks up values by key: Gated DeltaNet (Yang et al., 2024).

    q, k, v   = silu(conv1d(proj(input))), q and k scaled to unit length
    beta      = sigmoid(b_proj(input))
    log_decay = -exp(A_log) softplus(a_proj(input) + dt_bias)
    y         = delta_scan(q / sqrt(K), k, v, beta, log_decay)
    output    = o_proj(RMSNorm(y) silu(g_proj(input)))

Parameters have the names and shapes of flash-linear-attention's GatedDeltaNet.

Letters: B batch, T time, E width, H heads, K key channels of a head, D its value channels,
N sequences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.layers.base import RecurrentMixer
from flash_frac.layers.checks import check_inputs
from flash_frac.layers.conv import CausalConv1d
from flash_frac.layers.norm import RMSNorm
from flash_frac.layers.plain import (
    can_join,
    is_watched,
    joined_linear,
    linear,
    linears,
    steps_directly,
)
from flash_frac.layers.sizes import DELTA_EXPAND, check_sizes, head_sizes
from flash_frac.layers.state import MixerState
from flash_frac.ops import causal_conv, delta_scan, delta_step, swiglu
from flash_frac.ops.backends import MOST_KEYS, MOST_VALUES
from flash_frac.ops.context_parallel import sharded_delta_scan, window_before
from flash_frac.ops.norm.api import norm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Names of the tensors that carry time; they stay float32 whatever the dtype of the rest.
DELTA_TIME_PARAMETERS = ("A_log", "dt_bias")
# Epsilon added to the squared lengths of queries and keys.
UNIT_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """Inputs of the scan.

    q, k: (B, T, H, K); v: (B, T, H, D); beta, log_decay: (B, T, H); window: (N, 2 H K + H D, taps
    - 1), the last inputs of the convolutions.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    window: Tensor


class DeltaMixer(RecurrentMixer):
    """A layer with a matrix state, corrected by the delta rule and decayed per head.

    Args:
        hidden_size: width E of input and output.
        num_heads: H; by default E / 64, fewer in layers wider than 1024.
        head_dim: K, channels of queries and keys; by default 3 E / (4 H).
        expand_v: D / K; head_dim * expand_v, the value channels, must be an integer.
        conv_kernel: taps of the convolutions.
        norm_eps: epsilon of the norm of a head's output.
        initializer_range: initial standard deviation of projection and convolution weights; None
            keeps torch's default initialisation.
        backend: as in `delta_scan`.

    Attributes:
        context_group: as in `FracMixer`.

    Example:
        >>> mixer = DeltaMixer(256)  # 4 heads of 48 key and 96 value channels
        >>> y, state = mixer(torch.randn(2, 100, 256))
        >>> y, state = mixer(torch.randn(2, 1, 256), state=state)
    """

    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2.0,
        conv_kernel: int = 4,
        norm_eps: float = 1e-5,
        initializer_range: float | None = 0.02,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_heads, head_dim = head_sizes(hidden_size, num_heads, head_dim, DELTA_EXPAND)
        check_sizes(conv_kernel=conv_kernel)
        self.value_dim = round(head_dim * expand_v)
        if self.value_dim < 1 or self.value_dim != head_dim * expand_v:
            raise ValueError(
                f"expand_v times head_dim ({head_dim}) must be a whole number, got {expand_v}"
            )
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.conv_kernel, self.initializer_range = conv_kernel, initializer_range
        self.backend = backend
        self.context_group: ProcessGroup | None = None

        keys, values = num_heads * head_dim, num_heads * self.value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        for name, value in self.initial_time_values().items():
            self.register_parameter(name, nn.Parameter(value))
        self.q_conv1d = CausalConv1d(keys, conv_kernel, bias=False)
        self.k_conv1d = CausalConv1d(keys, conv_kernel, bias=False)
        self.v_conv1d = CausalConv1d(values, conv_kernel, bias=False)
        self.g_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_norm = RMSNorm(self.value_dim, norm_eps, backend=backend)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        if initializer_range is not None:
            self.reset_parameters()

    def initial_time_values(self) -> dict[str, Tensor]:
        """New initial values of the tensors that carry time, by name: rates exp(A_log) uniform in
        [0, 16], time steps softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        rate = 16 * torch.rand(self.num_heads, dtype=dtype)
        low, high = math.log(1e-3), math.log(0.1)
        step = torch.exp(low + (high - low) * torch.rand(self.num_heads, dtype=dtype))
        # The inverse of softplus.
        return {"A_log": rate.log(), "dt_bias": step + torch.log(-torch.expm1(-step))}

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialise all parameters."""
        for module in self.children():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | CausalConv1d):
                if self.initializer_range is None:
                    module.reset_parameters()
                else:
                    nn.init.normal_(module.weight, std=self.initializer_range)
        self.reset_time()

    def empty_state(self, batch_size: int) -> MixerState:
        """The state of B empty sequences: zeros."""
        weight = self.q_conv1d.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        sizes = (batch_size, self.num_heads, self.head_dim, self.value_dim)
        channels = self.num_heads * (2 * self.head_dim + self.value_dim)
        window = weight.new_zeros(batch_size, channels, self.conv_kernel - 1)
        return MixerState(weight.new_zeros(sizes, dtype=wide), window)

    @torch.no_grad()
    def idle_log_decay(self) -> Tensor:
        """log_decay (H, 1) of the heads for a zero input."""
        return -(self.A_log.exp() * F.softplus(self.dt_bias))[:, None]

    def forward(
        self,
        x: Tensor,
        *,
        state: MixerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> tuple[Tensor, MixerState]:
        """Mix a batch of sequences, or continue them.

        Args:
            x: (B, T, E).
            state: the N sequences' state before the first token; None to start.
            attention_mask: (B, T), 0 at padding, which may be anywhere and leaves the state as is.
            cu_seqlens: (N + 1,) boundaries of sequences packed in one row (B = 1).
            elapsed: (B, T), positive: the time before each token, which multiplies its log_decay;
                1 if None.

        Returns:
            y (B, T, E), and the state of the N sequences after their last real token.
        """
        inputs = self.scan_inputs(
            x, state=state, attention_mask=attention_mask, cu_seqlens=cu_seqlens, elapsed=elapsed
        )
        recurrent = None if state is None else state.recurrent
        if x.shape[1] == 1 and cu_seqlens is None and recurrent is not None:
            q, k, v, beta, decay = (tensor[:, 0] for tensor in inputs[:5])
            y, recurrent = delta_step(q, k, v, beta, decay, recurrent, backend=self.backend)
            y = y[:, None]
        elif self.context_group is not None:
            group = self.context_group
            y, recurrent = sharded_delta_scan(
                *inputs[:5], group=group, cu_seqlens=cu_seqlens, backend=self.backend
            )
        else:
            y, recurrent = delta_scan(
                *inputs[:5], initial_state=recurrent, cu_seqlens=cu_seqlens, backend=self.backend
            )
        y = swiglu(self.g_proj(x), self.o_norm(y).flatten(-2), self.backend)
        return self.o_proj(y), MixerState(recurrent, inputs.window)

    def scan_inputs(
        self,
        x: Tensor,
        *,
        state: MixerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> DeltaInputs:
        """Projections, convolutions and gates: everything in `forward` before the scan."""
        convolutions = {f"{name}_conv1d": getattr(self, f"{name}_conv1d") for name in "qkv"}
        check_inputs(self, convolutions, x, state, attention_mask, cu_seqlens, elapsed)
        projections = (self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj)
        sizes = [conv.in_channels for conv in convolutions.values()]
        joined = joined_linear(projections, x)
        qkv, a, b = joined.split([sum(sizes), self.num_heads, self.num_heads], -1)
        options = {"mask": attention_mask, "cu_seqlens": cu_seqlens, "backend": self.backend}
        window = None if state is None else state.conv
        if self.context_group is not None:
            group = self.context_group
            window = window_before(qkv, self.conv_kernel, group=group, cu_seqlens=cu_seqlens)
        u, window = self._convolve(qkv, sizes, window, options)
        wide = torch.promote_types(a.dtype, torch.float32)
        rate = self.A_log.to(wide).exp()
        log_decay = -rate * F.softplus(a.to(wide) + self.dt_bias.to(wide))
        beta = b.to(wide).sigmoid()
        if elapsed is not None:
            log_decay = log_decay * elapsed[..., None].to(wide)
        if attention_mask is not None:
            padding = (attention_mask == 0)[..., None]
            beta, log_decay = (gate.masked_fill(padding, 0) for gate in (beta, log_decay))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in u.split(sizes, -1))
        q = _unit(q, self.head_dim**-0.5, backend=self.backend)
        k = _unit(k, backend=self.backend)
        return DeltaInputs(q, k, v, beta, log_decay, window)

    def steps_in_place(self, x: Tensor, norm: RMSNorm) -> bool:
        """Whether `step_in_place` supports x (B, T, E): one token, no gradients, plain layers."""
        linears = (self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        parts = (*linears, *convolutions, self.o_proj)
        return (
            self.context_group is None
            and type(self.o_norm) is RMSNorm
            and not is_watched(self.o_norm)
            and self.head_dim <= MOST_KEYS
            and self.value_dim <= MOST_VALUES
            and all(part.bias is None for part in convolutions)
            and steps_directly(self, x, norm, parts, self.backend)
        )

    def step_in_place(
        self, x: Tensor, norm: RMSNorm, state: MixerState, attention_mask: Tensor | None = None
    ) -> Tensor:
        """x + mixer(norm(x)) for one token (B, 1, E); `state` becomes the next state.

        Each weight is read once, and one kernel does everything between convolution and o_proj.
        """
        from flash_frac.ops.decode.triton import fused_conv_step
        from flash_frac.ops.delta.step import fused_delta_step

        hidden = x[:, 0]
        mask = None if attention_mask is None else attention_mask[:, 0]
        projections = (self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj, self.g_proj)
        *qkv, a, b, gate = linears(hidden, projections, norm)
        taps = torch.cat([conv.weight for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        u = fused_conv_step(torch.cat(qkv, -1), taps, None, state.conv, mask=mask)
        gated = fused_delta_step(
            *(u, a, b, self.A_log, self.dt_bias, state.recurrent),
            mask=mask,
            gate=gate,
            norm_weight=self.o_norm.weight,
            eps=self.o_norm.eps,
        )
        return linear(gated.flatten(1), self.o_proj, residual=hidden)[:, None]

    def _convolve(
        self, qkv: Tensor, sizes: list[int], window: Tensor | None, options: dict
    ) -> tuple[Tensor, Tensor]:
        """q, k and v after their convolutions, concatenated, and the windows of all three."""
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        if can_join(convolutions):
            weight = torch.cat([conv.weight for conv in convolutions])
            return causal_conv(qkv, weight, None, window=window, **options)
        windows = [None] * 3 if window is None else window.split(sizes, 1)
        found = [
            conv(x, window=before, **options)
            for conv, x, before in zip(convolutions, qkv.split(sizes, -1), windows, strict=True)
        ]
        return torch.cat([u for u, _ in found], -1), torch.cat([past for _, past in found], 1)


def _unit(x: Tensor, scale: float = 1.0, *, backend: str) -> Tensor:
    """x scaled to unit length over its last axis, times `scale`, in the dtype of x.

    A unit vector has a root mean square of 1 / sqrt(size), so an RMS norm computes this.
    """
    size = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = x.new_full((size,), scale * size**-0.5, dtype=wide)
    return norm(x, weight, UNIT_EPS / size, backend=backend)
