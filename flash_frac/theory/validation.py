"""Argument checks shared by the functions of `flash_frac.theory`."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def check_time(t: ArrayLike) -> NDArray[np.float64]:
    """Return times as a float64 array, all finite and >= 0."""
    array = np.asarray(t, dtype=np.float64)
    return _require("t", "finite and >= 0", array, np.isfinite(array) & (array >= 0))


def check_order(alpha: ArrayLike, *, allow_one: bool = True) -> NDArray[np.float64]:
    """Return orders α as a float64 array in (0, 1], or in (0, 1) if the formula needs α < 1."""
    array = np.asarray(alpha, dtype=np.float64)
    if allow_one:
        return _require("alpha", "in (0, 1]", array, (array > 0) & (array <= 1))
    return _require("alpha", "in (0, 1)", array, (array > 0) & (array < 1))


def check_positive(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """Return a float64 array, all finite and > 0."""
    array = np.asarray(value, dtype=np.float64)
    return _require(name, "finite and > 0", array, np.isfinite(array) & (array > 0))


def check_bank(tau: ArrayLike) -> NDArray[np.float64]:
    """Return timescales as a float64 array (M,): positive, finite, strictly increasing, M >= 1."""
    array = check_positive("tau", tau)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"tau must have shape (M,) with M >= 1, got {array.shape}")
    if np.any(np.diff(array) <= 0):
        raise ValueError(f"tau must be strictly increasing, got {array.tolist()}")
    return array


def check_count(name: str, value: int, minimum: int = 1) -> int:
    """Return an integer >= minimum."""
    if not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return int(value)


def _require(
    name: str, expected: str, array: NDArray[np.float64], valid: NDArray[np.bool_]
) -> NDArray[np.float64]:
    wrong = array[~valid]
    if wrong.size:
        raise ValueError(f"{name} must be {expected}, got {wrong.flat[0]}")
    return array
