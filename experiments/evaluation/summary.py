"""Print results.csv as the tables of the README: python -m experiments.evaluation.summary"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.evaluation.run import HERE, results
from flash_frac.drawing import short
from flash_frac.markdown import plain

Row = Mapping[str, str]
# Metrics that are accuracies in percent.
SHARES = ("acc", "acc_norm")
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")


def share_error(percent: float, num_examples: int) -> float:
    """Standard error of an accuracy, in percentage points.

    Example: `share_error(50.0, 100) == 5.0`
    """
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / num_examples)


def lm_table(rows: Iterable[Row]) -> list[str]:
    """Tasks of the suite lm, one line per name, task and metric."""
    lines = ["| model | task | metric | score | error | chance | examples | s |", "|---" * 8 + "|"]
    for row in rows:
        if row["suite"] == "lm":
            value = float(row["value"])
            share = row["metric"] in SHARES
            error = f"{share_error(value, int(row['samples'])):.2f}" if share else ""
            lines.append(
                f"| {plain(row['name'])} | {plain(row['task'])} | {plain(row['metric'])} "
                f"| {value:.4g} | {error} | {row['chance']} "
                f"| {int(row['samples']):,} | {float(row['seconds']):.0f} |"
            )
    return lines


def length_table(rows: Sequence[Row], name: str) -> list[str]:
    """Needles and documents by length, for the named model."""
    lines = [
        "| tokens | S-NIAH-1 | 2 | 3 | s a sample | MiB | perplexity | of the last tokens | MiB |",
        "|---" * 9 + "|",
    ]
    found = {
        (row["task"], int(row["length"]), row["metric"]): row
        for row in rows
        if row["name"] == name and row["length"]
    }
    documents = next((task for task, *_ in found if task not in NEEDLES), "")
    for length in sorted({length for _, length, _ in found}):
        needles = [found[task, length, "accuracy"] for task in NEEDLES]
        samples = sum(int(row["samples"]) for row in needles)
        seconds = sum(float(row["seconds"]) for row in needles)
        whole, last = (found[documents, length, metric] for metric in ("ppl", "ppl_last"))
        lines.append(
            f"| {short(length)} | {' | '.join(row['value'] for row in needles)} "
            f"| {seconds / samples:.2f} | {max(int(row['peak_mib']) for row in needles):,} "
            f"| {whole['value']} | {last['value']} | {int(whole['peak_mib']):,} |"
        )
    return lines


def sample_lines(rows: Iterable[Row]) -> list[str]:
    """Timings of single samples on a model shape."""
    return [
        f"- {plain(row['name'])}: {int(row['tokens_read']):,} tokens read and 128 written in "
        f"{row['seconds']} s, {int(row['peak_mib'] or 0):,} MiB"
        for row in rows
        if row["metric"] == "seconds"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--name", default="frac-30m")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.csv")
    options = parser.parse_args(arguments)
    rows = list(results(options.out).rows.values())
    parts = (lm_table(rows), length_table(rows, options.name), sample_lines(rows))
    print("\n\n".join("\n".join(part) for part in parts))


if __name__ == "__main__":
    main()
