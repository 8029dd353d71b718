"""Draw results.csv as figure.svg: python -m experiments.heavy_tail.plot [--out FOLDER]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.heavy_tail.run import HERE, LENGTHS, results
from experiments.heavy_tail.summary import NAMES, Accuracies, accuracies
from experiments.style import COLOURS, curve
from flash_frac.drawing import FAINT, FOURTH, GREY, INK, OURS, PALE, figure_at, length_axis

# The published layer is paler here than ours.
HERE_COLOURS = {**COLOURS, "frac_ours": OURS, "frac": PALE, "mamba3": FOURTH}
KERNELS = {"sum": ("-", 0.9), "exponential_fixed": (":", 1.2)}


def draw(axes: Any, found: Accuracies, gamma: float) -> None:
    """Mean over seeds against length with its spread; fixed kernels in thin black."""
    for name, colour in HERE_COLOURS.items():
        if name in found:
            curve(axes, found[name], colour=colour, label=NAMES[name])
    for name, (line, width) in KERNELS.items():
        along = found.get(name, {})
        lengths = sorted(along)
        values = [along[n][0] for n in lengths]
        axes.plot(lengths, values, line, color=INK, lw=width, label=NAMES[name])
    axes.axhline(50, color=GREY, lw=0.8)
    length_axis(axes, LENGTHS)
    axes.set(title=f"γ = {gamma}", xlabel="tokens (trained at 512)", ylim=(45, 101))
    axes.set_ylabel("accuracy, percent")
    axes.grid(color=FAINT, lw=0.6)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    folder = parser.parse_args(arguments).out
    gammas = sorted({float(row["gamma"]) for row in results(folder).rows.values()})
    if not gammas:
        raise SystemExit(f"{folder} has no rows; python -m experiments.heavy_tail.run makes them")
    size = (2.8 + 3.4 * len(gammas), 3.6)
    with figure_at(folder / "figure.svg", size, [1] * len(gammas)) as (figure, panels):
        for axes, gamma in zip(panels, gammas, strict=True):
            draw(axes, accuracies(folder, gamma), gamma)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)


if __name__ == "__main__":
    main()
