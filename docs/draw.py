"""Draw the figures of concepts.md and architecture.md: python docs/draw.py [--out FOLDER]"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from flash_frac.drawing import FOURTH, GREY, INK, OTHER, OURS, PALE, THIRD, faint_grid, figure_at
from flash_frac.theory import bin_masses, named_bank, relaxation

ORDERS = {0.3: THIRD, 0.5: OURS, 0.7: PALE, 0.9: FOURTH}
BANK = "W2_M16_simplex"
# From the top; a room imports from rows below its own, or from its left or right.
ROWS = (
    (("cli", "parse, call, print"),),
    (("quickstart", "train and inspect"), ("bench", "tokens/s"), ("doctor", "what works")),
    (("train", "recipes, Trainer"), ("evals", "lm-eval"), ("inspect", "memory law")),
    (("inference", "engine, generator, stream, server"), ("data", "text to tokens")),
    (("models", "configuration, modeling, cache"),),
    (("layers", "FracMixer, DeltaMixer, GatedMLP, norms"),),
    (("ops", "one folder per operator: reference, torch, Triton"), ("theory", "numpy: banks")),
)


def draw_kernels(path: Path) -> None:
    """The relaxation of several orders beside the exponential."""
    t = np.geomspace(1e-2, 1e5, 150)
    with figure_at(path, (6, 3.2)) as (_, (axes,)):
        for alpha, colour in ORDERS.items():
            axes.loglog(t, relaxation(t, alpha=alpha), color=colour, lw=1.8, label=f"α = {alpha}")
        axes.loglog(
            t, np.exp(-np.minimum(t, 50)), color=INK, lw=1.4, ls="--", label="exp(-t), α = 1"
        )
        axes.set_ylim(1e-6, 2)
        axes.set_xlabel("time t")
        axes.set_ylabel("share that is left")
        axes.set_title("A power law outlasts an exponential")
        axes.legend(frameon=False, fontsize=8, loc="lower left")
        faint_grid(axes, "both")


def draw_bank(path: Path) -> None:
    """Sixteen exponentials, and their sum beside the kernel."""
    alpha = 0.5
    tau = named_bank(BANK)
    weights = bin_masses(tau, alpha)
    t = np.geomspace(1e-2, 1e6, 150)
    modes = weights[:, None] * np.exp(-t / tau[:, None])
    with figure_at(path, (8, 3.2), widths=(3, 2)) as (_, (left, right)):
        left.loglog(t, modes.T, color=GREY, lw=0.8)
        left.loglog(t, relaxation(t, alpha=alpha), color=OURS, lw=4, alpha=0.4, label="kernel")
        left.loglog(t, modes.sum(0), color=OTHER, lw=1.2, label="sum of 16 modes")
        left.set_ylim(1e-5, 2)
        left.set_xlabel("time t")
        left.set_title("Sixteen exponentials make a power law")
        left.legend(frameon=False, fontsize=8, loc="lower left")
        faint_grid(left, "both")
        right.bar(range(1, len(tau) + 1), weights, color=OURS)
        right.set_xticks((1, 4, 8, 12, 16))
        right.set_xlabel("mode, from the fastest to the slowest")
        right.set_title("Weight of each mode")
        faint_grid(right)


def draw_rooms(path: Path) -> None:
    """The parts of the package, as floors of a house."""
    with figure_at(path, (7.2, 4.2)) as (_, (axes,)):
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(-len(ROWS), 0)
        for n, row in enumerate(ROWS):
            sizes = [max(len(content), 14) for _, content in row]
            left = 0.0
            for (name, content), size in zip(row, sizes, strict=True):
                width = size / sum(sizes)
                axes.barh(-n - 0.5, width - 0.01, 0.84, left=left, color=PALE, alpha=0.45)
                middle = left + width / 2 - 0.005
                axes.text(middle, -n - 0.4, name, ha="center", va="bottom", weight="bold")
                axes.text(middle, -n - 0.54, content, ha="center", va="top", fontsize=8)
                left += width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "figures")
    out = parser.parse_args().out
    draw_kernels(out / "kernels.svg")
    draw_bank(out / "bank.svg")
    draw_rooms(out / "rooms.svg")


if __name__ == "__main__":
    main()
