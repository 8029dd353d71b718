"""Draw results.csv as figure.svg: python -m experiments.heavy_tail.plot [--out FOLDER]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.heavy_tail.model import DESIGNS
from experiments.heavy_tail.run import HERE, results
from experiments.heavy_tail.summary import NAMES, Accuracies, accuracies
from experiments.style import COLOURS, curve, figure_legend, mark_guessing, mark_lengths
from flash_frac.drawing import INK, figure_at

TRAINED = 512
# Models drawn as dashed lines in the colour of another.
VARIANTS = {
    "frac_dilated": "frac",
    "frac_early": "frac_ours",
    "mamba2_dilated": "mamba2",
    "gated_deltanet_dilated": "gated_deltanet",
    "attention_nope": "attention",
}
KERNELS = {"sum": ("-", 0.9), "exponential_fixed": (":", 1.2)}


def draw(axes: Any, found: Accuracies, gamma: float) -> None:
    """Mean and spread over seeds against length; fixed kernels as thin black lines."""
    for name in [name for name in found if name in DESIGNS]:
        colour, dashed = COLOURS[VARIANTS.get(name, name)], name in VARIANTS
        curve(axes, found[name], colour=colour, label=NAMES[name], dashed=dashed)
    for name, (line, width) in KERNELS.items():
        along = found.get(name, {})
        lengths = sorted(along)
        values = [along[n][0] for n in lengths]
        axes.plot(lengths, values, line, color=INK, lw=width, label=NAMES[name])
    mark_guessing(axes, 50)
    mark_lengths(axes, TRAINED)
    axes.set(title=f"γ = {gamma}", xlabel="tokens", ylabel="accuracy, percent", ylim=(45, 101))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    folder = parser.parse_args(arguments).out
    gammas = sorted({float(row["gamma"]) for row in results(folder).rows.values()})
    if not gammas:
        raise SystemExit(f"{folder} has no rows; run python -m experiments.heavy_tail.run")
    size = (2.8 + 3.4 * len(gammas), 3.6)
    with figure_at(folder / "figure.svg", size, [1] * len(gammas)) as (figure, panels):
        for axes, gamma in zip(panels, gammas, strict=True):
            draw(axes, accuracies(folder, gamma), gamma)
        figure_legend(figure, panels, beside=True, title="mean, and standard deviation over seeds")


if __name__ == "__main__":
    main()
