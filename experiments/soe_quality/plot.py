"""Draw results.csv as figure.svg: python -m experiments.soe_quality.plot [--out FOLDER]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.soe_quality.run import HERE, results
from experiments.style import FIFTH
from flash_frac.drawing import INK, OTHER, OURS, PALE, THIRD, faint_grid, figure_at

Curves = dict[tuple[str, str, str], tuple[list[float], list[float]]]

# A label has the colour of its line, so both must be dark enough to read.
DARK = "#5f6872"
# Lines on the right, from worst to best: variant, label, colour, line style, and position of the
# label: its order, and points above its line.
AT_16 = (
    ("prior_asymptotic", "layer's prior, softmax(−α log τ)", DARK, "--", 0.3, 4),
    ("prior_exact", "layer's exact prior", THIRD, "--", 0.3, 4),
    ("prior_exact_W2", "exact prior on shared bank W2", OURS, "--", 0.3, 4),
    ("paper", "paper: geometric bank, sum 1", OTHER, "-", 0.3, -9),
    ("shared_W2", "shared bank W2", FIFTH, "-", 0.3, -4),
    ("best_range", "geometric bank, best range", DARK, "-", 0.15, 4),
    ("paper_sum_le_1", "paper's bank, sum ≤ 1", THIRD, "-", 0.55, -4),
    ("shared_W1", "shared bank W1", OURS, "-", 0.3, -4),
    ("free_nodes", "a bank for each α", INK, "-", 0.3, -4),
)


def curves(folder: Path) -> Curves:
    """(orders, errors) for each variant, window and number of modes."""
    found: Curves = {}
    for row in results(folder).rows.values():
        alphas, errors = found.setdefault((row["variant"], row["window"], row["modes"]), ([], []))
        alphas.append(float(row["alpha"]))
        errors.append(float(row["error"]))
    if not found:
        raise ValueError(f"{folder} has no rows; run python -m experiments.soe_quality.run")
    return found


def draw_paper(axes: Any, found: Curves) -> None:
    """The paper's bank at its three numbers of modes, and W1 with 8 modes."""
    lines = (
        ("paper", "8", "paper, M = 8", PALE, "-"),
        ("paper", "16", "paper, M = 16", OTHER, "-"),
        ("paper", "32", "paper, M = 32", INK, ":"),
        ("shared_W1", "8", "shared bank W1, M = 8", OURS, "-"),
    )
    for variant, modes, label, colour, style in lines:
        if (variant, "W1", modes) in found:
            axes.semilogy(*found[variant, "W1", modes], color=colour, ls=style, lw=1.8, label=label)
    axes.set(title="The paper's bank: M = 32 gains little over 16", xlabel="order α")
    axes.set(ylabel="largest error on 4 ≤ s ≤ 6553.6", xlim=(0.1, 0.99))
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def draw_variants(axes: Any, found: Curves) -> None:
    """Banks of 16 modes, each line labelled."""
    for variant, label, colour, style, order, above in AT_16:
        if (variant, "W1", "16") not in found:
            continue
        alphas, errors = found[variant, "W1", "16"]
        axes.semilogy(alphas, errors, color=colour, ls=style, lw=1.8)
        at = min(range(len(alphas)), key=lambda i: abs(alphas[i] - order))
        axes.annotate(label, (alphas[at], errors[at]), (0, above), textcoords="offset points",
                      va="bottom" if above > 0 else "top", fontsize=8, color=colour)  # fmt: skip
    axes.set(title="M = 16: what other banks and weights reach", xlabel="order α")
    axes.set(xlim=(0.1, 0.99), ylim=(1e-10, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    folder = parser.parse_args(arguments).out
    found = curves(folder)
    with figure_at(folder / "figure.svg", (10, 4.4), widths=(1, 1.2)) as (_, (left, right)):
        draw_paper(left, found)
        draw_variants(right, found)
        for axes in (left, right):
            faint_grid(axes)


if __name__ == "__main__":
    main()
