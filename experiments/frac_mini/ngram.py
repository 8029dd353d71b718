"""A 5-gram token model with modified Kneser-Ney smoothing, as a baseline by counting.

    python -m experiments.frac_mini.ngram [--data data/frac-mini]      writes ngram.json there

With c(g) the count of an n-gram g = h w (for the longest order; for shorter ones the number of
distinct tokens seen before it), N_k(h) the number of tokens with count k after h, and discounts
D_1, D_2, D_3 (for 3 and more) of each order,

    P(w | h) = (c(h w) - D) / c(h) + (D_1 N_1(h) + D_2 N_2(h) + D_3 N_3(h)) / c(h) P(w | h')

where h' is h without its first token, and the empty history backs off to 1/V. Each P(. | h) sums to
one. Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.frac_mini.fetch import DATA
from experiments.frac_mini.prepare import read_corpus
from flash_frac.files import write_json

ORDER = 5
EOS = 2
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Level(NamedTuple):
    """The n-grams of one order.

    Fields:
        keys: sorted; a gram's key is (index of its first n - 1 tokens in the level below) V + last.
        kept: per gram, its count minus its discount.
        totals: per history, the sum of counts after it.
        left: per history, the total discount, left for shorter histories, not yet divided.
    """

    keys: Ints
    kept: Floats
    totals: Floats
    left: Floats


class TokenNgram:
    """The model of one text.

    Args:
        tokens: (N,) ids below vocab_size.
        order: n; the n - 1 tokens before a token predict it.

    Example:
        >>> model = TokenNgram(train, vocab_size=4096)
        >>> bits = model.bits(test, eos=2).sum()
    """

    def __init__(self, tokens: NDArray, *, vocab_size: int, order: int = ORDER) -> None:
        if order < 1 or len(tokens) < order:
            raise ValueError(f"order must be from 1 to the {len(tokens)} tokens, got {order}")
        self.vocab_size, self.order = vocab_size, order
        # Indices of the grams that start at each position, of the order below and of this one.
        before, levels = np.zeros(len(tokens) + 1, np.int64), []
        for n in range(1, order + 1):
            last = tokens[n - 1 :].astype(np.int64)
            keys, first, numbers, counts = np.unique(
                before[: len(last)] * vocab_size + last,
                return_index=True,
                return_inverse=True,
                return_counts=True,
            )
            if levels:
                # Grams of the order below are counted by the distinct tokens before them.
                followers = np.bincount(before[first + 1], minlength=len(levels[-1][0]))
                levels[-1] = (levels[-1][0], np.maximum(followers, 1))
            levels.append((keys, counts))
            before = numbers
        sizes = [1, *(len(keys) for keys, _ in levels)]
        self.levels = [
            _level(keys, counts, histories, vocab_size)
            for (keys, counts), histories in zip(levels, sizes, strict=False)
        ]

    def bits(self, tokens: NDArray, *, eos: int = EOS) -> Floats:
        """-log2 P of each token (N,) given those before it; the text starts after an eos token."""
        ids = np.concatenate([[eos], tokens]).astype(np.int64)
        return -np.log2(self._chances(ids)[1:])

    def probabilities(self, history: Sequence[int]) -> Floats:
        """P(. | history), (V,)."""
        rows = [[*history, token] for token in range(self.vocab_size)]
        return np.array([self._chances(np.array(row, np.int64))[-1] for row in rows])

    def _chances(self, ids: Ints) -> Floats:
        """P of each token given those before it, from the shortest history to the longest."""
        chances = np.full(len(ids), 1 / self.vocab_size)
        histories = np.zeros(len(ids), np.int64)
        for n, level in enumerate(self.levels, 1):
            if n > len(ids):
                break
            # Position i: the gram that starts at i and ends at i + n - 1.
            known = histories[: len(ids) - n + 1]
            grams = _find(level.keys, known, ids[n - 1 :], self.vocab_size)
            ends = chances[n - 1 :]
            kept = np.where(grams >= 0, level.kept[grams], 0.0)
            total = np.where(known >= 0, level.totals[known], 0.0)
            mixed = (kept + level.left[known] * ends) / np.maximum(total, 1.0)
            # An unseen history adds nothing to the shorter one.
            chances[n - 1 :] = np.where(total > 0, mixed, ends)
            histories = grams
        return chances


def _find(keys: Ints, histories: Ints, last: Ints, vocab_size: int) -> Ints:
    """Indices of grams; -1 if a history or a gram is unknown."""
    wanted = histories * vocab_size + last
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((histories >= 0) & (keys[places] == wanted), places, -1)


def _level(keys: Ints, counts: Ints, num_histories: int, vocab_size: int) -> Level:
    discounts = _discounts(counts)[np.minimum(counts, 3)]
    histories = keys // vocab_size
    totals = np.bincount(histories, counts, num_histories)
    left = np.bincount(histories, discounts, num_histories)
    return Level(keys, counts - discounts, totals, left)


def _discounts(counts: Ints) -> Floats:
    """Discounts for counts 0, 1, 2 and 3 or more (Chen and Goodman 1998)."""
    one, two, three, four = (max(1, int((counts == k).sum())) for k in (1, 2, 3, 4))
    share = one / (one + 2 * two)
    found = [k - (k + 1) * share * b / a for k, a, b in ((1, one, two), (2, two, three))]
    found.append(3 - 4 * share * four / three)
    # On a tiny text the estimates may fall outside their range.
    return np.array([0.0, *(np.clip(d, 0.1, k - 0.1) for k, d in enumerate(found, 1))])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args(arguments)
    corpus = read_corpus(options.data)
    model = TokenNgram(corpus.train, vocab_size=corpus.facts["vocab_size"])
    found = {}
    for split in ("validation", "test"):
        num_bytes = corpus.facts["splits"][split]["bytes"]
        found[split] = float(model.bits(getattr(corpus, split)).sum() / num_bytes)
        print(f"{split}: {found[split]:.4f} bits per byte")
    write_json(options.data / "ngram.json", {"order": model.order, "bits_per_byte": found})


if __name__ == "__main__":
    main()
