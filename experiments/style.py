"""How the experiments show results: names and colours of models, numbers over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flash_frac.drawing import FOURTH, GREY, INK, OTHER, OURS, PALE, THIRD

FIFTH = "#3f6fb0"
NAMES = {
    "frac": "Frac",
    "frac_ours": "Frac (ours)",
    "frac_delta": "Frac + delta",
    "mamba3": "Mamba3",
    "mamba2": "Mamba2",
    "gated_deltanet": "Gated DeltaNet",
    "attention": "attention",
    "qwen3": "attention (Qwen3)",
}
COLOURS = {
    "frac": OURS,
    "frac_ours": INK,
    "frac_delta": FIFTH,
    "mamba3": PALE,
    "mamba2": OTHER,
    "gated_deltanet": THIRD,
    "attention": GREY,
    "qwen3": FOURTH,
}


def cell(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation, if there is more than one value."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def mean_cell(values: Sequence[float], digits: int) -> str:
    """Mean and its standard error, if there is more than one value."""
    error = f" ± {standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of two or more values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def curve(axes: Any, values: Mapping[int, Sequence[float]], *, colour: str, label: str) -> None:
    """Mean over seeds against length, and its standard deviation as a band."""
    lengths = sorted(values)
    mean = [statistics.mean(values[n]) for n in lengths]
    axes.plot(lengths, mean, color=colour, marker="o", ms=3.5, lw=1.6, label=label)
    if all(len(values[n]) > 1 for n in lengths):
        spread = [statistics.stdev(values[n]) for n in lengths]
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, lw=0)
