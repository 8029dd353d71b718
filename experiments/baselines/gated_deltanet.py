"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024).

    q, k, v   = silu(conv1d(proj(input))), q and k scaled to unit length
    beta      = sigmoid(b_proj(input))
    log_decay = -exp(A_log) softplus(a_proj(input) + dt_bias)
    y         = gated_delta_rule(q / sqrt(K), k, v, beta, log_decay)
    output    = o_proj(RMSNorm(y) silu(g_proj(input)))

Parameters have the names, shapes and initial values of flash-linear-attention's layer.

Letters: B batch, T time, E width, H heads, K key channels of a head, D its value channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines.delta_rule import gated_delta_rule, gated_delta_rule_state
from experiments.baselines.mixer import Mixer, initial_dt_bias
from flash_frac.layers import MixerState, RMSNorm, causal_conv

TAPS = 4
NORM_EPS = 1e-5
_UNIT_EPS = 1e-6


class GatedDeltaNet(Mixer):
    """A layer with a matrix state, corrected by the delta rule and decayed per head.

    Args:
        hidden_size: width E of input and output.
        num_heads: H.
        head_dim: K, channels of queries and keys.
        expand_v: D / K, channels of values; head_dim * expand_v must be whole.
    """

    def __init__(
        self, hidden_size: int, *, num_heads: int, head_dim: int, expand_v: float = 2.0
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim)
        self.value_dim = round(head_dim * expand_v)
        if self.value_dim < 1 or self.value_dim != head_dim * expand_v:
            raise ValueError(
                f"expand_v times head_dim ({head_dim}) must be a whole number, got {expand_v}"
            )
        keys, values = num_heads * head_dim, num_heads * self.value_dim
        self.qkv_sizes = [keys, keys, values]
        self.q_proj = nn.Linear(hidden_size, keys, bias=False)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(hidden_size, values, bias=False)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(0, 16).log())
        self.dt_bias = initial_dt_bias(num_heads)
        self.q_conv1d = nn.Conv1d(keys, keys, TAPS, groups=keys, bias=False)
        self.k_conv1d = nn.Conv1d(keys, keys, TAPS, groups=keys, bias=False)
        self.v_conv1d = nn.Conv1d(values, values, TAPS, groups=values, bias=False)
        self.g_proj = nn.Linear(hidden_size, values, bias=False)
        self.o_norm = RMSNorm(self.value_dim, NORM_EPS)
        self.o_proj = nn.Linear(values, hidden_size, bias=False)

    def forward(self, x: Tensor, *, state: MixerState | None = None) -> tuple[Tensor, MixerState]:
        """Mix (B, T, E), or continue from a state: y (B, T, E) and the state after it."""
        q, k, v, beta, log_decay, window = self._scan_inputs(x, state)
        recurrent = None if state is None else state.recurrent
        with torch.autocast(x.device.type, enabled=False):
            q = _unit(q) * self.head_dim**-0.5
            y, recurrent = gated_delta_rule(q, k, v, beta, log_decay, state=recurrent)
        gate = self.g_proj(x)
        y = self.o_norm(y.to(gate.dtype)).flatten(-2) * F.silu(gate)
        return self.o_proj(y), MixerState(recurrent, window)

    def absorb(self, x: Tensor, *, state: MixerState | None = None) -> MixerState:
        """The state after x (B, T, E), as `forward` has it, without any outputs."""
        _, k, v, beta, log_decay, window = self._scan_inputs(x, state)
        recurrent = None if state is None else state.recurrent
        with torch.autocast(x.device.type, enabled=False):
            recurrent = gated_delta_rule_state(k, v, beta, log_decay, state=recurrent)
        return MixerState(recurrent, window)

    def _scan_inputs(
        self, x: Tensor, state: MixerState | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k (B, T, H, K), v (B, T, H, D), beta, log_decay (B, T, H), and the window.

        In float32 or wider; keys have unit length, queries do not have it yet.
        """
        self._check(x, state)
        projections = (self.q_proj, self.k_proj, self.v_proj, self.a_proj, self.b_proj)
        # One product for all, because each alone is small beside reading x.
        projected = F.linear(x, torch.cat([p.weight for p in projections]))
        qkv, a, b = projected.split([sum(self.qkv_sizes), self.num_heads, self.num_heads], -1)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = torch.cat([conv.weight for conv in convolutions])
        u, window = causal_conv(qkv, weight, None, window=None if state is None else state.conv)
        dtype = torch.promote_types(u.dtype, torch.float32)
        q, k, v = (
            part.to(dtype).unflatten(-1, (self.num_heads, -1))
            for part in u.split(self.qkv_sizes, -1)
        )
        log_decay = -self.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + self.dt_bias)
        return q, _unit(k), v, b.to(dtype).sigmoid(), log_decay, window

    def _check(self, x: Tensor, state: MixerState | None) -> None:
        recurrent = (self.num_heads, self.head_dim, self.value_dim)
        self.check(x, state, recurrent=recurrent, conv=(sum(self.qkv_sizes), TAPS - 1))


def _unit(x: Tensor) -> Tensor:
    """x scaled to unit length over its last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)
