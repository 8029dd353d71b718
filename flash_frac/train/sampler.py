"""Which sequences a batch holds: a function of seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler


class EpochOrder(Sampler[int]):
    """Indices of a dataset in full batches, each batch `repeats` times in a row.

    Processes take batches in turn, so that with `repeats` = n each n of them get the same batch:
    the ranks that share a sequence. The order is a function of (seed, epoch), whatever ran before:
    a run that resumes finds it again.

    Args:
        size: how many items there are; those that fill no batch are left out of the epoch.
        seed: None keeps the items in order.
    """

    def __init__(self, size: int, batch_size: int, *, repeats: int = 1, seed: int | None) -> None:
        self.size, self.batch_size, self.repeats, self.seed = size, batch_size, repeats, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
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
    """The items of one of n processes: as many for each, with filled-up ones that predict nothing.

    Processes must make the same number of forward passes where these exchange tensors.
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
