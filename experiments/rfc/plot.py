"""Draw loss.csv and results.csv as figure.svg: python -m experiments.rfc.plot [--out FOLDER]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.style import curve, from_zero, mark_lengths
from flash_frac.drawing import OURS, PALE, faint_grid, figure_at
from flash_frac.files import read_table

HERE = Path(__file__).parent
TRAINED = 4096

Rows = list[dict[str, str]]


def draw_losses(axes: Any, losses: Rows) -> None:
    """Loss against steps, in training and on held-out documents."""
    lines = {
        "loss": {"color": PALE, "label": "training"},
        "eval_loss": {"color": OURS, "marker": "o", "ms": 3.5, "label": "held-out documents"},
    }
    for name, style in lines.items():
        rows = [row for row in losses if row[name]]
        axes.plot(*([float(row[key]) for row in rows] for key in ("step", name)), **style)
    axes.set(xlabel="step of 65,536 tokens", ylabel="loss, nats per token", ylim=(0, 5))
    faint_grid(axes)
    axes.legend(frameon=False, fontsize=8)


def draw_contexts(axes: Any, results: Rows) -> None:
    """Perplexity against window length, on an axis from 0, with its values."""
    found = {int(row["context"]): [float(row["perplexity"])] for row in results}
    curve(axes, found, colour=OURS, label="held-out documents")
    for context, (perplexity,) in found.items():
        axes.annotate(f"{perplexity:.2f}", (context, perplexity), (0, 5), fontsize=8,
                      textcoords="offset points", ha="center",
                      bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip
    mark_lengths(axes, TRAINED)
    axes.set(xlabel="context, tokens", ylabel="perplexity")
    from_zero(axes, max(perplexity for (perplexity,) in found.values()))
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of both files")
    folder = parser.parse_args(arguments).out
    with figure_at(folder / "figure.svg", (9, 3.2), [1, 1]) as (_, (left, right)):
        draw_losses(left, read_table(folder / "loss.csv")[1])
        draw_contexts(right, read_table(folder / "results.csv")[1])


if __name__ == "__main__":
    main()
