"""results.csv and memory.csv as tables: python -m experiments.parametrisation.summary

Mean and standard error over seeds, at the learning rate with the lowest perplexity at the training
length; numbers of memory.csv are means over layers and seeds, at the same learning rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.long_documents.summary import Runs, asked_runs, table
from experiments.mixed_models.summary import difference
from experiments.parametrisation import memory
from experiments.parametrisation.run import HERE
from experiments.parametrisation.variants import MODELS, PUBLISHED, VARIANTS, label, split_name
from experiments.style import mean_cell
from flash_frac.drawing import short

# Headings of the table of memory.csv, and their columns; a pair is shown as "value of limit".
_SHOWN: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("median Δ", ("delta_median", "delta_max"), 2),
    ("median λ", ("lambda_median", "lambda_max"), 2),
    ("median α", ("alpha_median", "alpha_max"), 2),
    ("half of response below", ("half",), 1),
    ("90% below", ("ninety",), 1),
    *((f"up to lag {lag:,}, %", (f"within_{lag}",), 1) for lag in memory.LAGS),
    ("modes read", ("read_modes",), 1),
    ("modes written", ("write_modes",), 1),
    ("slow half read, %", ("slow_read",), 1),
    ("slow half written, %", ("slow_write",), 1),
)


def in_order(found: Mapping[str, Runs]) -> dict[str, Runs]:
    """Sort by model, then in the order of VARIANTS."""
    names = [f"{model}.{variant}" for model in MODELS for variant in VARIANTS]
    return {name: found[name] for name in names if name in found}


def differences(found: Mapping[str, Runs]) -> list[str]:
    """Rows of a Markdown table: perplexity of each variant minus that of the published layer."""
    values = {name: runs.values("perplexity", "perplexity") for name, runs in found.items()}
    lengths = sorted({n for by_length in values.values() for n in by_length})
    lines = [
        f"| perplexity less that of published | {' | '.join(map(short, lengths))} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for name, own in values.items():
        model, variant = split_name(name)
        reference = values.get(f"{model}.{PUBLISHED}")
        if variant == PUBLISHED or reference is None:
            continue
        cells = [
            difference(own[n], reference[n]) if n in own and n in reference else "" for n in lengths
        ]
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return lines


def memories(found: Mapping[str, Runs], steps: int, folder: Path) -> list[str]:
    """Rows of a Markdown table of memory.csv."""
    rows = list(memory.results(folder).rows.values())
    headings = [heading for heading, _, _ in _SHOWN]
    lines = [f"| | {' | '.join(headings)} |", "|---" * (len(headings) + 1) + "|"]
    for name, runs in found.items():
        own = [
            row
            for row in rows
            if (row["model"], int(row["steps"]), float(row["lr"])) == (name, steps, runs.lr)
        ]
        if own:
            lines.append(f"| {label(name)} | {' | '.join(_cells(own))} |")
    return lines


def _cells(rows: Sequence[Mapping[str, str]]) -> list[str]:
    cells = []
    for heading, columns, digits in _SHOWN:
        scale = 100 if heading.endswith("%") else 1
        value, *limit = (
            scale * statistics.mean(float(row[column]) for row in rows) for column in columns
        )
        cells.append(f"{value:.{digits}f}" + "".join(f" of {x:g}" for x in limit))
    return cells


def tables(runs: Mapping[str, Runs], steps: int, folder: Path) -> dict[str, list[str]]:
    """All tables of a folder's rows, by heading; the README contains them."""
    found = in_order(runs)
    names = {name: label(name) for name in found}
    shown = {"digits": 3, "names": names, "show": mean_cell}
    return {
        "Perplexity of held-out documents against context": table(
            found, "perplexity", "perplexity", **shown
        ),
        "Differences, ± two standard errors where there are seeds": differences(found),
        "How the Frac layers use their bank, means over layers": memories(found, steps, folder),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    for steps, found in by_steps.items():
        print(f"# {steps} steps")
        for heading, lines in tables(found, steps, folder).items():
            print("", heading, "", *lines, sep="\n")


if __name__ == "__main__":
    main()
