"""FracMixer, the layer of the paper's Figure 2: projections, conv, controls, scan, gate, norm.

    x, gate = in_proj(input)              dyn = dyn_proj(x): logits of delta, alpha, lam
    u       = silu(conv1d(x))             rw  = rw_proj(u): logits of read and write, normed or not
    y       = scan(u, controls(dyn, rw)) + D u
    output  = out_proj(RMSNorm(y silu(gate)))

Letters: B batch, T time, E width, H heads, D head channels, I = H D, M modes, K taps, N sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from flash_frac.layers.base import RecurrentMixer
from flash_frac.layers.body import train_body, trains_at_once
from flash_frac.layers.checks import check_inputs
from flash_frac.layers.conv import CausalConv1d
from flash_frac.layers.norm import GatedRMSNorm, ModeRMSNorm, RMSNorm
from flash_frac.layers.plain import is_watched, runs_directly
from flash_frac.layers.sizes import (
    FRAC_EXPAND,
    NUM_MODES,
    READ_INIT,
    TAU_MAX,
    TAU_MIN,
    WRITE_INIT,
    check_sizes,
    head_sizes,
)
from flash_frac.layers.state import MixerState
from flash_frac.ops import (
    Controls,
    ControlSettings,
    Dynamics,
    controls_from_logits,
    dilate,
    frac_scan,
    frac_step,
    mode_log_decay,
)
from flash_frac.ops.context_parallel import sharded_scan, window_before
from flash_frac.ops.control.reference import num_dynamics, split_dynamics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Names of the tensors that carry time; they stay float32 whatever the dtype of the rest.
TIME_PARAMETERS = ("base_log_tau", "dt_bias", "read_residual_logit", "write_residual_scale", "D")


class MixerInputs(NamedTuple):
    """Inputs of the scan and the gate.

    u: (B, T, H, D); gate: (B, T, I); controls: (B, T, H, M) each; window: (N, I, K - 1), the last
    inputs of the convolution.
    """

    u: Tensor
    gate: Tensor
    controls: Controls
    window: Tensor


class FracMixer(RecurrentMixer):
    """A selective state-space layer with power-law memory.

    Args:
        hidden_size: width E of input and output.
        num_heads: H; by default E / 64, fewer in layers wider than 1024.
        head_dim: channels D of a head; by default 2 E / H. The inner width is I = H D.
        num_modes: M, exponential modes of a head.
        bank: timescales of the modes: "geometric" from tau_min to tau_max, "per_head" for another
            part of it in each head (`flash_frac.theory.head_banks`), the name of an optimised bank
            (`flash_frac.theory.bank_names()`), or M increasing numbers.
        tau_min, tau_max: ends of the geometric banks, and initial range of learned timescales.
        learned_timescales: train the timescales, from log-uniform random initial values.
        settings: ranges and switches of the controls.
        rw_norm: norm the logits of reads and writes over the modes of a head (`ModeRMSNorm`).
        conv_kernel: K, taps of the convolution; conv_bias: whether it has a bias.
        use_D: whether there is a direct term D u.
        read_init: initial p_read; write_init: initial sigmoid(p_write).
        dt_init: initial delta of a token that projects to zero; softplus(0) if None.
        gate_bias: constant added to the gate.
        norm_eps: epsilon of all norms.
        initializer_range: initial standard deviation of the projections' weights.
        backend: as in `frac_scan`.

    Attributes:
        context_group: the ranks that share each row, of which each holds a slice, see
            `flash_frac.ops.context_parallel`; None (the default) if rows are whole.

    Example:
        >>> mixer = FracMixer(256)  # 4 heads of 128 channels
        >>> y, state = mixer(torch.randn(2, 100, 256))
        >>> y, state = mixer(torch.randn(2, 1, 256), state=state)
    """

    base_log_tau: Tensor
    dt_bias: nn.Parameter
    read_residual_logit: nn.Parameter
    write_residual_scale: nn.Parameter
    D: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        num_modes: int = NUM_MODES,
        bank: str | Sequence[float] = "geometric",
        tau_min: float = TAU_MIN,
        tau_max: float = TAU_MAX,
        learned_timescales: bool = False,
        settings: ControlSettings | None = None,
        rw_norm: bool = False,
        conv_kernel: int = 4,
        conv_bias: bool = True,
        use_D: bool = True,
        read_init: float = READ_INIT,
        write_init: float = WRITE_INIT,
        dt_init: float | None = None,
        gate_bias: float = 0.0,
        norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_heads, head_dim = head_sizes(hidden_size, num_heads, head_dim, FRAC_EXPAND)
        check_sizes(num_modes=num_modes, conv_kernel=conv_kernel)
        if not 0 < write_init < 1:
            raise ValueError(f"write_init must be in (0, 1), got {write_init}")
        self.settings = settings or ControlSettings()
        if dt_init is not None and not self.settings.dt_min <= dt_init <= self.settings.dt_max:
            raise ValueError(
                f"dt_init must be None or in [dt_min, dt_max] = [{self.settings.dt_min}, "
                f"{self.settings.dt_max}], got {dt_init}"
            )
        if learned_timescales and self.settings.prior == "exact":
            raise ValueError(
                "learned_timescales cannot be combined with the exact prior, whose bins need "
                "timescales in order; use prior='asymptotic'"
            )
        # Imported here, because numpy is needed only to build a layer.
        import numpy

        from flash_frac.theory.banks import resolve_bank

        tau = resolve_bank(bank, num_modes, tau_min, tau_max, num_heads)
        self.log_tau_init: list = numpy.log(tau).tolist()
        self.log_tau_range = (math.log(tau_min), math.log(tau_max))
        self.learned_timescales = learned_timescales
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_modes, self.conv_kernel = num_modes, conv_kernel
        self.read_init, self.write_init = read_init, write_init
        # The inverse of softplus.
        self.dt_bias_init = 0.0 if dt_init is None else math.log(math.expm1(dt_init))
        self.initializer_range, self.backend = initializer_range, backend
        self.context_group: ProcessGroup | None = None

        inner = num_heads * head_dim
        self.num_dynamics = num_dynamics(self.settings)
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv1d = CausalConv1d(inner, conv_kernel, bias=conv_bias)
        self.dyn_proj = nn.Linear(inner, self.num_dynamics * num_heads)
        self.rw_proj = nn.Linear(inner, 2 * num_heads * num_modes, bias=False)
        self.rw_norm = ModeRMSNorm(num_modes, norm_eps) if rw_norm else None
        self.out_norm = GatedRMSNorm(inner, norm_eps, gate_bias, backend=backend)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        values = self.initial_time_values()
        for name in ("dt_bias", "read_residual_logit", "write_residual_scale"):
            self.register_parameter(name, nn.Parameter(values[name]))
        self.register_parameter("D", nn.Parameter(values["D"]) if use_D else None)
        if learned_timescales:
            self.base_log_tau = nn.Parameter(values["base_log_tau"])
        else:
            self.register_buffer("base_log_tau", values["base_log_tau"])
        self.reset_parameters()

    def initial_time_values(self) -> dict[str, Tensor]:
        """New initial values of the tensors that carry time, by name."""
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        log_tau = torch.tensor(self.log_tau_init, dtype=dtype)
        if self.learned_timescales:
            low, high = self.log_tau_range
            log_tau = low + (high - low) * torch.rand(log_tau.shape, dtype=dtype)
        write_logit = math.log(self.write_init / (1 - self.write_init))
        return {
            "base_log_tau": log_tau,
            "dt_bias": torch.full((self.num_heads,), self.dt_bias_init, dtype=dtype),
            "read_residual_logit": torch.full((1,), self.read_init, dtype=dtype),
            "write_residual_scale": torch.full((1,), write_logit, dtype=dtype),
            "D": torch.zeros(self.num_heads, self.head_dim, dtype=dtype),
        }

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reinitialise all parameters."""
        for module in (self.in_proj, self.conv1d, self.dyn_proj, self.rw_proj, self.out_proj):
            nn.init.normal_(module.weight, std=self.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        for norm in (self.out_norm, self.rw_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)
        self.reset_time()

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
            elapsed: (B, T), positive: the time before each token, which multiplies its delta; 1 if
                None.

        Returns:
            y (B, T, E), and the state of the N sequences after their last real token.
        """
        check_inputs(self, {"conv1d": self.conv1d}, x, state, attention_mask, cu_seqlens, elapsed)
        projected = self.in_proj(x)
        is_plain = attention_mask is None and elapsed is None
        if is_plain and trains_at_once(self, projected, state, cu_seqlens):
            z, state = train_body(self, projected, state, cu_seqlens)
            return self.out_proj(z), state
        u, gate, controls, window = self._split(
            projected, state, attention_mask, cu_seqlens, elapsed
        )
        recurrent = None if state is None else state.recurrent
        if x.shape[1] == 1 and cu_seqlens is None and recurrent is not None:
            read, write, decay = (weights[:, 0] for weights in controls)
            y, recurrent = frac_step(u[:, 0], read, write, decay, recurrent, backend=self.backend)
            y = y[:, None]
        elif self.context_group is not None:
            group = self.context_group
            y, recurrent = sharded_scan(
                u, *controls, group=group, cu_seqlens=cu_seqlens, backend=self.backend
            )
        else:
            y, recurrent = frac_scan(
                u,
                *controls,
                initial_state=recurrent,
                cu_seqlens=cu_seqlens,
                backend=self.backend,
            )
        skip = None if self.D is None else (self.D, u)
        return self.out_proj(self.out_norm(y, gate, skip)), MixerState(recurrent, window)

    def scan_inputs(
        self,
        x: Tensor,
        *,
        state: MixerState | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> MixerInputs:
        """Projection, convolution and controls: everything in `forward` before the scan."""
        check_inputs(self, {"conv1d": self.conv1d}, x, state, attention_mask, cu_seqlens, elapsed)
        return self._split(self.in_proj(x), state, attention_mask, cu_seqlens, elapsed)

    def _split(
        self,
        projected: Tensor,
        state: MixerState | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        elapsed: Tensor | None,
    ) -> MixerInputs:
        """`scan_inputs` from the outputs (B, T, 2 I) of in_proj."""
        inner_x, gate = projected.chunk(2, -1)
        before = None if state is None else state.conv
        if self.context_group is not None:
            before = window_before(
                inner_x, self.conv_kernel, group=self.context_group, cu_seqlens=cu_seqlens
            )
        u, window = self.conv1d(
            inner_x,
            window=before,
            mask=attention_mask,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        controls = self.controls(inner_x, u, attention_mask, elapsed)
        return MixerInputs(u.unflatten(-1, (self.num_heads, -1)), gate, controls, window)

    def controls(
        self,
        inner_x: Tensor,
        u: Tensor,
        mask: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> Controls:
        """Read, write and log_decay (B, T, H, M), from (B, T, I) before and after the conv."""
        found = controls_from_logits(
            self.dyn_proj(inner_x),
            self.norm_logits(self.rw_proj(u)),
            self.dt_bias,
            self.read_residual_logit,
            self.write_residual_scale,
            self.base_log_tau,
            settings=self.settings,
            mask=mask,
            backend=self.backend,
        )
        return found if elapsed is None else dilate(found, elapsed, beta=self.settings.beta)

    def norm_logits(self, rw_logits: Tensor) -> Tensor:
        """Outputs of rw_proj, normed if the layer has rw_norm."""
        return rw_logits if self.rw_norm is None else self.rw_norm(rw_logits)

    def dynamics(self, dyn_logits: Tensor) -> Dynamics:
        """Delta, alpha, lam (..., H) of outputs (..., K H) of dyn_proj, in float32 or wider.

        Example: `mixer.dynamics(mixer.dyn_proj.bias)` is the value for a zero input.
        """
        logits = dyn_logits.to(torch.promote_types(dyn_logits.dtype, torch.float32))
        return split_dynamics(logits, self.dt_bias.to(logits), self.settings)

    def empty_state(self, batch_size: int) -> MixerState:
        """The state of B empty sequences: zeros."""
        weight = self.conv1d.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        sizes = (batch_size, self.num_heads, self.num_modes, self.head_dim)
        window = (batch_size, self.num_heads * self.head_dim, self.conv_kernel - 1)
        return MixerState(weight.new_zeros(sizes, dtype=wide), weight.new_zeros(window))

    @torch.no_grad()
    def idle_log_decay(self) -> Tensor:
        """log_decay (H, M) of the heads for a zero input, float32 or wider."""
        weight = self.conv1d.weight
        dyn = self.dynamics(self.dyn_proj(weight.new_zeros(1, weight.shape[0]))[0])
        log_tau = self.base_log_tau.to(dyn.delta.dtype)
        return mode_log_decay(dyn, log_tau, rho_eps=self.settings.rho_eps)

    def steps_in_place(self, x: Tensor, norm: RMSNorm) -> bool:
        """Whether `step_in_place` supports x (B, T, E): one token, no gradients, plain layers."""
        return x.shape[1] == 1 and self.runs_directly(x, norm)

    def runs_directly(self, x: Tensor, norm: RMSNorm) -> bool:
        """Whether kernels may compute this layer on norm(x), x (B, T, E), from its weights."""
        parts = (self.in_proj, self.conv1d, self.dyn_proj, self.rw_proj, self.out_proj)
        return (
            runs_directly(self, x, norm, parts, self.backend)
            and type(self.out_norm) is GatedRMSNorm
            and not is_watched(self.out_norm)
            and all(x.bias is None for x in (self.in_proj, self.rw_proj, self.out_proj))
            and self.settings.prior == "asymptotic"
            and self.context_group is None
        )

    def step_in_place(
        self, x: Tensor, norm: RMSNorm, state: MixerState, attention_mask: Tensor | None = None
    ) -> Tensor:
        """x + mixer(norm(x)) for one token (B, 1, E); `state` becomes the next state.

        Decoding is limited by kernel launches and weight reads, not arithmetic: this takes few
        kernels per block and reads each weight once. The general form is `forward`.
        """
        from flash_frac.layers.step import step

        mask = None if attention_mask is None else attention_mask[:, 0]
        return step(self, x[:, 0], norm, state, mask)[:, None]
