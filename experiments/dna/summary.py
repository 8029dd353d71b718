"""From the rows of all runs to one for each model and length: that of the best learning rate.

It is chosen by the perplexity on the validation split, as in the paper; of the test split only the
perplexity at that learning rate counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

# Columns that must agree for two rows to be compared, beside the model and the length.
SETTING = (
    *("data", "mode", "unknown", "eos", "strands", "eval_tokens"),
    *("core", "steps", "batch_tokens"),
)

Row = Mapping[str, str]
Setting = tuple[str, ...]


class Score(NamedTuple):
    """Perplexities on the test split at the best learning rate, one a seed.

    `at_edge`: that learning rate is the lowest or highest of several, and a better one may lie
    beyond.
    """

    values: tuple[float, ...]
    lr: float
    at_edge: bool

    @property
    def ppl(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        if len(self.values) < 2:
            return 0.0
        # Python's own function does not take the infinite score of a run that diverged.
        return statistics.stdev(self.values) if math.isfinite(self.ppl) else math.inf


def best_rows(
    rows: Iterable[Row], column: str = "ppl"
) -> dict[Setting, dict[tuple[str, int], Score]]:
    """Scores by (model, length), of every setting there is.

    Args:
        rows: of results.csv.
        column: "ppl" of all targets, as HyenaDNA counts it, or "base_ppl" of A, C, G and T alone.
    """
    runs: dict[Setting, dict[tuple[str, int], dict[float, list[Row]]]] = {}
    for row in rows:
        setting = tuple(row[name] for name in SETTING)
        by_lr = runs.setdefault(setting, {}).setdefault((row["model"], int(row["length"])), {})
        by_lr.setdefault(float(row["lr"]), []).append(row)
    return {
        setting: {key: _best(by_lr, column) for key, by_lr in found.items()}
        for setting, found in runs.items()
    }


def _best(by_lr: Mapping[float, list[Row]], column: str) -> Score:
    # A learning rate that has fewer seeds than another is not finished, and not comparable.
    most = max(map(len, by_lr.values()))
    whole = {lr: rows for lr, rows in by_lr.items() if len(rows) == most}

    def on_validation(lr: float) -> float:
        return statistics.fmean(float(row[f"valid_{column}"]) for row in whole[lr])

    lr = min(whole, key=on_validation)
    values = tuple(float(row[f"test_{column}"]) for row in whole[lr])
    return Score(values, lr, len(whole) > 1 and lr in (min(whole), max(whole)))


def lines(scores: Mapping[Setting, Mapping[tuple[str, int], Score]]) -> Iterator[str]:
    """The scores as text; a learning rate at the edge of its sweep is marked."""
    for setting, found in scores.items():
        yield ", ".join(f"{k} {v}" for k, v in zip(SETTING, setting, strict=True))
        for (model, length), score in sorted(found.items(), key=lambda item: item[0][::-1]):
            edge = " (edge of the sweep)" if score.at_edge else ""
            yield (
                f"{length:6} {model:15} {score.ppl:.4f} ± {score.spread:.4f} over "
                f"{len(score.values)} seeds, lr {score.lr:g}{edge}"
            )
