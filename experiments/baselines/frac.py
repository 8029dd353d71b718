"""FracMixer with `absorb`, like the other mixers.

Letters: B batch, T time, E width.
"""

from __future__ import annotations

from torch import Tensor

from flash_frac.layers import FracMixer, MixerState
from flash_frac.ops.context_parallel import summarize


class Frac(FracMixer):
    """A `FracMixer` that can also absorb a sequence without computing outputs."""

    def absorb(
        self, x: Tensor, *, state: MixerState | None = None, elapsed: Tensor | None = None
    ) -> MixerState:
        """The state after x (B, T, E): the sum of each token's input times all decay after it.

        In plain torch: it is a single product over all tokens. `elapsed` as in `forward`.
        """
        u, _, controls, window = self.scan_inputs(x, state=state, elapsed=elapsed)
        added, kept = summarize(u, controls.write, controls.log_decay)
        if state is not None:
            added = added + kept[..., None] * state.recurrent
        return MixerState(added, window)
