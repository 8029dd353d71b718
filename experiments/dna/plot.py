"""Draw results.csv as figure.svg, and print its table.

python -m experiments.dna.plot [--score S] [--steps N] [--core C] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.dna.run import HERE, results
from experiments.dna.summary import SETTING, TEXTS, Score, best_rows, most_steps, table
from experiments.style import COLOURS, NAMES, curve, figure_legend, mark_guessing
from flash_frac.drawing import faint_grid, figure_at, length_axis

FRAC = "frac"


Perplexities = dict[str, dict[int, tuple[float, ...]]]


def perplexities(scores: Mapping[tuple[str, int], Score]) -> Perplexities:
    """Perplexities of all seeds by model and length, without diverged runs."""
    found: Perplexities = {}
    for (model, length), score in scores.items():
        if math.isfinite(score.ppl):
            found.setdefault(model, {})[length] = score.values
    return {model: found[model] for model in NAMES if model in found}


def draw(axes: Any, found: Perplexities) -> None:
    """Test perplexity by length, one line per model, on an axis from 1, which is certainty."""
    for model, by_length in found.items():
        curve(axes, by_length, colour=COLOURS[model], label=NAMES[model])
    mark_guessing(axes, 4)
    axes.set(ylabel="test perplexity", ylim=(1, 4.2))
    _finish(axes, found)


def draw_differences(axes: Any, found: Perplexities) -> None:
    """Difference of each model from Frac, in percent."""
    frac = {length: statistics.fmean(values) for length, values in found[FRAC].items()}
    percent = {
        model: {
            length: [100 * (value / frac[length] - 1) for value in values]
            for length, values in by_length.items()
            if length in frac
        }
        for model, by_length in found.items()
    }
    for model, by_length in percent.items():
        curve(axes, by_length, colour=COLOURS[model], label=NAMES[model])
    highest = max(abs(v) for along in percent.values() for each in along.values() for v in each)
    axes.set(ylabel="perplexity over Frac's, percent", ylim=(-1.5 * highest, 1.5 * highest))
    _finish(axes, found)


def _finish(axes: Any, found: Perplexities) -> None:
    length_axis(axes, sorted({length for by_length in found.values() for length in by_length}))
    axes.set_xlabel("length in training and test, bases")
    faint_grid(axes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--score", choices=TEXTS, default="ppl", help="perplexity to draw")
    parser.add_argument("--steps", help="only rows with these steps; default the most")
    parser.add_argument("--core", help="only these rows, if there are several cores")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    options = parser.parse_args(arguments)
    wanted = {k: v for k in ("steps", "core") if (v := getattr(options, k)) is not None}
    rows = list(results(options.out).rows.values())
    found = {
        setting: scores
        for setting, scores in best_rows(rows, options.score).items()
        if wanted.items() <= dict(zip(SETTING, setting, strict=True)).items()
    }
    found = most_steps(found)
    if len(found) != 1:
        settings = "; ".join(" ".join(setting) for setting in found) or "none"
        raise SystemExit(
            f"{options.out} must have rows of one setting ({', '.join(SETTING)}), found "
            f"{settings}; choose with --steps and --core, or run experiments.dna.run for rows"
        )
    ((setting, scores),) = found.items()
    print(*table(rows, setting), sep="\n")
    drawn = perplexities(scores)
    panels = [draw]
    # Differences of half a percent are invisible on a full axis of perplexities.
    if any(drawn.get(FRAC, {}).keys() & drawn[model].keys() for model in drawn if model != FRAC):
        panels.append(draw_differences)
    size = (2 + 3.6 * len(panels), 3.2)
    with figure_at(options.out / "figure.svg", size, [1] * len(panels)) as (figure, axes):
        for axis, panel in zip(axes, panels, strict=True):
            panel(axis, drawn)
        figure_legend(figure, axes, beside=True)


if __name__ == "__main__":
    main()
