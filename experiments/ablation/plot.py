"""Draw results.csv as figure.svg: python -m experiments.ablation.plot [--out FOLDER]"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablation.run import HERE
from experiments.ablation.summary import changes, paper_change, seed_spread
from experiments.ablation.variants import BASELINE, VARIANTS
from experiments.long_documents.summary import Runs, asked_runs
from flash_frac.drawing import FAINT, GREY, INK, OURS, PALE, faint_grid, figure_at, short


def draw(axes: Sequence[Any], found: Mapping[str, Runs]) -> None:
    """Changes of the perplexity as bars: ours by length on the left, the paper's on the right.

    A band on the left is as wide as the baseline's own spread over seeds at the longest length.
    """
    names = [name for name in VARIANTS if name in found and name != BASELINE]
    lengths = sorted({int(row["length"]) for runs in found.values() for row in runs.rows})
    height = 0.8 / len(lengths)
    left, right = axes
    if (spread := seed_spread(found, lengths[-1])) is not None:
        left.axvspan(-spread, spread, color=FAINT, label="Frac's own deviation over seeds")
    for place, (length, colour) in enumerate(zip(lengths, (PALE, OURS), strict=False)):
        change = changes(found, length)
        there = [(i, change[name]) for i, name in enumerate(names) if change[name]]
        left.barh(
            [i + (place - (len(lengths) - 1) / 2) * height for i, _ in there],
            [statistics.mean(values) for _, values in there],
            0.92 * height,
            xerr=[statistics.stdev(v) if len(v) > 1 else 0.0 for _, v in there],
            color=colour,
            label=f"ours, {short(length)}",
            error_kw={"lw": 1, "ecolor": INK},
        )
    printed = [(i, value) for i, name in enumerate(names) if (value := paper_change(name))]
    right.barh([i for i, _ in printed], [value for _, value in printed], 0.5, color=GREY)
    left.set(xlabel="change of perplexity, percent")
    right.set(xlabel="paper, 390M at 16K: change, percent")
    left.set_yticks(range(len(names)), [VARIANTS[name].label for name in names])
    right.set_yticks(range(len(names)), [""] * len(names))
    for axis in axes:
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.axvline(0, color=INK, lw=0.8)
        faint_grid(axis, "x")


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__, arguments, HERE)
    found = by_steps[max(by_steps)]
    if len(found) < 2 or BASELINE not in found:
        raise SystemExit(
            f"{folder} must have rows of the baseline and of another variant; "
            "python -m experiments.ablation.run makes them"
        )
    with figure_at(folder / "figure.svg", (9, 4.2), (3, 2)) as (figure, axes):
        draw(axes, found)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)


if __name__ == "__main__":
    main()
