"""FracMixer with `absorb`, as the other mixers have it.

Letters: B batch, T time, E width, H heads, D head channels, M modes.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flash_frac.layers import FracMixer, MixerState, causal_conv


class Frac(FracMixer):
    """A `FracMixer` that can also take a sequence in without computing what it would answer."""

    def absorb(
        self, x: Tensor, *, state: MixerState | None = None, elapsed: Tensor | None = None
    ) -> MixerState:
        """The state after x (B, T, E): each token's input, times all decay after it.

        In plain torch, because one product over all tokens gives it. `elapsed` as in `forward`.
        """
        self._check(x, state, None, None, elapsed)
        inner_x = F.linear(x, self.in_proj.weight[: self.num_heads * self.head_dim])
        u, window = causal_conv(
            inner_x,
            self.conv1d.weight,
            self.conv1d.bias,
            window=None if state is None else state.conv,
            backend=self.backend,
        )
        _, write, log_decay = self.controls(inner_x, u, elapsed=elapsed)
        write, log_decay = (x.permute(0, 2, 3, 1) for x in (write, log_decay))
        # Sums from the end, which are small where weights are not; differences would lose digits.
        to_end = log_decay.flip(-1).cumsum(-1).flip(-1)
        weights = write * F.pad(to_end[..., 1:], (0, 1)).exp()
        channels = u.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        recurrent = weights @ channels.to(weights.dtype)
        if state is not None:
            recurrent = recurrent + to_end[..., :1].exp() * state.recurrent
        return MixerState(recurrent, window)
