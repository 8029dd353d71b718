"""Draw results.csv as figure.svg: python -m experiments.long_documents.plot [--out FOLDER]"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.long_documents.run import HERE
from experiments.long_documents.summary import Runs, asked_runs, ratios
from experiments.models import COLOURS, NAMES, curve, short
from flash_frac.drawing import FAINT, GREY, figure_at

# Of the relative perplexities that are drawn: attention's grow without bound beyond training.
HIGHEST = 1.25


def relative(runs: Runs) -> dict[int, list[float]]:
    """Each seed's perplexities over its own at the length of training, or at the shortest there
    is."""
    values = runs.by_seed("perplexity", "perplexity")
    reference = values.get(runs.train_length, values[min(values)])
    return {length: ratios(values[length], reference) for length in values}


def label(name: str, runs: Runs) -> str:
    """A model and its perplexity at the length of training, which `relative` leaves out."""
    values = runs.values("perplexity", "perplexity").get(runs.train_length)
    there = f", {statistics.mean(values):.1f} at {short(runs.train_length)}" if values else ""
    return f"{NAMES[name]}{there}"


def draw(axes: Sequence[Any], found: Mapping[str, Runs]) -> None:
    """Perplexity on the left, recall on the right."""
    left, right = axes
    lowest = 1.0
    for name, runs in found.items():
        ratio = relative(runs)
        lowest = min(lowest, *(min(values) for values in ratio.values()))
        look = {"colour": COLOURS[name], "label": label(name, runs)}
        curve(left, ratio, **look)
        if recalled := runs.values("recall", "accuracy"):
            curve(right, {n: [100 * v for v in recalled[n]] for n in recalled}, **look)
    length = next(iter(found.values())).train_length
    for axis in axes:
        axis.axvline(length, color=GREY, lw=0.8)
        axis.set_xscale("log", base=2)
        shown = sorted({int(n) for line in axis.lines[:-1] for n in line.get_xdata()})
        axis.set_xticks(shown, [short(n) for n in shown])
        axis.grid(axis="y", color=FAINT, lw=0.6)
        axis.set_axisbelow(True)
    left.set(xlabel="context, tokens", ylabel=f"perplexity over that at {short(length)}")
    left.set_ylim(lowest - 0.02, min(left.get_ylim()[1], HIGHEST))
    right.axhline(10, color=GREY, lw=0.8, ls=":")
    right.set(xlabel="distance of the fact, tokens", ylabel="digits right, percent", ylim=(-3, 103))


def main(arguments: Sequence[str] | None = None) -> None:
    folder, runs = asked_runs(__doc__, arguments, HERE)
    found = {name: runs[name] for name in NAMES if name in runs}
    with figure_at(folder / "figure.svg", (9, 3.4), (1, 1)) as (figure, axes):
        draw(axes, found)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)


if __name__ == "__main__":
    main()
