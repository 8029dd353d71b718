"""The state of a FracMixer or DeltaMixer between calls.

Letters: B sequences, H heads, M modes (key channels of a DeltaMixer), D head channels, I channels
of the convolution, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class MixerState(NamedTuple):
    """The recurrent state and the convolution's window of one layer.

    A tuple, so that torch.export, torch.func and DataParallel find the tensors in it.

    Attributes:
        recurrent: (B, H, M, D), float32 (float64 in a float64 model).
        conv: (B, I, K - 1), inputs of the convolution, in the dtype of the model.
    """

    recurrent: Tensor
    conv: Tensor

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MixerState:
        """Move to a device. `dtype` is for the window; the recurrent state keeps its precision."""
        return MixerState(self.recurrent.to(device), self.conv.to(device=device, dtype=dtype))

    def clone(self) -> MixerState:
        """A copy that shares no memory."""
        return MixerState(self.recurrent.clone(), self.conv.clone())

    def detach(self) -> MixerState:
        """The same values, detached from the autograd graph."""
        return MixerState(self.recurrent.detach(), self.conv.detach())

    def select(self, index: Tensor | Sequence[int] | slice) -> MixerState:
        """A new state with the sequences at `index`, in that order."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.recurrent.device)
            if index.ndim != 1:
                raise ValueError(f"index must be one-dimensional, got shape {tuple(index.shape)}")
        return MixerState(self.recurrent[index], self.conv[index])

    @staticmethod
    def cat(states: Sequence[MixerState]) -> MixerState:
        """One batch of all sequences of `states`, in order."""
        if not states:
            raise ValueError("states must hold at least one MixerState, got none")
        return MixerState(
            torch.cat([s.recurrent for s in states]), torch.cat([s.conv for s in states])
        )

    @property
    def batch_size(self) -> int:
        """B."""
        return self.recurrent.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.recurrent.nbytes + self.conv.nbytes
