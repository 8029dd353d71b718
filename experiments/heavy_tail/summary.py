"""results.csv as tables: python -m experiments.heavy_tail.summary [--out FOLDER]

Mean and standard deviation over seeds beside the paper's, and p of a one-sided Welch test over
seeds that Frac is ahead of each baseline at each length.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.heavy_tail.model import DESIGNS
from experiments.heavy_tail.run import HERE, LENGTHS, results
from experiments.style import NAMES as MODEL_NAMES
from experiments.style import cell, fewer
from flash_frac.drawing import short
from flash_frac.extras import require

# The paper's table of 10 runs, γ = 0.1: mean and standard deviation at LENGTHS.
PAPER = {
    "attention": ((97.6, 65.9, 50.5, 50.1, 50.9, 48.6, 50.0), (0.8, 3.7, 3.3, 3.0, 3.2, 1.7, 3.7)),
    "mamba2": ((82.7, 74.0, 60.9, 59.4, 56.0, 57.9, 51.3), (2.9, 3.6, 4.5, 5.4, 3.5, 3.2, 4.3)),
    "mamba3": ((98.6, 90.5, 71.3, 67.0, 62.6, 63.2, 55.6), (0.7, 2.7, 7.5, 5.0, 4.3, 4.4, 3.8)),
    "gated_deltanet": (
        (98.5, 92.5, 78.7, 73.7, 68.4, 65.8, 58.4),
        (0.6, 2.8, 3.4, 3.5, 2.0, 2.5, 3.8),
    ),
    "frac": ((96.5, 92.3, 85.6, 80.4, 75.2, 70.6, 63.8), (2.5, 1.1, 3.0, 1.4, 0.4, 2.0, 1.9)),
}
NAMES = {
    "frac": MODEL_NAMES["frac"],
    "frac_paper_clock": MODEL_NAMES["frac_paper_clock"],
    "frac_ours": MODEL_NAMES["frac_ours"],
    "frac_dilated": "Frac, dilation alone",
    "frac_early": "Frac, early regime alone",
    "frac_delta": MODEL_NAMES["frac_delta"],
    **{name: shown for name, shown in MODEL_NAMES.items() if not name.startswith("frac")},
    "mamba2_dilated": "Mamba2, dilation",
    "gated_deltanet_dilated": "Gated DeltaNet, dilation",
    "attention_nope": "attention, no positions",
    "sum": "plain sum",
    "last": "last event",
    "window_128": "last 128 tokens",
    "window_512": "last 512 tokens",
    "window_2048": "last 2,048 tokens",
    "exponential_fixed": "exponential, best rate at 512",
    "exponential_best": "exponential, best rate of each length",
    "bank": "fixed bank, τ to 2^17",
}

# Accuracies of all seeds in percent, by model and length.
Accuracies = Mapping[str, Mapping[int, Sequence[float]]]


def accuracies(folder: Path, gamma: float) -> dict[str, dict[int, list[float]]]:
    """Accuracies of every model and fixed kernel, in the order of NAMES."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in results(folder).rows.values():
        if float(row["gamma"]) == gamma:
            along = found.setdefault(row["model"], {})
            along.setdefault(int(row["length"]), []).append(100 * float(row["accuracy"]))
    return {name: found[name] for name in NAMES if name in found}


def table(found: Accuracies, *, paper: bool) -> list[str]:
    """Rows of a Markdown table; the paper's row follows that of the same model."""
    lengths = sorted({n for along in found.values() for n in along})
    heads = [short(n) for n in lengths]
    lines = [f"| | seeds | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name, along in found.items():
        seeds = max(map(len, along.values()))
        cells = [cell(along[n], 1) + fewer(along[n], seeds) if n in along else "" for n in lengths]
        shown = seeds if name in DESIGNS else ""
        lines.append(f"| {NAMES[name]} | {shown} | {' | '.join(cells)} |")
        if paper and name in PAPER:
            pairs = zip(LENGTHS, *PAPER[name], strict=True)
            known = {n: f"*{mean} ± {spread}*" for n, mean, spread in pairs}
            printed = [known.get(n, "") for n in lengths]
            lines.append(f"| *{NAMES[name]}, paper* | *10* | {' | '.join(printed)} |")
    return lines


def lead(found: Accuracies, leader: str) -> list[str]:
    """Rows of a Markdown table: p-values that `leader` is not ahead of each other model."""
    stats = require("scipy.stats", "theory", "the test of the ordering")
    others = [name for name in found if name in DESIGNS and not name.startswith("frac")]
    lengths = list(found[leader])
    lines = [
        f"| {NAMES[leader]} ahead of | {' | '.join(map(short, lengths))} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for name in others:
        tests = [
            stats.ttest_ind(
                found[leader][n], found[name].get(n, ()), equal_var=False, alternative="greater"
            ).pvalue
            for n in lengths
        ]
        # One seed has no spread to test against.
        cells = ("" if math.isnan(p) else f"{p:.2g}" for p in tests)
        lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    folder = parser.parse_args(arguments).out
    for gamma in sorted({float(row["gamma"]) for row in results(folder).rows.values()}):
        found = accuracies(folder, gamma)
        print(f"\nγ = {gamma}\n", *table(found, paper=gamma == 0.1), sep="\n")
        for leader in ("frac", "frac_ours"):
            if leader in found:
                print("", *lead(found, leader), sep="\n")


if __name__ == "__main__":
    main()
