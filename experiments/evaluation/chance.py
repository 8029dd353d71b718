"""Scores by chance: uniform guesses over the choices, or over the vocabulary."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from flash_frac.evals import harness
from flash_frac.evals.suites import Metric, Request, Suite, Unit

# Exact matches of generated or most likely text, which guessing almost never achieves.
_NEVER = {
    ("lm", "lambada_openai", "acc,none"),
    *(("niah", f"niah_single_{n}", "accuracy") for n in (1, 2, 3)),
}


def chance_of(
    suite: Suite,
    unit: Unit,
    metric: Metric,
    *,
    data_dir: Path,
    limit: int | None,
    vocab_size: int,
) -> float | None:
    """The value of a metric by chance on the measured examples; None if it is undefined.

    Args:
        limit: number of measured examples; all if None.
        vocab_size: V, the perplexity of uniform guesses.
    """
    if (suite.name, unit.task.name, metric.key) in _NEVER:
        return 0.0
    if suite.name == "longppl":
        return float(vocab_size)
    if suite.name == "lm" and metric.key in ("acc,none", "acc_norm,none"):
        request = Request(lm=None, suite=suite, unit=unit, data_dir=data_dir, limit=limit)
        task = harness.build(request)
        counts = [len(task.doc_to_choice(doc)) for doc in islice(task.eval_docs, limit)]
        return sum(1 / count for count in counts) / len(counts)
    return None
