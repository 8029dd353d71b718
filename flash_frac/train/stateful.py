"""Truncated back-propagation through time: states carried from one batch to the next.

A batch holds the next segment of every lane, packed in one row. The first sequence of a lane
continues where its last one stopped; all others start with empty states.
Letters: b lanes, N sequences of a batch, W window of sliding attention.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flash_frac.layers import MixerState
from flash_frac.models import FracConfig
from flash_frac.models.cache import read_state, write_state
from flash_frac.models.lanes import LaneCache, LaneWindows


class CarriedStates:
    """The states of all layers at the end of each lane, detached from the graph.

    Attributes:
        states: states of frac and delta layers, by layer number.
        windows: the last W - 1 tokens of sliding layers; None if there are no such layers or no
            batch yet.
    """

    def __init__(self, config: FracConfig) -> None:
        full = [n for n, name in enumerate(config.mixer_types or ()) if name == "attention"]
        if full:
            raise ValueError(
                f"stateful must be false for a model with full attention (layers {full}), whose "
                "KV cache grows without limit; use sliding_attention, or set stateful to false"
            )
        self.config = config
        self.states: dict[int, MixerState] = {}
        self.windows: LaneWindows | None = None

    def cache(self, first_sequence: Tensor, num_sequences: int) -> LaneCache:
        """The cache for the N sequences of a batch, before their first token.

        Args:
            first_sequence: (b,), index of the first sequence in each lane.
        """
        lanes = {state.batch_size for state in self.states.values()}
        lanes |= set() if self.windows is None else {self.windows.seen.shape[0]}
        for num in lanes - {first_sequence.shape[0]}:
            raise ValueError(
                f"the carried states have {num} lanes, but this batch has "
                f"{first_sequence.shape[0]}: do not change per_device_train_batch_size"
            )
        cache = LaneCache(self.config, first_sequence, self.windows)
        for n, state in self.states.items():
            spread = [
                x.new_zeros(num_sequences, *x.shape[1:]).index_copy_(0, first_sequence, x)
                for x in state
            ]
            write_state(cache, n, MixerState(*spread))
        return cache

    def keep(self, cache: LaneCache, num_sequences: int) -> None:
        """Keep the final state of each lane from the cache that a forward pass returned."""
        first = cache.first_sequence
        after = torch.cat([first[1:], first.new_tensor([num_sequences])])
        with torch.no_grad():
            states = {n: read_state(cache, n) for n in cache.state_layers}
        self.states = {n: s.select(after - 1).detach() for n, s in states.items() if s is not None}
        if cache.sliding_layers:
            self.windows = cache.windows_after.detach()

    def save(self, path: Path) -> None:
        """Write all states; the file has no tensors before the first batch."""
        tensors = {}
        for n, state in self.states.items():
            tensors |= {f"{n}.recurrent": state.recurrent, f"{n}.conv": state.conv}
        if self.windows is not None:
            tensors |= {"real": self.windows.real, "seen": self.windows.seen}
            for n, (keys, values) in self.windows.layers.items():
                tensors |= {f"{n}.keys": keys, f"{n}.values": values}
        save_file({name: x.contiguous() for name, x in tensors.items()}, path)

    def load(self, path: Path, device: torch.device) -> None:
        """Read the file of `save`; raise ValueError naming it if it is missing."""
        if not path.exists():
            raise ValueError(
                f"{path} is missing: the checkpoint is incomplete, or made without stateful; "
                "set stateful to false, or start from its weights with model_name_or_path"
            )
        tensors = load_file(path, device=str(device))

        def pairs(one: str, other: str) -> dict[int, tuple[Tensor, Tensor]]:
            numbers = [name.split(".")[0] for name in tensors if name.endswith(f".{one}")]
            return {int(n): (tensors[f"{n}.{one}"], tensors[f"{n}.{other}"]) for n in numbers}

        self.states = {n: MixerState(*pair) for n, pair in pairs("recurrent", "conv").items()}
        self.windows = None
        if "seen" in tensors:
            layers = pairs("keys", "values")
            self.windows = LaneWindows(tensors["real"], tensors["seen"], layers)
