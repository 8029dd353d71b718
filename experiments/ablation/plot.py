"""Draw results.csv as figure.svg: python -m experiments.ablation.plot [--steps S] [--out FOLDER]"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablation.run import HERE
from experiments.ablation.summary import changes, paper_change, seed_spread
from experiments.ablation.variants import BASELINE, VARIANTS
from experiments.long_documents.summary import Runs, asked_runs
from experiments.style import figure_legend
from flash_frac.drawing import FAINT, GREY, INK, OURS, PALE, faint_grid, figure_at, short


def draw(axes: Any, found: Mapping[str, Runs]) -> None:
    """Changes in perplexity as bars on one scale, ours by length and the paper's.

    The band shows the baseline's spread over seeds at the longest length. The bars of the longest
    length and of the paper have numbers at their ends.
    """
    names = [name for name in VARIANTS if name in found and name != BASELINE]
    lengths = sorted({int(row["length"]) for runs in found.values() for row in runs.rows})
    if (spread := seed_spread(found, lengths[-1])) is not None:
        axes.axvspan(-spread, spread, color=FAINT, label="Frac's own standard deviation over seeds")
    height = 0.84 / (len(lengths) + 1)
    for place, (length, colour) in enumerate(zip(lengths, (PALE, OURS), strict=False)):
        change = changes(found, length)
        there = [(i, change[name]) for i, name in enumerate(names) if change[name]]
        means = [statistics.mean(values) for _, values in there]
        bars = axes.barh(
            [i + (place - len(lengths) / 2) * height for i, _ in there],
            means,
            0.92 * height,
            xerr=[statistics.stdev(v) if len(v) > 1 else 0.0 for _, v in there],
            color=colour,
            label=f"ours, {short(length)}",
            error_kw={"lw": 1, "ecolor": INK},
        )
        if length == lengths[-1]:
            axes.bar_label(bars, [f"{mean:.1f}" for mean in means], padding=3, fontsize=7)
    printed = [(i, value) for i, name in enumerate(names) if (value := paper_change(name))]
    bars = axes.barh(
        [i + len(lengths) / 2 * height for i, _ in printed],
        [value for _, value in printed],
        0.92 * height,
        color=GREY,
        label="paper, 390M at 16K",
    )
    axes.bar_label(bars, [f"{value:.1f}" for _, value in printed], padding=3, fontsize=7)
    axes.set(xlabel="change of perplexity, percent", ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), [VARIANTS[name].label for name in names])
    axes.axvline(0, color=INK, lw=0.8)
    faint_grid(axes, "x")


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__, arguments, HERE)
    steps = max(by_steps)
    found = by_steps[steps]
    if len(found) < 2 or BASELINE not in found:
        raise SystemExit(
            f"{folder} must have rows of the baseline and of another variant with {steps} steps; "
            "run python -m experiments.ablation.run, or choose others with --steps"
        )
    with figure_at(folder / "figure.svg", (9, 6)) as (figure, (axes,)):
        draw(axes, found)
        figure_legend(figure, [axes], beside=False)


if __name__ == "__main__":
    main()
