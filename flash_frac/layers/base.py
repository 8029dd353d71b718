"""What the layers with a recurrent state have in common: that state, and the precision of time.

Letters: B sequences, H heads, M modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from flash_frac.layers.state import MixerState


class RecurrentMixer(nn.Module):
    """A layer whose own tensors carry time: float32 whatever the dtype of the rest.

    They are exactly the tensors this module owns itself; the rest belongs to its children.
    """

    def initial_time_values(self) -> dict[str, Tensor]:
        """Fresh values of the tensors that carry time, by name; a layer may be without one."""
        raise NotImplementedError

    def empty_state(self, batch_size: int) -> MixerState:
        """The state of B sequences without tokens: zeros."""
        raise NotImplementedError

    def idle_log_decay(self) -> Tensor:
        """log_decay of the heads' states for an input of zero: (H, M), or (H, 1) for all alike."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_time(self) -> None:
        """Draw the tensors that carry time anew."""
        for name, value in self.initial_time_values().items():
            if (tensor := getattr(self, name)) is not None:
                tensor.copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in nn.Module, except that no cast takes the tensors that carry time below float32."""

        def keep_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrowed = result.is_floating_point() and result.dtype.itemsize < 4
            return tensor.to(result.device) if narrowed else result

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keep_precision, recurse=False)
