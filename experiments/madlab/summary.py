"""From the rows of all runs to one number for each task and model.

The pair of learning rate and weight decay with the best mean score over seeds counts, as in the
paper; the spread is the standard deviation over the seeds of that pair. If runs of a task differ in
length, the longest count.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from experiments.madlab.settings import Protocol
from experiments.style import NAMES

TASK_NAMES = {
    "compression": "compression",
    "fuzzy-in-context-recall": "fuzzy recall",
    "memorization": "memorization",
    "selective-copying": "selective copying",
    "in-context-recall": "recall",
    "noisy-in-context-recall": "noisy recall",
}
_PAPER_TASKS = ("compression", "fuzzy-in-context-recall", "memorization", "selective-copying")
_PAPER_SCORES = {
    "mamba2": ((88.3, 0.2), (7.2, 0.3), (99.9, 0.1), (99.9, 0.1)),
    "gated_deltanet": ((88.9, 0.1), (9.7, 0.2), (98.8, 0.1), (99.9, 0.1)),
    "mamba3": ((89.1, 0.2), (10.1, 0.4), (100.0, 0.0), (100.0, 0.0)),
    "frac": ((90.4, 0.2), (11.5, 0.2), (99.9, 0.1), (99.9, 0.1)),
}
PAPER = {
    model: dict(zip(_PAPER_TASKS, scores, strict=True)) for model, scores in _PAPER_SCORES.items()
}
"""Accuracy in percent and its spread, by model and task, in the paper's table."""


class Score(NamedTuple):
    """Mean and spread over the seeds of the best pair, in percent, and the pair itself."""

    mean: float
    spread: float
    num_seeds: int
    epochs: int
    lr: float
    weight_decay: float


def score_column(protocol: Protocol) -> str:
    """The column of results.csv with a protocol's score."""
    return f"{'last' if protocol.select == 'last' else 'best'}_{protocol.average}"


def best_scores(
    rows: Iterable[Mapping[str, str]], protocol: Protocol, *, epochs: int | None = None
) -> dict[tuple[str, str], Score]:
    """Scores by (task, model), of the rows with the protocol's schedule.

    Args:
        epochs: of the rows that count; by default the most that any row of the task has.
    """
    rows = [row for row in rows if row["lr_schedule"] == protocol.lr_schedule]
    longest: dict[str, int] = {}
    for row in rows:
        longest[row["task"]] = max(longest.get(row["task"], 0), int(row["epochs"]))
    runs: dict[tuple[str, str], dict[tuple[float, float], list[float]]] = {}
    for row in rows:
        if int(row["epochs"]) != (epochs or longest[row["task"]]):
            continue
        pair = float(row["lr"]), float(row["weight_decay"])
        pairs = runs.setdefault((row["task"], row["model"]), {})
        pairs.setdefault(pair, []).append(100 * float(row[score_column(protocol)]))
    return {
        (task, model): max(_scores(pairs, epochs or longest[task]), key=lambda score: score.mean)
        for (task, model), pairs in runs.items()
    }


def _scores(pairs: Mapping[tuple[float, float], list[float]], epochs: int) -> Iterator[Score]:
    # A pair with fewer seeds than another is unfinished, and its mean is not comparable.
    most = max(map(len, pairs.values()))
    for pair, values in pairs.items():
        if len(values) == most:
            spread = statistics.stdev(values) if most > 1 else 0.0
            yield Score(statistics.mean(values), spread, most, epochs, *pair)


def table(scores: Mapping[tuple[str, str], Score]) -> list[str]:
    """Rows of a Markdown table; the paper's row follows that of the same model."""
    tasks = [task for task in TASK_NAMES if any(task == found for found, _ in scores)]
    heads = [
        f"{TASK_NAMES[task]}, {next(score.epochs for (t, _), score in scores.items() if t == task)}"
        for task in tasks
    ]
    rows = [f"| task, epochs | {' | '.join(heads)} |", "|---" * (len(tasks) + 1) + "|"]
    for model in [model for model in NAMES if any(model == found for _, found in scores)]:
        found = [scores.get((task, model)) for task in tasks]
        cells = [
            "" if s is None else f"{s.mean:.1f} ± {s.spread:.1f} ({s.num_seeds})" for s in found
        ]
        rows.append(f"| {NAMES[model]} | {' | '.join(cells)} |")
        if model in PAPER:
            known = [PAPER[model].get(task) for task in tasks]
            cells = ["" if pair is None else f"*{pair[0]} ± {pair[1]} (5)*" for pair in known]
            rows.append(f"| *{NAMES[model]}, paper, 200* | {' | '.join(cells)} |")
    return rows


def lines(scores: Mapping[tuple[str, str], Score]) -> Iterator[str]:
    """The scores as text, the paper's beside them."""
    for (task, model), score in scores.items():
        paper = PAPER.get(model, {}).get(task)
        beside = "" if paper is None else f"  paper {paper[0]:5.1f} ± {paper[1]}"
        yield (
            f"{task:24} {model:15} {score.mean:5.1f} ± {score.spread:.1f} over {score.num_seeds} "
            f"seeds, {score.epochs} epochs, lr {score.lr:g}, "
            f"weight decay {score.weight_decay:g}{beside}"
        )
