"""Snapshots: copies of tensors of one sequence, all in one piece of memory.

A snapshot is written once, and only read afterwards. One piece of memory is moved by one copy.
Letters: L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """Large elements first, so that each tensor is aligned and no byte is between them."""
    return tuple(sorted(parts, key=lambda part: -part.dtype.itemsize))


def new_memory(
    parts: Sequence[Part], device: torch.device | str, *, pinned: bool = False
) -> Tensor:
    """Bytes for these parts, not yet written."""
    # Tensors made in inference mode could not be written outside it.
    with torch.inference_mode(False):
        size = sum(part.nbytes for part in parts)
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)


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
    """Copies of tensors, which have these names and shapes, in one piece of memory."""
    memory = new_memory(parts, device, pinned=pinned)
    copy_all(views(memory, parts), tensors)
    return memory


@torch.no_grad()
def copy_all(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy each source to the target of the same name."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for name, target in targets.items():
        # One kernel for each dtype, where the device allows it.
        to, by = groups.setdefault((target.dtype, target.device), ([], []))
        to.append(target)
        by.append(sources[name])
    for to, by in groups.values():
        torch._foreach_copy_(to, by)  # pyright: ignore[reportPrivateImportUsage]


def row_states(cache: SlotCache, row: int) -> dict[str, Tensor]:
    """States and rings of a row, those of all layers together (L, ...), by name."""
    return {f"fixed.{n}": x[:, row] for n, x in enumerate(cache.stacks)}


def row_columns(cache: SlotCache, row: int, begin: int, end: int) -> dict[str, Tensor]:
    """Keys and values (L, heads, tokens, channels) of some tokens of a row, by name."""
    columns = slice(begin, end)
    return {f"growing.{n}": x[:, row, :, columns] for n, x in enumerate(cache.column_stacks)}


@dataclass(eq=False)
class Snapshot:
    """Some tensors of a sequence.

    Attributes:
        owner: whose snapshot it is.
        parts: its tensors, as `in_order` sorts them.
        level: where it is kept; None if nowhere.
        memory: its bytes; None if they are in a file.
        path: the file; None if they are in memory.
        copied: when a copy to host memory under way has ended; None if there is none.
    """

    owner: Any
    parts: tuple[Part, ...]
    level: int | None = None
    memory: Tensor | None = None
    path: Path | None = None
    copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts)

    @property
    def has_logits(self) -> bool:
        """Whether those of the next token are there."""
        return any(part.name == "logits" for part in self.parts)


@dataclass(frozen=True)
class Shapes:
    """Tensors of one sequence of a model: of fixed size, and those that grow, for no token."""

    fixed: tuple[Part, ...]
    growing: tuple[Part, ...]

    @staticmethod
    def of(cache: SlotCache) -> Shapes:
        """Those of the sequences of a cache."""
        fixed = row_states(cache, 0).items()
        growing = row_columns(cache, 0, 0, 0).items()
        parts = ([Part(name, tuple(x.shape), x.dtype) for name, x in y] for y in (fixed, growing))
        return Shapes(*map(in_order, parts))

    def state(self, num_logits: int) -> tuple[Part, ...]:
        """The tensors of fixed size, with logits of the next token if there are some."""
        logits = [Part("logits", (num_logits,), torch.float32)] if num_logits else []
        return in_order([*self.fixed, *logits])

    def segment(self, num_tokens: int) -> tuple[Part, ...]:
        """Keys and values of some tokens."""
        sizes = ((*x.shape[:2], num_tokens, x.shape[3]) for x in self.growing)
        return tuple(x._replace(shape=y) for x, y in zip(self.growing, sizes, strict=True))

    def check(self, cache: SlotCache) -> None:
        """ValueError if a cache is of another model."""
        if Shapes.of(cache) != self:
            raise ValueError(
                "cache must be of the model whose prefix states are kept (bind), but its tensors "
                "have other names, shapes or dtypes"
            )


@dataclass(frozen=True, eq=False)
class Found:
    """A state that is the beginning of some prompt. It stays valid whatever is evicted meanwhile.

    Attributes:
        num_tokens: tokens of the prompt that need not be read.
        logits: (V,) float32 of the next token, if they are kept; else None.
    """

    num_tokens: int
    logits: Tensor | None
    _shapes: Shapes
    _state: dict[str, Tensor]
    _segments: list[dict[str, Tensor]]

    @torch.no_grad()
    def restore(self, cache: SlotCache, row: int) -> None:
        """Make a row of a cache hold these tokens, whatever it held before.

        Args:
            cache: of the same model, with room for them (`cache.reserve`).
        """
        self._shapes.check(cache)
        if self._segments and cache.full.size < self.num_tokens:
            raise ValueError(
                f"cache must have room for {self.num_tokens} tokens and has {cache.full.size}; "
                "make it with a larger size"
            )
        copy_all(row_states(cache, row), self._state)
        begin = 0
        for segment in self._segments:
            end = begin + next(iter(segment.values())).shape[2]
            copy_all(row_columns(cache, row, begin, end), segment)
            begin = end
        cache.lengths[row].fill_(self.num_tokens)
        cache.counts[row] = self.num_tokens
