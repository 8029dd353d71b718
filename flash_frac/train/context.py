"""Count the tokens that each token of a batch attends to, which sets the cost of attention.

The collator counts on the CPU, so a training step never synchronises with the GPU for it.
Letters: T tokens of an item, W window of sliding attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from flash_frac.data import Collator
from flash_frac.data.packing import Item


class Seen(NamedTuple):
    """The number of tokens, and how many tokens they attend to in total, themselves included.

    Attributes:
        full: total for full attention.
        sliding: total for sliding attention.
    """

    tokens: int = 0
    full: int = 0
    sliding: int = 0

    def __add__(self, other: Any) -> Seen:
        return Seen(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def contexts(self) -> tuple[float, float]:
        """Mean context of full and of sliding attention: the arguments of `training_flops`."""
        return self.full / max(self.tokens, 1), self.sliding / max(self.tokens, 1)


class CountingCollator:
    """A collator that adds `seen` to each batch, counted over whole rows even if ranks share them.

    Args:
        window: W; None for a model without sliding attention.
    """

    def __init__(self, collator: Collator, window: int | None) -> None:
        self.collator, self.window = collator, window

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        batch, seen = self.collator(items), Seen()
        if not batch:
            return batch
        for item in items:
            seen += self._seen(item)
        return batch | {"seen": seen}

    def _seen(self, item: Item) -> Seen:
        length, before = len(item["input_ids"]), 0
        starts = item["document_starts"].tolist() if self.collator.separate else []
        if self.collator.lanes:
            before = item["tokens_before"]
        bounds = [0, *starts, length]
        full = sliding = 0
        for begin, end in pairwise(bounds):
            last = before + end - begin
            full += _seen_by(last) - _seen_by(before)
            sliding += _seen_by(last, self.window) - _seen_by(before, self.window)
            before = 0
        return Seen(length, full, sliding)


def _seen_by(length: int, window: int | None = None) -> int:
    """The sum of min(n, window) over n = 1, ..., length."""
    inside = length if window is None else min(length, window)
    return inside * (inside + 1) // 2 + (length - inside) * inside
