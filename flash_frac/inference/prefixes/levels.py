"""The levels at which snapshots are kept: the device, then host memory, then a folder.

Each level has a budget in bytes. When it is full, what was demoted or not used for longest moves
down, and is gone below the last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from flash_frac.inference.prefixes.files import PrefixFolder
from flash_frac.inference.prefixes.snapshots import Part, Snapshot, new_memory, packed, views

DEVICE, HOST, DISK = 0, 1, 2


@dataclass
class Level:
    """Snapshots in one kind of memory, those not used for longest first, and their bytes.

    Attributes:
        arrived: how many have come here so far.
    """

    budget: int
    nbytes: int = 0
    arrived: int = 0
    held: OrderedDict[Snapshot, int] = field(default_factory=OrderedDict)

    def add(self, snapshot: Snapshot, nbytes: int) -> None:
        """Hold a snapshot, which was used just now."""
        self.held[snapshot] = nbytes
        self.nbytes += nbytes


class Levels:
    """Where snapshots are kept.

    Args:
        budgets: bytes that each level may hold: tensors in memory, whole files on disk.
        device: of the first level.
        folder: of the last one; None if it is not used.
        forget: called with each snapshot that is dropped, after it is gone.

    Attributes:
        dropped, damaged: snapshots that had to make room, and those whose file was damaged.
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
        """Bytes of the largest snapshot that some level takes."""
        return max(level.budget for level in self.table)

    def keep(self, snapshot: Snapshot, memory: Tensor | None, first: int = DEVICE) -> None:
        """Keep a snapshot at the first level that is large enough, from `first` on.

        Others move down to make room. It is forgotten if no level is large enough.
        """
        for number in range(first, len(self.table)):
            if self._store(snapshot, memory, number):
                self.table[number].arrived += 1
                self.make_room(number)
                return
        self._drop(snapshot)

    def adopt(self, snapshot: Snapshot, path: Path) -> None:
        """Hold a snapshot whose file is in the folder already."""
        snapshot.level, snapshot.path = DISK, path
        self.table[DISK].add(snapshot, path.stat().st_size)

    def make_room(self, number: int) -> None:
        """Push snapshots down until a level is within its budget."""
        level = self.table[number]
        while level.nbytes > level.budget:
            self._push_down(next(iter(level.held)), number + 1)

    def save(self) -> None:
        """Push all down to the folder, what was used last at the end."""
        for number in (HOST, DEVICE):
            while self.table[number].held:
                self._push_down(next(iter(self.table[number].held)), DISK)

    def split(self, old: Snapshot, memory: Tensor, *new: Snapshot) -> None:
        """Keep snapshots with keys and values of successive tokens in place of one of all."""
        number, begin = old.level, 0
        assert number is not None
        if old.copied is not None:
            # The CPU will read what the GPU writes.
            old.copied.synchronize()
        whole = views(memory, old.parts)
        self.discard(old)
        for snapshot in new:
            end = begin + snapshot.parts[0].shape[2]
            columns = {name: x[:, :, begin:end] for name, x in whole.items()}
            part = packed(columns, snapshot.parts, memory.device, pinned=memory.is_pinned())
            if not self._store(snapshot, part, number):
                self._drop(snapshot)
                break
            begin = end
        # Two files are larger than one.
        self.make_room(number)

    def load(self, snapshot: Snapshot) -> Tensor | None:
        """The bytes of a snapshot, on the device or in host memory; not to be written.

        None if its file is damaged; then the snapshot is forgotten.
        """
        if snapshot.level != DISK:
            return snapshot.memory
        assert self._folder is not None
        memory = self._folder.read(snapshot)
        if memory is None:
            self.damaged += 1
            self.discard(snapshot)
            self._forget(snapshot)
        return memory

    def on_device(self, snapshot: Snapshot, memory: Tensor) -> Tensor:
        """The bytes of a snapshot on the device, given those that `load` gave before."""
        held = snapshot.memory if snapshot.level == DEVICE else None
        return memory.to(self.device, non_blocking=True) if held is None else held

    def touch(self, snapshots: Sequence[Snapshot]) -> None:
        """Note that snapshots were used just now, the last of them last."""
        for snapshot in snapshots:
            if snapshot.level is not None:
                self.table[snapshot.level].held.move_to_end(snapshot)

    def demote(self, snapshots: Sequence[Snapshot]) -> None:
        """Let snapshots make room before all others, the last of them first."""
        for snapshot in snapshots:
            if snapshot.level is not None:
                self.table[snapshot.level].held.move_to_end(snapshot, last=False)

    def raise_up(self, snapshots: Sequence[Snapshot], memories: Sequence[Tensor]) -> None:
        """Move snapshots, given their bytes, to the first level that takes all of them."""
        total = sum(snapshot.nbytes for snapshot in snapshots)
        fitting = [n for n, level in enumerate(self.table) if total <= level.budget]
        for snapshot, memory in zip(snapshots, memories, strict=True):
            # One before may have made another make room.
            if fitting and snapshot.level is not None and snapshot.level > fitting[0]:
                self.discard(snapshot)
                self.keep(snapshot, memory, fitting[0])

    def discard(self, snapshot: Snapshot) -> None:
        """Hold a snapshot no longer, if it is held at all."""
        if snapshot.level is not None:
            level = self.table[snapshot.level]
            level.nbytes -= level.held.pop(snapshot)
        if snapshot.path is not None:
            assert self._folder is not None
            self._folder.delete(snapshot.path)
        snapshot.level = snapshot.memory = snapshot.copied = snapshot.path = None

    def _drop(self, snapshot: Snapshot) -> None:
        self.dropped += 1
        self._forget(snapshot)

    def _push_down(self, snapshot: Snapshot, first: int) -> None:
        memory, copied = snapshot.memory, snapshot.copied
        self.discard(snapshot)
        # It may still be on its way to the host.
        snapshot.copied = copied
        self.keep(snapshot, memory, first)

    def _store(self, snapshot: Snapshot, memory: Tensor | None, number: int) -> bool:
        """Whether a level takes a snapshot; if so, it is there."""
        assert memory is not None
        if snapshot.nbytes > self.table[number].budget:
            return False
        if number == DISK:
            return self._store_on_disk(snapshot, memory)
        if number == DEVICE:
            # From host memory: nothing writes to it while the copy is under way.
            memory = memory.to(self.device, non_blocking=True)
        elif memory.is_cuda:
            memory, snapshot.copied = _to_host(memory, snapshot.parts)
        elif self.device.type == "cuda" and not memory.is_pinned():
            memory = memory.pin_memory()
        snapshot.level, snapshot.memory = number, memory
        self.table[number].add(snapshot, snapshot.nbytes)
        return True

    def _store_on_disk(self, snapshot: Snapshot, memory: Tensor) -> bool:
        if self._folder is None:
            return False
        if snapshot.copied is not None:
            # The CPU will read what the GPU writes.
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


def _to_host(memory: Tensor, parts: Sequence[Part]) -> tuple[Tensor, torch.cuda.Event]:
    """A copy in pinned memory, and when it will be there.

    Until then, copies in the same stream may follow it, and the CPU may not look at it. PyTorch
    uses neither piece of memory for anything else before.
    """
    host = new_memory(parts, "cpu", pinned=True)
    host.copy_(memory, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(memory.device))
    return host, event
