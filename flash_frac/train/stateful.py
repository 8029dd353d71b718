"""Truncated back-propagation through time: states carried from one batch to the next.

A batch holds the next segment of every lane, packed in one row. The first sequence of a lane goes
on where its last one stopped; all others begin afresh.
Letters: b lanes, N sequences of a batch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flash_frac.layers import MixerState
from flash_frac.models import FracCache, FracConfig
from flash_frac.models.cache import read_state, write_state


class CarriedStates:
    """The states of all layers at the end of each lane, cut off from the graph."""

    def __init__(self, config: FracConfig) -> None:
        if config.attention_layers:
            raise ValueError(
                "stateful must be false for a model with attention_layers "
                f"({config.attention_layers}), whose keys and values have no fixed size to carry"
            )
        self.config = config
        self.layers: list[MixerState] = []

    def cache(self, first_sequence: Tensor, num_sequences: int) -> FracCache:
        """A cache of the N sequences of a batch, before their first token.

        Args:
            first_sequence: (b,), index of the first sequence of each lane.
        """
        cache = FracCache(self.config)
        for index, state in enumerate(self.layers):
            if state.batch_size != first_sequence.shape[0]:
                raise ValueError(
                    f"the states of {state.batch_size} lanes were carried, but this batch has "
                    f"{first_sequence.shape[0]}: keep per_device_train_batch_size as it was"
                )
            spread = [
                x.new_zeros(num_sequences, *x.shape[1:]).index_copy_(0, first_sequence, x)
                for x in (state.recurrent, state.conv)
            ]
            write_state(cache, index, MixerState(*spread))
        return cache

    def keep(self, cache: FracCache, first_sequence: Tensor, num_sequences: int) -> None:
        """Take the states at the end of each lane from the cache that a forward pass returned."""
        after = torch.cat([first_sequence[1:], first_sequence.new_tensor([num_sequences])])
        with torch.no_grad():
            states = (read_state(cache, index) for index in range(len(cache.layers)))
            self.layers = [s.select(after - 1).detach() for s in states if s is not None]

    def save(self, path: Path) -> None:
        """Write the states; nothing if there are none yet."""
        tensors = {}
        for index, state in enumerate(self.layers):
            tensors |= {f"{index}.recurrent": state.recurrent, f"{index}.conv": state.conv}
        if tensors:
            save_file({name: x.contiguous() for name, x in tensors.items()}, path)

    def load(self, path: Path, device: torch.device) -> None:
        """Read what `save` has written, or begin without states if it wrote nothing."""
        tensors = load_file(path, device=str(device)) if path.exists() else {}
        self.layers = [
            MixerState(tensors[f"{index}.recurrent"], tensors[f"{index}.conv"])
            for index in range(len(tensors) // 2)
        ]
