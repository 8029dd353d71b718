"""Presentation of results: names and colours of models, statistics over seeds, plot elements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from flash_frac.drawing import (
    FOURTH,
    GREY,
    OTHER,
    OURS,
    PALE,
    THIRD,
    faint_grid,
    length_axis,
    short,
)

FIFTH, SIXTH, SEVENTH = "#3f6fb0", "#6a9a2d", "#7d1935"
NAMES = {
    "frac": "Frac",
    "frac_paper_clock": "Frac, the paper's clock",
    "frac_ours": "Frac (ours)",
    "frac_no_write_prior": "Frac, no write prior",
    "frac_delta": "Frac + delta",
    "mamba3": "Mamba3",
    "mamba2": "Mamba2",
    "gated_deltanet": "Gated DeltaNet",
    "attention": "attention",
    "qwen3": "attention (Qwen3)",
}
COLOURS = {
    "frac": OURS,
    "frac_paper_clock": SEVENTH,
    "frac_ours": SIXTH,
    "frac_no_write_prior": SIXTH,
    "frac_delta": FIFTH,
    "mamba3": PALE,
    "mamba2": OTHER,
    "gated_deltanet": THIRD,
    "attention": GREY,
    "qwen3": FOURTH,
}


def cell(values: Sequence[float], digits: int) -> str:
    """Mean, with standard deviation if there is more than one value."""
    spread = f" ± {deviation(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def mean_cell(values: Sequence[float], digits: int) -> str:
    """Mean, with its standard error if there is more than one value."""
    error = f" ± {standard_error(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{error}"


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of two or more values."""
    return deviation(values) / math.sqrt(len(values))


def fewer(values: Sequence[float], num_seeds: int) -> str:
    """The number of values in brackets, for a cell with fewer seeds than its row names."""
    return f" ({len(values)})" if len(values) < num_seeds else ""


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of two or more values; NaN if a run diverged."""
    # statistics.stdev refuses what is not finite.
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def curve(
    axes: Any,
    values: Mapping[int, Sequence[float]],
    *,
    colour: str,
    label: str,
    dashed: bool = False,
) -> None:
    """Mean over seeds against length, and its standard deviation as a band."""
    lengths = sorted(values)
    mean = [statistics.mean(values[n]) for n in lengths]
    line = "--" if dashed else "-"
    axes.plot(lengths, mean, line, color=colour, marker="o", ms=3.5, lw=1.6, label=label)
    if all(len(values[n]) > 1 for n in lengths):
        spread = [deviation(values[n]) for n in lengths]
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(lengths, low, high, color=colour, alpha=0.15, lw=0)


def mark_lengths(axes: Any, train_length: int) -> None:
    """A logarithmic axis of the plotted lengths, and a line at the training length."""
    curves = [line for line in axes.lines if line.get_marker() == "o"]
    shown = sorted({int(n) for line in curves for n in line.get_xdata()})
    axes.axvline(train_length, color=GREY, lw=0.8, label=f"trained at {short(train_length)}")
    length_axis(axes, shown)
    faint_grid(axes)


def mark_guessing(axes: Any, score: float) -> None:
    """A dotted line at chance level."""
    axes.axhline(score, color=GREY, lw=1, ls=":", label=f"chance, {score:g}")


def from_zero(axes: Any, highest: float) -> None:
    """A vertical axis from 0 to slightly above `highest`, so that small differences look small."""
    axes.set_ylim(0, 1.08 * highest)


def figure_legend(figure: Any, panels: Sequence[Any], *, beside: bool, title: str = "") -> None:
    """One legend for the lines and bars of all panels, beside or above them."""
    entries = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside right upper" if beside else "outside upper left",
        ncols=1 if beside else min(len(entries), 6),
        frameon=False,
        fontsize=8,
        title=title,
        title_fontsize=8,
        alignment="left",
    )
