"""Sequences of the heavy-tail probe, a pure function of a seed.

Events of value ±1 lie on a background. Gaps g between them have P(g) ∝ g^-exponent for
1 <= g <= max_gap; the first event is at g - 1. A query follows the L tokens. Its answer is the sign
of

    y = Σ_k v_k (L - k)^-gamma        over the positions k of all events, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BACKGROUND, PLUS, MINUS, QUERY = range(4)
NUM_TOKENS = 4
# Rows drawn at a time; each block has its own generator.
_BLOCK = 256


class Sequences(NamedTuple):
    """tokens: (num, L + 1) uint8, the query last; labels: (num,) uint8, 1 where y > 0."""

    tokens: NDArray[np.uint8]
    labels: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Law:
    """gamma of the answer; exponent and longest gap of the events."""

    gamma: float = 0.1
    exponent: float = 1.5
    max_gap: int = 64

    def __post_init__(self) -> None:
        if self.max_gap < 1:
            raise ValueError(f"max_gap must be at least 1, got {self.max_gap}")

    def gap_cdf(self) -> NDArray[np.float64]:
        """P(gap <= g) for g = 1..max_gap."""
        mass = np.arange(1, self.max_gap + 1, dtype=np.float64) ** -self.exponent
        return np.cumsum(mass) / mass.sum()


def lag_weights(length: int, gamma: float) -> NDArray[np.float64]:
    """(L - k)^-gamma for k = 0..L - 1."""
    return np.arange(length, 0, -1, dtype=np.float64) ** -gamma


def event_values(tokens: NDArray[np.uint8]) -> NDArray[np.int8]:
    """+1, -1 or 0 for each token before the query, (num, L)."""
    body = tokens[:, :-1]
    return (body == PLUS).astype(np.int8) - (body == MINUS).astype(np.int8)


def _draw_rows(rng: np.random.Generator, num: int, length: int, law: Law) -> NDArray[np.uint8]:
    """Tokens of `num` rows, with the query."""
    tokens = np.full((num, length + 1), BACKGROUND, dtype=np.uint8)
    tokens[:, -1] = QUERY
    cdf, position = law.gap_cdf(), np.full(num, -1, dtype=np.int64)
    mean_gap = np.sum(1 - cdf) + 1
    while (position < length).any():
        # Slightly more than needed on average; the loop draws the rest.
        num_gaps = int(1.1 * (length - position.min()) / mean_gap) + 8
        gaps = np.searchsorted(cdf, rng.random((num, num_gaps))) + 1
        positions = position[:, None] + np.cumsum(gaps, 1)
        values = rng.integers(PLUS, MINUS + 1, positions.shape, dtype=np.uint8)
        row, event = np.nonzero(positions < length)
        tokens[row, positions[row, event]] = values[row, event]
        position = positions[:, -1]
    return tokens


def draw(seed: int, num: int, length: int, law: Law) -> Sequences:
    """`num` sequences of `length` tokens and a query.

    Rows with |y| < 1e-9, such as those without an event, are redrawn. The first rows do not depend
    on how many are drawn.

    Example:
        >>> tokens, labels = draw(0, 64, 512, Law(gamma=0.5))
    """
    if num < 1 or length < 1:
        raise ValueError(f"num and length must be at least 1, got {num} and {length}")
    tokens = np.empty((num, length + 1), dtype=np.uint8)
    y = np.empty(num)
    weights = lag_weights(length, law.gamma)
    for start in range(0, num, _BLOCK):
        rng = np.random.default_rng([seed, length, start])
        block = _draw_rows(rng, _BLOCK, length, law)
        answers = event_values(block) @ weights
        while (undecided := np.abs(answers) < 1e-9).any():
            block[undecided] = _draw_rows(rng, int(undecided.sum()), length, law)
            answers = event_values(block) @ weights
        tokens[start : start + _BLOCK] = block[: num - start]
        y[start : start + _BLOCK] = answers[: num - start]
    return Sequences(tokens, (y > 0).astype(np.uint8))
