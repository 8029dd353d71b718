"""Base class of layers with a recurrent state: the state, and the precision of time tensors.

Letters: B sequences, H heads, M modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from flash_frac.layers.state import MixerState


class RecurrentMixer(nn.Module):
    """A layer whose own tensors carry time: they stay float32 whatever the dtype of the rest.

    These are exactly the tensors that this module owns directly; all others belong to children.
    """

    def initial_time_values(self) -> dict[str, Tensor]:
        """New initial values of the tensors that carry time, by name; a layer may lack some."""
        raise NotImplementedError

    def empty_state(self, batch_size: int) -> MixerState:
        """The state of B empty sequences: zeros."""
        raise NotImplementedError

    def idle_log_decay(self) -> Tensor:
        """log_decay of the heads for a zero input: (H, M), or (H, 1) if modes share it."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_time(self) -> None:
        """Reinitialise the tensors that carry time."""
        for name, value in self.initial_time_values().items():
            if (tensor := getattr(self, name)) is not None:
                tensor.copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in nn.Module, but casts keep the tensors that carry time in float32 or wider."""

        def keep_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrowed = result.is_floating_point() and result.dtype.itemsize < 4
            return tensor.to(result.device) if narrowed else result

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keep_precision, recurse=False)
