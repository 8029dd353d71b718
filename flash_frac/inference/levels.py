"""The levels at which snapshots are kept: the device, then host memory.

Each level has a budget in bytes. What was not used for longest moves down when a level is full, and
is gone below the last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_frac.inference.snapshots import Part, Snapshot, new_memory, packed, views

DEVICE, HOST = 0, 1


@dataclass
class Level:
    """Snapshots in one kind of memory, those not used for longest first, and their bytes.

    Attributes:
        arrived: how many have come here so far.
    """

    name: str
    budget: int
    nbytes: int = 0
    arrived: int = 0
    held: OrderedDict[Snapshot, int] = field(default_factory=OrderedDict)


class Levels:
    """Where snapshots are kept.

    Args:
        budgets: bytes that each level may hold.
        device: of the first level.
        forget: called with each snapshot that is dropped to make room, after it is gone.
    """

    def __init__(
        self, budgets: Sequence[int], device: torch.device, forget: Callable[[Snapshot], None]
    ) -> None:
        names = ("device", "host")
        self.table = [Level(name, budget) for name, budget in zip(names, budgets, strict=True)]
        self.device, self.dropped = device, 0
        self._forget = forget

    @property
    def budget(self) -> int:
        """Bytes of all levels."""
        return sum(level.budget for level in self.table)

    @property
    def largest(self) -> int:
        """Bytes of the largest snapshot that some level takes."""
        return max(level.budget for level in self.table)

    def keep(self, snapshot: Snapshot, memory: Tensor, first: int = DEVICE) -> None:
        """Keep a snapshot at the first level that is large enough, from `first` on.

        Others move down to make room. It is forgotten if no level is large enough.
        """
        for number, level in enumerate(self.table):
            if number >= first and self._store(snapshot, memory, number):
                level.arrived += 1
                while level.nbytes > level.budget:
                    self._push_down(next(iter(level.held)), number)
                return
        self.dropped += 1
        self._forget(snapshot)

    def split(self, old: Snapshot, *new: Snapshot) -> None:
        """Keep snapshots with keys and values of successive tokens in place of one of all."""
        number, memory, begin = old.level, self.load(old), 0
        assert number is not None
        if old.copied is not None:
            # The CPU will read what the GPU writes.
            old.copied.synchronize()
        whole = views(memory, old.parts)
        self.discard(old)
        for snapshot in new:
            end = begin + snapshot.parts[0].shape[1]
            columns = {name: x[:, begin:end] for name, x in whole.items()}
            part = packed(columns, snapshot.parts, memory.device, pinned=memory.is_pinned())
            self._store(snapshot, part, number)
            begin = end

    def load(self, snapshot: Snapshot) -> Tensor:
        """The bytes of a snapshot, on the device or in host memory; not to be written."""
        assert snapshot.memory is not None
        return snapshot.memory

    def on_device(self, snapshot: Snapshot, memory: Tensor) -> Tensor:
        """The bytes of a snapshot on the device, given those that `load` gave before."""
        held = snapshot.memory if snapshot.level == DEVICE else None
        return memory.to(self.device, non_blocking=True) if held is None else held

    def touch(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was used just now."""
        assert snapshot.level is not None
        self.table[snapshot.level].held.move_to_end(snapshot)

    def raise_up(self, snapshot: Snapshot, memory: Tensor) -> None:
        """Move a snapshot to the device, given its bytes."""
        if snapshot.level != DEVICE:
            self.discard(snapshot)
            self.keep(snapshot, memory)

    def discard(self, snapshot: Snapshot) -> None:
        """Hold a snapshot no longer, if it is held at all."""
        if snapshot.level is not None:
            level = self.table[snapshot.level]
            level.nbytes -= level.held.pop(snapshot)
        snapshot.level = snapshot.memory = snapshot.copied = None

    def _push_down(self, snapshot: Snapshot, number: int) -> None:
        memory = self.load(snapshot)
        self.discard(snapshot)
        self.keep(snapshot, memory, number + 1)

    def _store(self, snapshot: Snapshot, memory: Tensor, number: int) -> bool:
        """Whether a level is large enough; if so, the snapshot is there."""
        level, size = self.table[number], snapshot.nbytes
        if size > level.budget:
            return False
        if number == DEVICE:
            # From host memory: nothing writes to it while the copy is under way.
            memory = memory.to(self.device, non_blocking=True)
        elif number == HOST and memory.is_cuda:
            memory, snapshot.copied = _to_host(memory, snapshot.parts)
        snapshot.level, snapshot.memory = number, memory
        level.held[snapshot] = size
        level.nbytes += size
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
