"""Banks of timescales: the paper's geometric one, and optimised ones stored in `banks.json`.

A bank is an increasing array tau (M,) of timescales in units of λ^(-1/α). This file needs only
numpy, because layers import it. `bank_search.optimise_bank` found the named banks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flash_frac.theory.validation import check_bank, check_count, check_positive


class BankInfo(NamedTuple):
    """A named bank and its properties.

    Fields:
        tau: (M,) timescales.
        window: the interval of s = λ^(1/α) t on which it was optimised.
        constraint: constraint on the coefficients: "simplex" (c >= 0, sum 1) or "sum_le_1"
            (c >= 0, sum at most 1).
        mean_error, max_error: mean and maximum minimax error over α = 0.10, 0.11, ..., 0.99.
    """

    tau: NDArray[np.float64]
    window: tuple[float, float]
    constraint: str
    mean_error: float
    max_error: float


def geometric_bank(
    num_modes: int, tau_min: float = 1.0, tau_max: float = 131072.0
) -> NDArray[np.float64]:
    """tau_m = tau_min (tau_max / tau_min)^((m-1)/(M-1)), including both ends.

    A bank of one mode has the geometric mean of the ends.

    Args:
        num_modes: M >= 1.
        tau_min: fastest timescale, > 0.
        tau_max: slowest timescale, > tau_min.

    Returns:
        (M,) float64 array, strictly increasing.

    Example:
        >>> geometric_bank(3, 1.0, 100.0).round(12).tolist()
        [1.0, 10.0, 100.0]
    """
    num_modes = check_count("num_modes", num_modes)
    check_positive("tau_min", tau_min)
    check_positive("tau_max", tau_max)
    if tau_max <= tau_min:
        raise ValueError(f"tau_max must be > tau_min, got tau_min {tau_min} and tau_max {tau_max}")
    if num_modes == 1:
        return np.array([math.sqrt(tau_min) * math.sqrt(tau_max)])
    return np.geomspace(tau_min, tau_max, num_modes)


def head_banks(
    num_heads: int, num_modes: int, tau_min: float = 1.0, tau_max: float = 131072.0
) -> NDArray[np.float64]:
    """A geometric bank for each head, which together go from tau_min to tau_max.

    Head h of H goes from tau_min r^(h / (H + 1)) to tau_min r^((h + 2) / (H + 1)), where r is
    tau_max / tau_min: each shares half of its range, on the log axis, with the next one.

    Args:
        num_heads: H >= 1.
        num_modes, tau_min, tau_max: as in `geometric_bank`.

    Returns:
        (H, M) float64 array, strictly increasing along the modes.

    Example:
        >>> head_banks(2, 3, 1.0, 1000.0).round(9).tolist()
        [[1.0, 10.0, 100.0], [10.0, 100.0, 1000.0]]
    """
    ends = geometric_bank(check_count("num_heads", num_heads) + 2, tau_min, tau_max)
    return np.stack(
        [geometric_bank(num_modes, low, high) for low, high in zip(ends, ends[2:], strict=False)]
    )


def bank_names() -> tuple[str, ...]:
    """Names of the optimised banks: window, number of modes, constraint.

    W1 = [4, 6553.6] is the window of the paper, W2 = [0.01, 1e6], W3 = [0.1, 6553.6].

    Example:
        >>> "W2_M16_simplex" in bank_names()
        True
    """
    return tuple(_stored())


def bank_info(name: str) -> BankInfo:
    """A named bank with its window, constraint and errors.

    Args:
        name: one of `bank_names()`.

    Returns:
        BankInfo; `tau` is a fresh array.

    Example:
        >>> bank_info("W1_M16_simplex").window
        (4.0, 6553.6)
    """
    stored = _stored()
    if name not in stored:
        raise ValueError(f"name must be one of {', '.join(stored)}, got {name!r}")
    info = stored[name]
    return info._replace(tau=info.tau.copy())


def named_bank(name: str) -> NDArray[np.float64]:
    """Timescales (M,) of a named bank.

    Args:
        name: one of `bank_names()`.

    Returns:
        (M,) float64 array, strictly increasing.

    Example:
        >>> named_bank("W1_M8_simplex").shape
        (8,)
    """
    return bank_info(name).tau


def resolve_bank(
    bank: str | Sequence[float] | NDArray[np.float64],
    num_modes: int,
    tau_min: float,
    tau_max: float,
    num_heads: int = 1,
) -> NDArray[np.float64]:
    """Timescales of a bank given by name or by value, checked against the number of modes.

    Args:
        bank: "geometric", "per_head", one of `bank_names()`, or M increasing timescales.
        num_modes: M >= 1.
        tau_min: fastest timescale of geometric banks; the other kinds ignore it.
        tau_max: slowest timescale of geometric banks; the other kinds ignore it.
        num_heads: H of "per_head", see `head_banks`; the other kinds ignore it.

    Returns:
        (M,) float64 array, strictly increasing; (H, M) for "per_head".

    Example:
        >>> resolve_bank([1, 2, 5], 3, 1.0, 65536.0).tolist()
        [1.0, 2.0, 5.0]
    """
    num_modes = check_count("num_modes", num_modes)
    if isinstance(bank, str):
        if bank == "geometric":
            return geometric_bank(num_modes, tau_min, tau_max)
        if bank == "per_head":
            return head_banks(num_heads, num_modes, tau_min, tau_max)
        if bank not in _stored():
            known = ", ".join(("geometric", "per_head", *_stored()))
            raise ValueError(f"bank must be one of {known} or a list of timescales, got {bank!r}")
        tau = named_bank(bank)
    else:
        tau = check_bank(bank)
    if len(tau) != num_modes:
        raise ValueError(
            f"bank must have num_modes = {num_modes} timescales, got {len(tau)} in {bank!r}"
        )
    return tau


@cache
def _stored() -> dict[str, BankInfo]:
    text = resources.files("flash_frac.theory").joinpath("banks.json").read_text(encoding="utf-8")
    return {
        name: BankInfo(
            tau=np.array(entry["tau"]),
            window=(float(entry["window"][0]), float(entry["window"][1])),
            constraint=entry["constraint"],
            mean_error=entry["mean_error"],
            max_error=entry["max_error"],
        )
        for name, entry in json.loads(text).items()
    }
