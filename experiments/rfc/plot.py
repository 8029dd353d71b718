"""Draw loss.csv and results.csv as figure.svg: python experiments/rfc/plot.py [--out FOLDER]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_frac.drawing import GREY, OURS, PALE, figure_at, length_axis
from flash_frac.files import read_table

HERE = Path(__file__).parent
TRAINED = 4096

Rows = list[dict[str, str]]


def draw_losses(axes: Any, losses: Rows) -> None:
    """Loss against steps, in training and on held-out documents."""
    lines = {
        "loss": {"color": PALE, "label": "training"},
        "eval_loss": {"color": OURS, "marker": "o", "label": "held-out documents"},
    }
    for name, style in lines.items():
        rows = [row for row in losses if row[name]]
        axes.plot(*([float(row[key]) for row in rows] for key in ("step", name)), **style)
    axes.set(xlabel="step of 65,536 tokens", ylabel="loss, nats per token", ylim=(1.5, 5))
    axes.legend(frameon=False)


def draw_contexts(axes: Any, results: Rows) -> None:
    """Perplexity against the length of windows, and a line at that of training."""
    context = [int(row["context"]) for row in results]
    axes.plot(context, [float(row["perplexity"]) for row in results], color=OURS, marker="o")
    axes.axvline(TRAINED, color=GREY, lw=0.8)
    axes.annotate("trained at 4K", (TRAINED, 1), (4, -10), xycoords=("data", "axes fraction"),
                  textcoords="offset points", color=GREY)  # fmt: skip
    length_axis(axes, context)
    axes.set(xlabel="context, tokens", ylabel="held-out perplexity")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of both files")
    folder = parser.parse_args(arguments).out
    with figure_at(folder / "figure.svg", (9, 3.2), [1, 1]) as (_, (left, right)):
        draw_losses(left, read_table(folder / "loss.csv")[1])
        draw_contexts(right, read_table(folder / "results.csv")[1])


if __name__ == "__main__":
    main()
