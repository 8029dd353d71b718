"""Mamba2, the layer of "Transformers are SSMs" (Dao and Gu, 2024), one group of B and C.

    z, xBC, dt = in_proj(input)                   x, B, C = silu(conv1d(xBC))
    dt         = softplus(dt + dt_bias)           log_decay = -dt exp(A_log)
    S[t]       = exp(log_decay[t]) S[t - 1] + B[t] (dt[t] x[t])^T
    output     = out_proj(RMSNorm((S^T C + D x) silu(z)))

Parameters have the names, shapes and initial values of state-spaces/mamba.

Letters: B batch, T time, E width, H heads, D head channels, I = H D, N state size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines.mixer import Mixer, initial_dt_bias
from experiments.baselines.ssd import ssd, ssd_state
from flash_frac.layers import GatedRMSNorm, MixerState, causal_conv

TAPS = 4
NORM_EPS = 1e-5


class Mamba2(Mixer):
    """A selective state-space layer with one decay per head.

    Args:
        hidden_size: width E of input and output.
        num_heads: H.
        head_dim: D; the inner width I = H D is usually 2 E.
        state_size: N.
    """

    def __init__(
        self, hidden_size: int, *, num_heads: int, head_dim: int, state_size: int = 128
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, state_size=state_size)
        self.state_size = state_size
        self.inner_size = num_heads * head_dim
        self.conv_size = self.inner_size + 2 * state_size
        projected = self.inner_size + self.conv_size + num_heads
        self.in_proj = nn.Linear(hidden_size, projected, bias=False)
        self.conv1d = nn.Conv1d(self.conv_size, self.conv_size, TAPS, groups=self.conv_size)
        self.dt_bias = initial_dt_bias(num_heads)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = GatedRMSNorm(self.inner_size, NORM_EPS)
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=False)

    def forward(
        self, x: Tensor, *, state: MixerState | None = None, elapsed: Tensor | None = None
    ) -> tuple[Tensor, MixerState]:
        """Mix (B, T, E), or continue from a state: y (B, T, E) and the state after it.

        elapsed (B, T), positive, is the time before each token; it multiplies the token's dt.
        """
        self._check(x, state)
        sizes = [self.inner_size, self.conv_size, self.num_heads]
        gate, xbc, dt = self.in_proj(x).split(sizes, -1)
        q, k, v, dt, log_decay, window = self._scan_inputs(xbc, dt, state, elapsed)
        with torch.autocast(x.device.type, enabled=False):
            y, recurrent = ssd(q, k, v * dt[..., None], log_decay, state=_grouped(state))
            y = torch.addcmul(y, v, self.D.to(y.dtype)[:, None]).squeeze(1)
        y = self.out_proj(self.norm(y.contiguous(), gate))
        return y, MixerState(recurrent[:, 0].transpose(1, 2), window)

    def absorb(
        self, x: Tensor, *, state: MixerState | None = None, elapsed: Tensor | None = None
    ) -> MixerState:
        """The same state after x (B, T, E) as `forward` returns, without computing outputs."""
        self._check(x, state)
        rest = F.linear(x, self.in_proj.weight[self.inner_size :])
        xbc, dt = rest.split([self.conv_size, self.num_heads], -1)
        _, k, v, dt, log_decay, window = self._scan_inputs(xbc, dt, state, elapsed)
        with torch.autocast(x.device.type, enabled=False):
            recurrent = ssd_state(k, v * dt[..., None], log_decay, state=_grouped(state))
        return MixerState(recurrent[:, 0].transpose(1, 2), window)

    def _scan_inputs(
        self, xbc: Tensor, dt: Tensor, state: MixerState | None, elapsed: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """C, B (B, 1, T, N), x (B, 1, T, H, D), dt and log_decay (B, 1, T, H), and the window."""
        window = None if state is None else state.conv
        u, window = causal_conv(xbc, self.conv1d.weight, self.conv1d.bias, window=window)
        dtype = torch.promote_types(u.dtype, torch.float32)
        sizes = [self.inner_size, self.state_size, self.state_size]
        v, k, q = u.to(dtype)[:, None].split(sizes, -1)
        dt = F.softplus(dt.to(dtype) + self.dt_bias)[:, None]
        if elapsed is not None:
            dt = dt * elapsed.to(dtype)[:, None, :, None]
        log_decay = -dt * self.A_log.to(dtype).exp()
        return q, k, v.unflatten(-1, (self.num_heads, -1)), dt, log_decay, window

    def _check(self, x: Tensor, state: MixerState | None) -> None:
        recurrent = (self.num_heads, self.state_size, self.head_dim)
        self.check(x, state, recurrent=recurrent, conv=(self.conv_size, TAPS - 1))


def _grouped(state: MixerState | None) -> Tensor | None:
    """Convert (B, H, N, D) to the layout of `ssd`, (B, 1, N, H, D)."""
    return None if state is None else state.recurrent.transpose(1, 2)[:, None]
