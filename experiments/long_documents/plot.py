"""Draw results.csv as figure.svg: python -m experiments.long_documents.plot [--out FOLDER]

Perplexity against context, a panel for each number of training steps (or for that of --steps), and
recall against distance for the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.long_documents.run import HERE
from experiments.long_documents.summary import Runs, asked_runs, ratios
from experiments.style import COLOURS, NAMES, curve
from flash_frac.drawing import GREY, faint_grid, figure_at, length_axis, short

# Of the relative perplexities that are drawn: attention's grow without bound beyond training.
HIGHEST = 1.2
# Legends stand above their panels.
_ABOVE = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "alignment": "left"}


def relative(runs: Runs) -> dict[int, list[float]]:
    """Each seed's perplexities over its own at the length of training, or at the shortest there
    is."""
    values = runs.by_seed("perplexity", "perplexity")
    reference = values.get(runs.train_length, values[min(values)])
    return {length: ratios(values[length], reference) for length in values}


def label(name: str, runs: Runs) -> str:
    """A model, its perplexity at the length of training, which `relative` leaves out, and seeds."""
    values = runs.values("perplexity", "perplexity").get(runs.train_length)
    there = f" {statistics.mean(values):.1f}" if values else ""
    return f"{NAMES[name]}{there} ({runs.num_seeds})"


def draw_perplexity(axes: Any, found: Mapping[str, Runs], steps: int) -> None:
    lowest = 1.0
    for name, runs in found.items():
        ratio = relative(runs)
        lowest = min(lowest, *(min(values) for values in ratio.values()))
        curve(axes, ratio, colour=COLOURS[name], label=label(name, runs))
    length = short(next(iter(found.values())).train_length)
    axes.set(xlabel="context, tokens", ylabel=f"perplexity over that at {length}")
    axes.set_ylim(lowest - 0.02, min(axes.get_ylim()[1], HIGHEST))
    axes.legend(title=f"{steps:,} steps: perplexity at {length} (seeds)", **_ABOVE)


def draw_recall(axes: Any, found: Mapping[str, Runs], steps: int) -> None:
    for name, runs in found.items():
        recalled = runs.values("recall", "accuracy")
        percent = {distance: [100 * v for v in recalled[distance]] for distance in recalled}
        curve(axes, percent, colour=COLOURS[name], label=NAMES[name])
    axes.axhline(10, color=GREY, lw=0.8, ls=":")
    axes.set(xlabel="distance of the fact, tokens", ylabel="digits right, percent", ylim=(-3, 103))
    axes.legend(title=f"{steps:,} steps: recall", **_ABOVE)


def mark(axes: Any, train_length: int) -> None:
    """A logarithmic axis of the lengths that are drawn, and a line at that of training."""
    curves = [line for line in axes.lines if line.get_marker() == "o"]
    shown = sorted({int(n) for line in curves for n in line.get_xdata()})
    axes.axvline(train_length, color=GREY, lw=0.8)
    length_axis(axes, shown)
    faint_grid(axes)


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    by_steps = {
        steps: {name: runs[name] for name in NAMES if name in runs}
        for steps, runs in by_steps.items()
    }
    panels = [(draw_perplexity, steps) for steps in by_steps] + [(draw_recall, max(by_steps))]
    size = (4.2 * len(panels), 4)
    with figure_at(folder / "figure.svg", size, [1] * len(panels)) as (_, axes):
        for axis, (draw, steps) in zip(axes, panels, strict=True):
            found = by_steps[steps]
            draw(axis, found, steps)
            mark(axis, next(iter(found.values())).train_length)


if __name__ == "__main__":
    main()
