"""results.csv and speed.csv as tables: python -m experiments.mixed_models.summary [--out FOLDER]

Mean and standard error over seeds, and differences between models with two standard errors. For a
model with several learning rates, the one with the lowest mean perplexity at the training length
counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.long_documents.summary import Runs, asked_runs, table
from experiments.mixed_models import speed
from experiments.mixed_models.models import DESIGNS
from experiments.mixed_models.run import HERE
from experiments.style import mean_cell, standard_error
from flash_frac.drawing import short

PAIRS = (
    ("frac_attention", "delta_attention"),
    ("frac_attention_nope", "delta_attention"),
    ("frac_attention_nope", "frac_attention"),
    ("frac_delta", "delta"),
)
"""Pairs of models to compare: the first minus the second."""
# Columns of the speed table: heading, measurement, length, batch, and size of one unit.
_SPEEDS = (
    ("training, tokens/s", "training", 4096, 8, 1),
    ("decoding at 4K", "decoding", 4096, 1, 1),
    ("at 64K", "decoding", 65536, 1, 1),
    ("16 sequences at 4K", "decoding", 4096, 16, 1),
    ("16 at 64K", "decoding", 65536, 16, 1),
    ("state at 4K, MB", "state", 4096, 1, 1e6),
    ("at 64K, MB", "state", 65536, 1, 1e6),
)


def label(name: str) -> str:
    """A model's name in tables, with the slope of its temperature if it has one."""
    base, _, slope = name.partition("_temperature_")
    shown = DESIGNS[base].label if base in DESIGNS else base
    return f"{shown}, temperature {slope}" if slope else shown


def in_order(found: Mapping[str, Runs]) -> dict[str, Runs]:
    """The order of DESIGNS, each followed by its temperatures."""
    ranks = {name: rank for rank, name in enumerate(DESIGNS)}

    def key(name: str) -> tuple[int, str]:
        return ranks.get(name.partition("_temperature_")[0], len(ranks)), name

    return {name: found[name] for name in sorted(found, key=key)}


def measured(found: Mapping[str, Runs], measurement: str, column: str, **shown) -> list[str]:
    """Rows of a Markdown table of one column: mean and standard error over seeds."""
    names = {name: label(name) for name in found}
    return table(found, measurement, column, names=names, show=mean_cell, **shown)


def difference(first: Sequence[float], second: Sequence[float]) -> str:
    """Difference of the means, first minus second, with two standard errors."""
    less = statistics.mean(first) - statistics.mean(second)
    if min(len(first), len(second)) < 2:
        return f"{less:+.3f}"
    error = math.hypot(standard_error(first), standard_error(second))
    return f"{less:+.3f} ± {2 * error:.3f}"


def differences(found: Mapping[str, Runs]) -> list[str]:
    """Rows of a Markdown table: differences in perplexity of pairs of models."""
    pairs = [pair for pair in PAIRS if all(name in found for name in pair)]
    if not pairs:
        return []
    values = {
        name: found[name].values("perplexity", "perplexity") for pair in pairs for name in pair
    }
    lengths = sorted({n for by_length in values.values() for n in by_length})
    lines = [
        f"| perplexity of | less that of | {' | '.join(map(short, lengths))} |",
        "|---" * (len(lengths) + 2) + "|",
    ]
    for first, second in pairs:
        one, two = values[first], values[second]
        cells = [difference(one[n], two[n]) if n in one and n in two else "" for n in lengths]
        lines.append(f"| {label(first)} | {label(second)} | {' | '.join(cells)} |")
    return lines


def speeds(folder: Path) -> list[str]:
    """Rows of a Markdown table of speed.csv; none if it has no rows."""
    rows = speed.results(folder).rows
    models = [name for name in DESIGNS if any(key[0] == name for key in rows)]
    if not models:
        return []
    heads = [heading for heading, *_ in _SPEEDS]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in models:
        cells = []
        for _, *key, unit in _SPEEDS:
            row = rows.get((name, *map(str, key)))
            value = float(row["value"]) / unit if row else None
            digits = 1 if unit > 1 else 0
            cells.append("" if value is None else f"{value:,.{digits}f}")
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return lines


def tables(found: Mapping[str, Runs]) -> dict[str, list[str]]:
    """All tables of results.csv, by heading; the README contains them."""
    found = in_order(found)
    percent = {"scale": 100, "digits": 1}
    return {
        "Perplexity of held-out documents against context": measured(
            found, "perplexity", "perplexity", digits=3
        ),
        "Differences, ± two standard errors": differences(found),
        "Digits of a planted value that are right, percent, against distance": measured(
            found, "recall", "accuracy", **percent
        ),
        "The same in the control": measured(found, "recall", "control_accuracy", **percent),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    for steps, found in by_steps.items():
        print(f"# {steps} steps")
        for heading, lines in tables(found).items():
            print("", heading, "", *lines, sep="\n")
    print("\n# Speed and memory\n", *speeds(folder), sep="\n")


if __name__ == "__main__":
    main()
