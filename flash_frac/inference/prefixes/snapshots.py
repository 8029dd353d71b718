"""Snapshots: copies of the tensors of one sequence in one block of memory.

A snapshot is written once and only read afterwards. One copy moves the whole block.
Letters: L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.inference.slots import Sent
from flash_frac.models.slot_cache import SlotCache


class Part(NamedTuple):
    """A tensor inside the memory of a snapshot."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def in_order(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Sort parts by element size, largest first, so that they are aligned without gaps."""
    return tuple(sorted(parts, key=lambda part: -part.dtype.itemsize))


def new_memory(
    parts: Sequence[Part], device: torch.device | str, *, pinned: bool = False
) -> Tensor:
    """Uninitialised memory for these parts; a torch.OutOfMemoryError if there is none."""
    size = sum(part.nbytes for part in parts)
    try:
        # Tensors created in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    except RuntimeError as error:
        # Host memory has no error class of its own.
        raise torch.OutOfMemoryError(str(error)) from error


def views(memory: Tensor, parts: Sequence[Part]) -> dict[str, Tensor]:
    """The tensors inside the memory of a snapshot, by name."""
    found, begin = {}, 0
    for part in parts:
        end = begin + part.nbytes
        found[part.name] = memory[begin:end].view(part.dtype).view(part.shape)
        begin = end
    return found


@torch.no_grad()
def packed(
    tensors: Mapping[str, Tensor],
    parts: Sequence[Part],
    device: torch.device,
    *,
    pinned: bool = False,
) -> Tensor:
    """Copies of tensors, with these names and shapes, in one block of memory."""
    memory = new_memory(parts, device, pinned=pinned)
    copy_all(views(memory, parts), tensors)
    return memory


@torch.no_grad()
def copy_all(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy each source to the target of the same name."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for name, target in targets.items():
        # One kernel for each dtype, if the device supports it.
        to, by = groups.setdefault((target.dtype, target.device), ([], []))
        to.append(target)
        by.append(sources[name])
    for to, by in groups.values():
        torch._foreach_copy_(to, by)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether no number is NaN or infinite: a tensor of one bool, without waiting for it."""
    floats = (x for x in tensors if x.is_floating_point() and x.numel())
    extremes = [end.double() for x in floats for end in x.aminmax()]
    return torch.stack(extremes).isfinite().all() if extremes else torch.tensor(True)


def row_states(cache: SlotCache, row: int) -> dict[str, Tensor]:
    """States and ring buffers of a row, stacked over layers (L, ...), by name."""
    return {f"fixed.{n}": x[:, row] for n, x in enumerate(cache.stacks)}


def row_columns(cache: SlotCache, row: int, begin: int, end: int) -> dict[str, Tensor]:
    """Keys and values (L, heads, tokens, channels) of some tokens of a row, by name."""
    columns = slice(begin, end)
    return {f"growing.{n}": x[:, row, :, columns] for n, x in enumerate(cache.column_stacks)}


@dataclass(eq=False)
class Snapshot:
    """Some tensors of a sequence.

    Attributes:
        owner: the tree node that it belongs to.
        parts: its tensors, sorted by `in_order`.
        level: the level that holds it, or None.
        memory: its bytes; None if they are in a file.
        path: the file; None if the bytes are in memory.
        copied: event that marks the end of a running copy to host memory, or None.
        finite: whether `all_finite` of its tensors, on its way to the host; None if they are.
    """

    owner: Any
    parts: tuple[Part, ...]
    level: int | None = None
    memory: Tensor | None = None
    path: Path | None = None
    copied: torch.cuda.Event | None = None
    finite: Sent | None = None

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite; waits for the device if it is new."""
        if self.finite is not None and bool(self.finite.get()):
            self.finite = None
        return self.finite is None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts)

    @property
    def has_logits(self) -> bool:
        """Whether it includes the logits of the next token."""
        return any(part.name == "logits" for part in self.parts)


@dataclass(frozen=True)
class Shapes:
    """Tensors of one sequence: those of fixed size, and the growing ones at length 0."""

    fixed: tuple[Part, ...]
    growing: tuple[Part, ...]

    @staticmethod
    def of(cache: SlotCache) -> Shapes:
        """The shapes of a cache's sequences."""
        fixed = row_states(cache, 0).items()
        growing = row_columns(cache, 0, 0, 0).items()
        parts = ([Part(name, tuple(x.shape), x.dtype) for name, x in y] for y in (fixed, growing))
        return Shapes(*map(in_order, parts))

    def state(self, num_logits: int) -> tuple[Part, ...]:
        """The tensors of fixed size, with logits of the next token if there are any."""
        logits = [Part("logits", (num_logits,), torch.float32)] if num_logits else []
        return in_order([*self.fixed, *logits])

    def segment(self, num_tokens: int) -> tuple[Part, ...]:
        """Keys and values of some tokens."""
        sizes = ((*x.shape[:2], num_tokens, x.shape[3]) for x in self.growing)
        return tuple(x._replace(shape=y) for x, y in zip(self.growing, sizes, strict=True))

    def check(self, cache: SlotCache) -> None:
        """Raise a ValueError if a cache belongs to another model."""
        if Shapes.of(cache) != self:
            raise ValueError(
                "cache must belong to the model whose prefix states are kept (bind), but its "
                "tensors have other names, shapes or dtypes"
            )


@dataclass(frozen=True, eq=False)
class Found:
    """The cached state of a prompt's prefix. It stays valid even if it is evicted meanwhile.

    Attributes:
        num_tokens: tokens of the prompt that need not be read.
        logits: (V,) float32 of the next token, or None if they are not cached.
    """

    num_tokens: int
    logits: Tensor | None
    _shapes: Shapes
    _state: dict[str, Tensor]
    _segments: list[dict[str, Tensor]]

    @torch.no_grad()
    def restore(self, cache: SlotCache, row: int) -> None:
        """Overwrite a row of a cache with this state.

        Args:
            cache: of the same model, with room for the tokens (`cache.reserve`).
        """
        self._shapes.check(cache)
        if self._segments and cache.full.size < self.num_tokens:
            raise ValueError(
                f"cache must have room for {self.num_tokens} tokens, but it has {cache.full.size}; "
                "build it with a larger size"
            )
        copy_all(row_states(cache, row), self._state)
        begin = 0
        for segment in self._segments:
            end = begin + next(iter(segment.values())).shape[2]
            copy_all(row_columns(cache, row, begin, end), segment)
            begin = end
        cache.lengths[row].fill_(self.num_tokens)
        cache.counts[row] = self.num_tokens
