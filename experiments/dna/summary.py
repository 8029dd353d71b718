"""Reduce the rows of all runs to one per model and length, at the best learning rate.

The validation perplexity chooses the learning rate, as in the paper; only the test perplexity at
that learning rate counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from experiments.style import NAMES, cell
from flash_frac.drawing import short

# Columns that must agree for two rows to be comparable, besides model and length.
SETTING = (
    *("data", "mode", "unknown", "eos", "strands", "eval_tokens"),
    *("core", "steps", "batch_tokens"),
)

# Perplexities by the prefix of their columns, as in tables.
TEXTS = {"ppl": "test perplexity", "base_ppl": "of A, C, G and T alone"}

Row = Mapping[str, str]
Setting = tuple[str, ...]
Found = TypeVar("Found")


class Score(NamedTuple):
    """Test perplexities at the best learning rate, one per seed.

    `at_edge`: that learning rate is the lowest or highest of several, so a better one may lie
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
        # statistics.stdev does not accept the infinite score of a diverged run.
        return statistics.stdev(self.values) if math.isfinite(self.ppl) else math.inf


def best_rows(
    rows: Iterable[Row], column: str = "ppl"
) -> dict[Setting, dict[tuple[str, int], Score]]:
    """Scores by (model, length), for every setting in the rows.

    Args:
        rows: of results.csv.
        column: "ppl" of all targets, as in HyenaDNA, or "base_ppl" of A, C, G and T alone.
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
    # A learning rate with fewer seeds than another is unfinished, and not comparable.
    most = max(map(len, by_lr.values()))
    whole = {lr: rows for lr, rows in by_lr.items() if len(rows) == most}

    def on_validation(lr: float) -> float:
        return statistics.fmean(float(row[f"valid_{column}"]) for row in whole[lr])

    lr = min(whole, key=on_validation)
    values = tuple(float(row[f"test_{column}"]) for row in whole[lr])
    return Score(values, lr, len(whole) > 1 and lr in (min(whole), max(whole)))


def most_steps(found: Mapping[Setting, Found]) -> dict[Setting, Found]:
    """The settings with the most steps."""
    steps = {setting: int(setting[SETTING.index("steps")]) for setting in found}
    return {setting: found[setting] for setting in found if steps[setting] == max(steps.values())}


def table(rows: Iterable[Row], setting: Setting) -> list[str]:
    """Rows of a Markdown table of one setting: models down, lengths across, both perplexities."""
    rows = list(rows)
    found = {words: best_rows(rows, column)[setting] for column, words in TEXTS.items()}
    lengths = sorted({length for scores in found.values() for _, length in scores})
    core = setting[SETTING.index("core")]
    lines = [
        f"| `--core {core}` | {' | '.join(map(short, lengths))} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for words, scores in found.items():
        for model in NAMES:
            cells = [
                cell(scores[model, n].values, 3) if (model, n) in scores else "" for n in lengths
            ]
            if any(cells):
                lines.append(f"| {NAMES[model]}, {words} | {' | '.join(cells)} |")
    return lines


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
