"""The levels at which snapshots are kept: the device, then host memory, then a folder.

Each level has a budget in bytes. When it is full, demoted and least recently used snapshots move
down one level; below the last level they are dropped.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers.utils import logging

from flash_frac.inference.prefixes.files import PrefixFolder
from flash_frac.inference.prefixes.snapshots import Part, Snapshot, new_memory, packed, views

logger = logging.get_logger(__name__)
T = TypeVar("T")

DEVICE, HOST, DISK = 0, 1, 2


@dataclass(frozen=True)
class PrefixStats:
    """Totals since the start, and current sizes.

    Attributes:
        hits, misses: prompts with and without a cached prefix.
        tokens_asked, tokens_reused: tokens of all prompts, and those of cached prefixes.
        refused: states not kept because they were larger than the budgets or memory ran out.
        moved_to_host, moved_to_disk: snapshots (of states, keys and values) moved to that level.
        dropped: snapshots evicted from the last level.
        damaged: snapshots whose file was damaged or gone when it was needed, or whose numbers were
            NaN or infinite.
        snapshots: number of snapshots held.
        device_bytes, host_bytes, disk_bytes: bytes held at each level.
    """

    hits: int
    misses: int
    tokens_asked: int
    tokens_reused: int
    refused: int
    moved_to_host: int
    moved_to_disk: int
    dropped: int
    damaged: int
    snapshots: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


@dataclass
class Level:
    """Snapshots in one kind of memory, least recently used first, and their bytes.

    Attributes:
        arrived: number of snapshots that have moved here so far.
    """

    budget: int
    nbytes: int = 0
    arrived: int = 0
    held: OrderedDict[Snapshot, int] = field(default_factory=OrderedDict)

    def add(self, snapshot: Snapshot, nbytes: int) -> None:
        """Add a snapshot as the most recently used one."""
        self.held[snapshot] = nbytes
        self.nbytes += nbytes


class Levels:
    """Where snapshots are kept.

    Args:
        budgets: bytes that each level may hold: tensors in memory (on a GPU with what PyTorch adds
            to large ones), whole files on disk.
        device: device of the first level.
        folder: folder of the last level; None if it is not used.
        forget: called with each snapshot after it is dropped.

    Attributes:
        dropped: number of evicted snapshots.
        damaged: number of those whose file was damaged or whose numbers were not finite.
    """

    def __init__(
        self,
        budgets: Sequence[int],
        device: torch.device,
        folder: PrefixFolder | None,
        forget: Callable[[Snapshot], None],
    ) -> None:
        self.table = [Level(budget) for budget in budgets]
        self.device, self.dropped, self.damaged = device, 0, 0
        self._folder, self._forget = folder, forget

    @property
    def budget(self) -> int:
        """Bytes of all levels."""
        return sum(level.budget for level in self.table)

    @property
    def largest(self) -> int:
        """Bytes of the largest snapshot that fits in some level."""
        return max(level.budget for level in self.table)

    def check_memory(self) -> None:
        """Raise a ValueError if the device has less free memory than its level may still use."""
        level = self.table[DEVICE]
        most = level.nbytes + free_bytes(self.device)
        if level.budget > most:
            raise ValueError(
                f"device_bytes (--prefix-device-gib) must be at most {most / 2**30:.2f} GiB, which "
                f"is what the model and the slots leave free on {self.device}, got "
                f"{level.budget / 2**30:.2f} GiB; lower it, or have fewer slots"
            )

    def keep(self, snapshot: Snapshot, memory: Tensor | None, first: int = DEVICE) -> None:
        """Keep a snapshot at the first level that is large enough, from `first` on.

        Others move down to make room. It is forgotten if no level is large enough.
        """
        for number in range(first, len(self.table)):
            if self._store(snapshot, memory, number):
                self.table[number].arrived += 1
                self.make_room(number)
                return
            if snapshot.owner.gone:
                # What was evicted because memory ran out has taken it along.
                return
        self._drop(snapshot)

    def adopt(self, snapshot: Snapshot, path: Path) -> None:
        """Add a snapshot whose file is already in the folder."""
        snapshot.level, snapshot.path = DISK, path
        self.table[DISK].add(snapshot, path.stat().st_size)

    def make_room(self, number: int) -> None:
        """Push snapshots down until a level is within its budget."""
        level = self.table[number]
        while level.nbytes > level.budget:
            self._push_down(next(iter(level.held)), number + 1)

    def save(self) -> None:
        """Move all snapshots to the folder, the most recently used last."""
        for number in (HOST, DEVICE):
            while self.table[number].held:
                self._push_down(next(iter(self.table[number].held)), DISK)

    def split(self, old: Snapshot, memory: Tensor, *new: Snapshot) -> None:
        """Replace a snapshot of keys and values by several, for consecutive parts of its tokens."""
        number, begin = old.level, 0
        assert number is not None
        if old.copied is not None:
            # Wait, because the CPU will read what the GPU writes.
            old.copied.synchronize()
        whole = views(memory, old.parts)
        self.discard(old)
        for snapshot in new:
            end = begin + snapshot.parts[0].shape[2]
            columns = {name: x[:, :, begin:end] for name, x in whole.items()}
            pack = partial(packed, columns, snapshot.parts, memory.device)
            part = self.attempt(
                min(number, HOST), snapshot.nbytes, partial(pack, pinned=memory.is_pinned())
            )
            if part is None or not self._store(snapshot, part, number):
                self._drop(snapshot)
                break
            begin = end
        # Two files are larger than one, so the level may exceed its budget.
        self.make_room(number)

    def attempt(self, number: int, nbytes: int, make: Callable[[], T | None]) -> T | None:
        """The result of a function that allocates this much memory of a level.

        If memory runs out, that much is evicted for the next time, and the result is None.
        """
        try:
            return make()
        except torch.OutOfMemoryError as error:
            logger.warning_once(
                f"memory for prefix states ran out within their budgets, which should be lower: "
                f"{error}"
            )
        level = self.table[number]
        rest = max(0, level.nbytes - nbytes)
        while level.nbytes > rest:
            self._push_down(next(iter(level.held)), number + 1)
        return None

    def load(self, snapshot: Snapshot) -> Tensor | None:
        """The bytes of a snapshot, on the device or in host memory; read only.

        None if its file is damaged or its numbers are not finite; the snapshot is then dropped.
        """
        if not self.verify(snapshot):
            return None
        if snapshot.level != DISK:
            return snapshot.memory
        assert self._folder is not None
        memory = self._folder.read(snapshot)
        if memory is None:
            self._reject(snapshot)
        return memory

    def verify(self, snapshot: Snapshot) -> bool:
        """Whether the numbers of a snapshot are finite; otherwise it is dropped."""
        if snapshot.is_finite():
            return True
        self._reject(snapshot)
        return False

    def on_device(self, snapshot: Snapshot, memory: Tensor) -> Tensor:
        """The bytes of a snapshot on the device, given those from `load`."""
        held = snapshot.memory if snapshot.level == DEVICE else None
        return memory.to(self.device, non_blocking=True) if held is None else held

    def touch(self, snapshots: Sequence[Snapshot]) -> None:
        """Mark snapshots as just used, in order."""
        for snapshot in snapshots:
            if snapshot.level is not None:
                self.table[snapshot.level].held.move_to_end(snapshot)

    def demote(self, snapshots: Sequence[Snapshot]) -> None:
        """Make snapshots the first to be evicted, the last of them first."""
        for snapshot in snapshots:
            if snapshot.level is not None:
                self.table[snapshot.level].held.move_to_end(snapshot, last=False)

    def raise_up(self, snapshots: Sequence[Snapshot], memories: Sequence[Tensor]) -> None:
        """Move snapshots, given their bytes, to the first level that can hold all of them."""
        total = sum(allocated(snapshot.nbytes, self.device) for snapshot in snapshots)
        fitting = [n for n, level in enumerate(self.table) if total <= level.budget]
        for snapshot, memory in zip(snapshots, memories, strict=True):
            # Moving an earlier one may have evicted or moved this one.
            if fitting and snapshot.level is not None and snapshot.level > fitting[0]:
                self.discard(snapshot)
                self.keep(snapshot, memory, fitting[0])

    def discard(self, snapshot: Snapshot) -> None:
        """Remove a snapshot from its level, if it is in one."""
        if snapshot.level is not None:
            level = self.table[snapshot.level]
            level.nbytes -= level.held.pop(snapshot)
        if snapshot.path is not None:
            assert self._folder is not None
            self._folder.delete(snapshot.path)
        snapshot.level = snapshot.memory = snapshot.copied = snapshot.path = None

    def _reject(self, snapshot: Snapshot) -> None:
        self.damaged += 1
        self.discard(snapshot)
        self._forget(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        self.dropped += 1
        self._forget(snapshot)

    def _push_down(self, snapshot: Snapshot, first: int) -> None:
        memory, copied = snapshot.memory, snapshot.copied
        self.discard(snapshot)
        # Its copy to the host may still be running.
        snapshot.copied = copied
        self.keep(snapshot, memory, first)

    def _store(self, snapshot: Snapshot, memory: Tensor | None, number: int) -> bool:
        """Store a snapshot at a level if it fits; return whether it did."""
        assert memory is not None
        size = allocated(snapshot.nbytes, self.device) if number == DEVICE else snapshot.nbytes
        if size > self.table[number].budget:
            return False
        if number == DISK:
            return self._store_on_disk(snapshot, memory)
        memory = self.attempt(
            number, snapshot.nbytes, partial(self._moved, snapshot, memory, number)
        )
        if memory is None:
            return False
        snapshot.level, snapshot.memory = number, memory
        self.table[number].add(snapshot, size)
        return True

    def _moved(self, snapshot: Snapshot, memory: Tensor, number: int) -> Tensor:
        """The bytes of a snapshot in the memory of a level."""
        if number == DEVICE:
            # Host memory is not written while this asynchronous copy runs.
            return memory.to(self.device, non_blocking=True)
        if memory.is_cuda:
            memory, snapshot.copied = _to_host(memory, snapshot.parts)
        elif self.device.type == "cuda" and not memory.is_pinned():
            memory = new_memory(snapshot.parts, "cpu", pinned=True).copy_(memory)
        return memory

    def _store_on_disk(self, snapshot: Snapshot, memory: Tensor) -> bool:
        if self._folder is None or not snapshot.is_finite():
            return False
        if snapshot.copied is not None:
            # Wait, because the CPU will read what the GPU writes.
            snapshot.copied.synchronize()
        path = self._folder.write(snapshot, memory)
        if path is None:
            return False
        if path.stat().st_size > self.table[DISK].budget:
            self._folder.delete(path)
            return False
        snapshot.copied = None
        self.adopt(snapshot, path)
        return True


def check_budgets(sizes: Mapping[str, int], folder: str | Path | None) -> None:
    """Raise a ValueError if the budgets in bytes, by argument, are negative or lack the folder."""
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must be 0 or more, got {size}")
    if (folder is None) != (sizes["disk_bytes"] == 0):
        raise ValueError(
            "disk_bytes (--prefix-disk-gib) and folder (--prefix-folder) belong together, got "
            f"{sizes['disk_bytes']} and {folder}; give both or neither"
        )


def free_bytes(device: torch.device) -> float:
    """Memory that can still be allocated on a GPU; there is no limit for other devices."""
    if device.type != "cuda":
        return math.inf
    # PyTorch keeps the memory of freed tensors.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def allocated(nbytes: int, device: torch.device) -> int:
    """Bytes that PyTorch takes from a device for a tensor."""
    if device.type != "cuda" or nbytes < 10 * 2**20:
        return nbytes
    return -(-nbytes // 2**21) * 2**21


def _to_host(memory: Tensor, parts: Sequence[Part]) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy to pinned memory; return it and the event that marks its end.

    Until then, later copies in the same stream may use it, but the CPU may not. PyTorch reuses
    neither block of memory before the copy ends.
    """
    host = new_memory(parts, "cpu", pinned=True)
    host.copy_(memory, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(memory.device))
    return host, event
