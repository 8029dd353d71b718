"""Samplers whose order depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler


class EpochOrder(Sampler[int]):
    """Indices of a dataset in full batches, each batch `repeats` times in a row.

    Processes take batches in turn, so with `repeats` = n each n of them get the same batch: the
    ranks that share a sequence. The order depends only on (seed, epoch), so a run that resumes
    repeats it.

    Args:
        size: number of items; those of an incomplete last batch are left out of the epoch.
        seed: None keeps the items in order.
    """

    def __init__(self, size: int, batch_size: int, *, repeats: int = 1, seed: int | None) -> None:
        self.size, self.batch_size, self.repeats, self.seed = size, batch_size, repeats, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch whose order is used."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size // self.batch_size * self.batch_size * self.repeats

    def __iter__(self) -> Iterator[int]:
        indices = torch.arange(self.size)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            indices = torch.randperm(self.size, generator=generator)
        for start in range(0, self.size - self.batch_size + 1, self.batch_size):
            for _ in range(self.repeats):
                yield from indices[start : start + self.batch_size].tolist()


class EvalShard(Dataset[Any]):
    """The items of one of n processes, padded with items without labels to the same number for all.

    Processes that exchange tensors in the forward pass must all run the same number of them.
    """

    def __init__(self, dataset: Any, rank: int, count: int) -> None:
        self.dataset, self.rank, self.count = dataset, rank, count

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.count)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = index * self.count + self.rank
        if position < len(self.dataset):
            return self.dataset[position]
        item = dict(self.dataset[len(self.dataset) - 1])
        item["shift_labels"] = item["shift_labels"] * 0 - 100
        return item
