"""Mamba3 with one input and one output per head (SISO), one group of B and C.

    z, x, B, C, dt, rate, trap, angle = in_proj(input)
    dt        = softplus(dt + dt_bias)            log_decay = -dt max(tail(rate), 1e-4)
    theta[t]  = theta[t - 1] + pi tanh(angle[t]) dt[t]
    k, q      = RMSNorm(B) + B_bias, RMSNorm(C) + C_bias, pairs of channels rotated by theta
    now, last = dt sigmoid(trap), dt (1 - sigmoid(trap))
    S[t]      = exp(log_decay[t]) (S[t - 1] + last[t] k[t - 1] x[t - 1]^T) + now[t] k[t] x[t]^T
    output    = out_proj((S^T q + D x) silu(z))

with tail(r) = 1 + r for r >= 0 and 1 / (1 - r) below. For all later outputs, the two taps of an
input, now and at the next token, are one write of weight now[t] + last[t + 1], so the scan is that
of Mamba2 except for its diagonal. Parameters have the names, shapes and initial values of
state-spaces/mamba.

Letters: B batch, T time, E width, H heads, D head channels, I = H D, N state size, A angles.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines.mixer import Mixer, initial_dt_bias
from experiments.baselines.ssd import ssd, ssd_state
from flash_frac.layers import RMSNorm

RATE_FLOOR = 1e-4
NORM_EPS = 1e-5


class Mamba3State(NamedTuple):
    """The state (B, H, N, D), theta in [0, 2 pi) (B, H, A), and the last k and x (B, H, N or D)."""

    recurrent: Tensor
    theta: Tensor
    key: Tensor
    value: Tensor


class _ScanInputs(NamedTuple):
    """k (B, H, T, N), rotated, x (B, H, T, D); log_decay, now, write (B, H, T); theta; first state.

    write is now[t] + last[t + 1]; the last token has only now[t], because the next is unknown.
    """

    k: Tensor
    x: Tensor
    log_decay: Tensor
    now: Tensor
    write: Tensor
    theta: Tensor
    first: Tensor | None


class Mamba3(Mixer):
    """A selective state-space layer with complex decays and a two-tap input.

    Args:
        hidden_size: width E of input and output.
        num_heads: H.
        head_dim: D; the inner width I = H D is usually 2 E.
        state_size: N, even.
        rope_fraction: share of the N channels that are rotated, 0.5 or 1.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int = 128,
        rope_fraction: float = 0.5,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim)
        if rope_fraction not in (0.5, 1.0):
            raise ValueError(f"rope_fraction must be 0.5 or 1, got {rope_fraction}")
        self.num_angles = int(state_size * rope_fraction) // 2
        if state_size % 2 or self.num_angles < 1:
            raise ValueError(
                f"state_size must be even, with a pair of channels to turn, got {state_size}; "
                "4 is always enough"
            )
        self.state_size, self.inner_size = state_size, num_heads * head_dim
        self.sizes = [self.inner_size, state_size, state_size, *(num_heads,) * 3, self.num_angles]
        self.in_proj = nn.Linear(hidden_size, self.inner_size + sum(self.sizes), bias=False)
        self.dt_bias = initial_dt_bias(num_heads)
        # The axis of size 1 matches the published shape, for inputs and outputs of a head.
        self.B_bias = nn.Parameter(torch.ones(num_heads, 1, state_size))
        self.C_bias = nn.Parameter(torch.ones(num_heads, 1, state_size))
        self.B_norm = RMSNorm(state_size, NORM_EPS)
        self.C_norm = RMSNorm(state_size, NORM_EPS)
        self.D = nn.Parameter(torch.ones(num_heads))
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor, *, state: Mamba3State | None = None) -> tuple[Tensor, Mamba3State]:
        """Mix (B, T, E), or continue from a state: y (B, T, E) and the state after it."""
        self._check(x, state)
        gate, rest = self.in_proj(x).split([self.inner_size, sum(self.sizes)], -1)
        s = self._scan_inputs(rest, state)
        q = self.C_norm(rest.split(self.sizes, -1)[2]).to(s.k.dtype)[:, None] + self.C_bias
        with torch.autocast(x.device.type, enabled=False):
            q = _turn(q, s.theta)
            written = (s.x * s.write[..., None])[..., None, :]
            y, recurrent = ssd(
                q, s.k, written, s.log_decay[..., None], state=s.first, diagonal=False
            )
            # Rotating both by the same angle leaves their product unchanged.
            direct = (q * s.k).sum(-1) * s.now + self.D[:, None]
            y = torch.addcmul(y.squeeze(3), s.x, direct[..., None])
        y = y.transpose(1, 2).flatten(-2).to(gate.dtype) * F.silu(gate)
        return self.out_proj(y), _state_after(s, recurrent)

    def absorb(self, x: Tensor, *, state: Mamba3State | None = None) -> Mamba3State:
        """The same state after x (B, T, E) as `forward` returns, without computing outputs."""
        self._check(x, state)
        s = self._scan_inputs(F.linear(x, self.in_proj.weight[self.inner_size :]), state)
        with torch.autocast(x.device.type, enabled=False):
            written = (s.x * s.write[..., None])[..., None, :]
            recurrent = ssd_state(s.k, written, s.log_decay[..., None], state=s.first)
        return _state_after(s, recurrent)

    def _scan_inputs(self, projected: Tensor, state: Mamba3State | None) -> _ScanInputs:
        dtype = torch.promote_types(projected.dtype, torch.float32)
        x, b, _, *scalars, angle = projected.split(self.sizes, -1)
        dt, rate, trap = (scalar.to(dtype).transpose(1, 2) for scalar in scalars)
        dt = F.softplus(dt + self.dt_bias[:, None])
        tail = rate.clamp_min(0) + (1 - rate.clamp_max(0)).reciprocal()
        now = dt * trap.sigmoid()
        last = dt - now
        theta = self._theta(angle.to(dtype), dt, state)
        k = _turn(self.B_norm(b).to(dtype)[:, None] + self.B_bias, theta)
        first = None
        if state is not None:
            held = state.key[..., :, None] * state.value[..., None, :]
            first = (state.recurrent + held * last[:, :, :1, None])[:, :, :, None]
        return _ScanInputs(
            k,
            x.to(dtype).unflatten(-1, (self.num_heads, -1)).transpose(1, 2),
            -dt * tail.clamp_min(RATE_FLOOR),
            now,
            now + F.pad(last[:, :, 1:], (0, 1)),
            theta,
            first,
        )

    def _theta(self, angle: Tensor, dt: Tensor, state: Mamba3State | None) -> Tensor:
        """Angles (B, H, T, A) so far, in [0, 2 pi), from those (B, T, A) of the tokens."""
        step = math.pi * angle.tanh().mT[:, None] * dt[:, :, None]
        # Summed in float64, because a long sequence has thousands of turns; along the last axis,
        # because along any other a GPU sums token by token.
        theta = step.double().cumsum(-1)
        if state is not None:
            theta = theta + state.theta[..., None]
        return theta.remainder(2 * math.pi).to(angle.dtype).mT.contiguous()

    def _check(self, x: Tensor, state: Mamba3State | None) -> None:
        self.check(
            x,
            state,
            recurrent=(self.num_heads, self.state_size, self.head_dim),
            theta=(self.num_heads, self.num_angles),
            key=(self.num_heads, self.state_size),
            value=(self.num_heads, self.head_dim),
        )


def _turn(x: Tensor, theta: Tensor) -> Tensor:
    """Rotate the first A pairs of adjacent channels of x (B, H, T, N) by theta (B, H, T, A)."""
    turning, still = x.tensor_split([2 * theta.shape[-1]], -1)
    pairs = torch.view_as_complex(turning.unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(theta), theta))
    return torch.cat([turned.flatten(-2), still], -1)


def _state_after(s: _ScanInputs, recurrent: Tensor) -> Mamba3State:
    return Mamba3State(recurrent[:, :, :, 0], s.theta[:, :, -1], s.k[:, :, -1], s.x[:, :, -1])
