"""Draw results.csv as figure.svg: python -m experiments.dna.plot [--score S] [--out FOLDER]"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.dna.run import HERE, results
from experiments.dna.summary import SETTING, Score, best_rows
from experiments.style import COLOURS, NAMES, curve
from flash_frac.drawing import INK, faint_grid, figure_at, length_axis


def draw(axes: Any, scores: Mapping[tuple[str, int], Score]) -> None:
    """Perplexity on the test split by length, a line a model; what diverged is not drawn."""
    for model, name in NAMES.items():
        found = {
            length: score.values
            for (of, length), score in scores.items()
            if of == model and math.isfinite(score.ppl)
        }
        if found:
            curve(axes, found, colour=COLOURS[model], label=name)
    lengths = sorted({length for _, length in scores})
    length_axis(axes, lengths)
    axes.set(xlabel="length in training and test, bases", ylabel="test perplexity")
    faint_grid(axes)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--score", choices=("ppl", "base_ppl"), default="ppl")
    parser.add_argument("--steps", help="those of the rows, if they are of several")
    parser.add_argument("--core", help="that of the rows, if they are of several")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    options = parser.parse_args(arguments)
    wanted = {k: v for k in ("steps", "core") if (v := getattr(options, k)) is not None}
    found = {
        setting: scores
        for setting, scores in best_rows(results(options.out).rows.values(), options.score).items()
        if wanted.items() <= dict(zip(SETTING, setting, strict=True)).items()
    }
    if len(found) != 1:
        settings = "; ".join(" ".join(setting) for setting in found) or "none"
        raise SystemExit(
            f"{options.out} must have rows of one setting ({', '.join(SETTING)}), found "
            f"{settings}; choose with --steps and --core, or run experiments.dna.run for rows"
        )
    with figure_at(options.out / "figure.svg", (5, 3.4)) as (_, (axes,)):
        draw(axes, next(iter(found.values())))


if __name__ == "__main__":
    main()
