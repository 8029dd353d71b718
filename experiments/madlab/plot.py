"""Draw results.csv as figure.svg, and print its table.

python -m experiments.madlab.plot [--preset P] [--epochs N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.madlab.run import HERE, results
from experiments.madlab.settings import PRESETS
from experiments.madlab.summary import PAPER, TASK_NAMES, Score, best_scores, table
from experiments.style import COLOURS, NAMES, figure_legend
from flash_frac.drawing import INK, PALE, faint_grid, figure_at


def draw(axes: Any, scores: dict[tuple[str, str], Score]) -> None:
    """Bars by task and model with their spread; the paper's numbers as horizontal lines."""
    tasks = [task for task in TASK_NAMES if any(task == found for found, _ in scores)]
    models = [model for model in NAMES if any(model == found for _, found in scores)]
    width = 0.8 / len(models)
    for place, model in enumerate(models):
        name, colour = NAMES[model], COLOURS[model]
        shift = (place - (len(models) - 1) / 2) * width
        there = [(task, i + shift, scores[task, model]) for i, task in enumerate(tasks)
                 if (task, model) in scores]  # fmt: skip
        x = [at for _, at, _ in there]
        mean, spread = (
            [getattr(score, part) for *_, score in there] for part in ("mean", "spread")
        )
        axes.bar(x, mean, 0.92 * width, yerr=spread, color=colour, label=name,
                 error_kw={"lw": 1, "ecolor": INK})  # fmt: skip
        for task, at, score in there:
            paper = PAPER.get(model, {}).get(task, (0.0, 0.0))[0]
            if paper:
                axes.hlines(paper, at - 0.46 * width, at + 0.46 * width, color=INK, lw=1.6)
            # At the foot of its bar, clear of the paper's line.
            axes.annotate(f"{score.mean:.1f}", (at, 0), (0, 2), textcoords="offset points",
                          fontsize=7, ha="center", va="bottom",
                          color=INK if colour == PALE else "white")  # fmt: skip
    axes.hlines([], 0, 0, color=INK, lw=1.6, label="paper, 200 epochs")
    axes.set_xticks(range(len(tasks)), [TASK_NAMES[task] for task in tasks])
    axes.set(ylabel="accuracy, percent", ylim=(0, 108), yticks=range(0, 101, 20))
    faint_grid(axes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, default="paper")
    parser.add_argument("--epochs", type=int, help="only rows with these epochs; default the most")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    options = parser.parse_args(arguments)
    rows = results(options.out).rows.values()
    scores = best_scores(rows, PRESETS[options.preset], epochs=options.epochs)
    if not scores:
        raise SystemExit(
            f"{options.out} has no rows of preset {options.preset} with these epochs; "
            "run python -m experiments.madlab.run"
        )
    print("\n".join(table(scores)))
    with figure_at(options.out / "figure.svg", (10, 3.6)) as (figure, (axes,)):
        draw(axes, scores)
        figure_legend(figure, [axes], beside=False)


if __name__ == "__main__":
    main()
