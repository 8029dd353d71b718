"""results.csv as tables: python -m experiments.long_documents.summary [--steps S] [--out FOLDER]

Mean and standard deviation over seeds. For a model with several learning rates, the one with the
lowest mean perplexity at the training length counts.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.long_documents.run import HERE
from experiments.long_documents.study import results
from experiments.style import NAMES, cell, fewer
from flash_frac.drawing import short
from flash_frac.markdown import plain

Row = Mapping[str, str]


class Runs(NamedTuple):
    """Rows of a model at its best learning rate, for all seeds."""

    lr: float
    rows: Sequence[Row]

    def by_seed(self, measurement: str, column: str) -> dict[int, dict[int, float]]:
        """A column's numbers by length or distance, and then by seed."""
        found: dict[int, dict[int, float]] = {}
        for row in self.rows:
            if row["measurement"] == measurement:
                seeds = found.setdefault(int(row["length"]), {})
                seeds[int(row["seed"])] = float(row[column])
        return dict(sorted(found.items()))

    def values(self, measurement: str, column: str) -> dict[int, list[float]]:
        """A column's numbers over seeds, by length or distance."""
        found = self.by_seed(measurement, column)
        return {length: list(seeds.values()) for length, seeds in found.items()}

    @property
    def train_length(self) -> int:
        return int(self.rows[0]["train_length"])

    @property
    def num_seeds(self) -> int:
        """Most seeds of any measurement."""
        return max(self._counts())

    @property
    def shown_seeds(self) -> str:
        """The number of seeds for a legend, such as "3", or "2 to 3" if measurements differ."""
        least, most = min(self._counts()), self.num_seeds
        return str(most) if least == most else f"{least} to {most}"

    def _counts(self) -> list[int]:
        return [*Counter((row["measurement"], row["length"]) for row in self.rows).values()]


def best_runs(rows: Iterable[Row], steps: int) -> dict[str, Runs]:
    """Best runs by model, among those with this many steps."""
    by_rate: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        if int(row["steps"]) == steps:
            rates = by_rate.setdefault(row["model"], {})
            rates.setdefault(float(row["lr"]), []).append(row)
    return {model: _best(rates) for model, rates in by_rate.items()}


def _best(rates: Mapping[float, Sequence[Row]]) -> Runs:
    runs = [Runs(lr, rows) for lr, rows in rates.items()]
    # A rate with fewer seeds than another is unfinished, and its mean is not comparable.
    most = max(run.num_seeds for run in runs)

    def score(run: Runs) -> float:
        losses = run.values("perplexity", "loss")
        loss = statistics.mean(losses.get(run.train_length, losses[min(losses)]))
        # NaN, of a diverged run, has no place in the order.
        return math.inf if math.isnan(loss) else loss

    return min((run for run in runs if run.num_seeds == most), key=score)


def ratios(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Each seed's value over the same seed's in `reference`, for the seeds that both have."""
    return [value / reference[seed] for seed, value in values.items() if seed in reference]


def table(
    found: Mapping[str, Runs],
    measurement: str,
    column: str,
    *,
    scale: float = 1,
    digits: int = 2,
    names: Mapping[str, str] = NAMES,
    show: Callable[[Sequence[float], int], str] = cell,
) -> list[str]:
    """Rows of a Markdown table: models down, lengths or distances across.

    A cell with fewer seeds than others of its row ends in their number.

    Args:
        names: labels by model; other models keep their name.
        show: formats a cell from the values of all seeds and the number of digits.
    """
    columns = {name: runs.values(measurement, column) for name, runs in found.items()}
    lengths = sorted({length for values in columns.values() for length in values})
    lines = [
        f"| {column} | seeds | lr | {' | '.join(map(short, lengths))} |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    for name, values in columns.items():
        runs, shown = found[name], names.get(name, plain(name))
        cells = [
            show([scale * v for v in values[n]], digits) + fewer(values[n], runs.num_seeds)
            if n in values
            else ""
            for n in lengths
        ]
        lines.append(f"| {shown} | {runs.num_seeds} | {runs.lr:g} | {' | '.join(cells)} |")
    return lines


def asked_runs(
    about: str, arguments: Sequence[str] | None, here: Path
) -> tuple[Path, dict[int, dict[str, Runs]]]:
    """Parse a command line: the folder of an experiment, and its best runs by steps (the fewest
    first) and model.

    Args:
        about: description of the command.
        here: folder of the experiment, unless --out names another; SystemExit if it has no rows.
    """
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--steps", type=int, help="only runs with this many steps")
    parser.add_argument("--out", type=Path, default=here, help="folder of results.csv")
    options = parser.parse_args(arguments)
    rows = list(results(options.out).rows.values())
    there = sorted({int(row["steps"]) for row in rows})
    if not there:
        raise SystemExit(f"{options.out} has no rows; run python -m experiments.{here.name}.run")
    if options.steps is not None and options.steps not in there:
        raise SystemExit(f"--steps must be one of {there} for {options.out}, got {options.steps}")
    asked = there if options.steps is None else [options.steps]
    return options.out, {steps: best_runs(rows, steps) for steps in asked}


def main(arguments: Sequence[str] | None = None) -> None:
    _, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    for steps, found in by_steps.items():
        print(f"# {steps} steps\n\nPerplexity of held-out documents against context\n")
        print(*table(found, "perplexity", "perplexity", digits=3), sep="\n")
        print("\nDigits of a planted value that are right, percent, against distance\n")
        for column in ("accuracy", "control_accuracy", "exact"):
            print(*table(found, "recall", column, scale=100, digits=1), "", sep="\n")
        print("Loss of the digits, nats\n")
        for column in ("loss", "control_loss"):
            print(*table(found, "recall", column), "", sep="\n")


if __name__ == "__main__":
    main()
