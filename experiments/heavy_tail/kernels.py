"""Answers of fixed kernels, sign of Σ_k v_k kernel(L - k), as references for trained models.

If a kernel's sum is zero, the answer is random.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from experiments.heavy_tail.data import Sequences, event_values

Array = NDArray[np.float64]
TAUS = 2.0 ** np.arange(4, 24)
WINDOWS = (128, 512, 2048)
# Rows converted to float64 at a time.
_ROWS = 128


def fixed_kernels(length: int, gamma: float) -> dict[str, Array]:
    """Kernels over the lags L..1 by name, each (L,)."""
    lag = np.arange(length, 0, -1, dtype=np.float64)
    bank = np.geomspace(1.0, 2.0**17, 16)
    return {
        "sum": np.ones(length),
        **{f"window_{size}": (lag <= size).astype(np.float64) for size in WINDOWS},
        "bank": sum(tau**-gamma * np.exp(-lag / tau) for tau in bank),
        **{_exponential(tau): np.exp(-lag / tau) for tau in TAUS},
    }


def _exponential(tau: float) -> str:
    return f"exponential_{int(tau)}"


def accuracies(sequences: Sequences, gamma: float) -> dict[str, float]:
    """Accuracy of every fixed kernel, and of the last event alone."""
    length = sequences.tokens.shape[1] - 1
    kernels = fixed_kernels(length, gamma)
    matrix = np.stack(list(kernels.values()), 1)
    rows = [
        _sums(sequences.tokens[start : start + _ROWS], matrix)
        for start in range(0, len(sequences.tokens), _ROWS)
    ]
    sums = np.concatenate(rows)
    coin = np.random.default_rng(0).choice([-1.0, 1.0], sums.shape)
    answers = np.where(sums == 0, coin, sums) > 0
    right = (answers == sequences.labels[:, None].astype(bool)).mean(0)
    return dict(zip((*kernels, "last"), right.tolist(), strict=True))


def _sums(tokens: NDArray[np.uint8], matrix: Array) -> Array:
    """Weighted sums (rows, kernels); the last column is the value of the last event."""
    values = event_values(tokens)
    last = values.shape[1] - 1 - np.argmax(values[:, ::-1] != 0, 1)
    last_value = np.take_along_axis(values, last[:, None], 1)
    return np.concatenate([values.astype(np.float64) @ matrix, last_value], 1)


def yardsticks(by_length: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Rows of the table: name, length, accuracy.

    "exponential_best" has the best rate for each length. "exponential_fixed" keeps the best rate
    for the shortest length, as a model with one rate would learn it there.
    """
    rates = [_exponential(tau) for tau in TAUS]
    shortest = by_length[min(by_length)]
    learnt = max(rates, key=lambda name: shortest[name])
    names = ["sum", "last", *(f"window_{size}" for size in WINDOWS), "bank"]
    rows = {name: {n: right[name] for n, right in by_length.items()} for name in names}
    rows["exponential_best"] = {
        n: max(right[name] for name in rates) for n, right in by_length.items()
    }
    rows["exponential_fixed"] = {n: right[learnt] for n, right in by_length.items()}
    return rows
