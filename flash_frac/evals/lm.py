"""The suite "lm": the short-text tasks of the paper's language modelling table.

Tasks and metrics are lm-eval's. The paper's table says acc for OpenBookQA, but its numbers are in
the range of acc_norm at this size, which earlier work reports; results.json has both.
"""

from __future__ import annotations

from pathlib import Path

from flash_frac.evals import harness
from flash_frac.evals.suites import Metric, Suite, Task


def _perplexity(key: str, column: str) -> Metric:
    return Metric(
        key=f"{key},none",
        column=column,
        unit="ppl",
        scale=1.0,
        higher_is_better=False,
        averaged=False,
    )


def _choice(name: str, column: str, folder: str, *, split: str, normed: bool = False) -> Task:
    key, unit = ("acc_norm", "acc_n") if normed else ("acc", "acc")
    metric = Metric(key=f"{key},none", column=column, unit=unit)
    return Task(name=name, metrics=(metric,), splits=(split,), folder=folder)


def prepare(data_dir: Path) -> list[Path]:
    """Download missing files `data_dir/lm/<task>.jsonl` from the hub; return the new files."""
    return harness.fetch(data_dir, SUITE)


SUITE = Suite(
    name="lm",
    title="LM Harness",
    tasks=(
        Task(
            name="wikitext",
            metrics=(_perplexity("word_perplexity", "Wiki."),),
            folder="wikitext",
        ),
        Task(
            name="lambada_openai",
            folder="lambada",
            metrics=(
                _perplexity("perplexity", "LMB."),
                Metric(key="acc,none", column="LMB.", unit="acc"),
            ),
        ),
        _choice("piqa", "PIQA", "piqa", split="validation"),
        _choice("hellaswag", "Hella.", "hellaswag", split="validation", normed=True),
        _choice("winogrande", "Wino.", "winogrande", split="validation"),
        _choice("arc_easy", "ARC-e", "arc", split="test"),
        _choice("arc_challenge", "ARC-c", "arc", split="test", normed=True),
        _choice("openbookqa", "OBQA", "openbookqa", split="test", normed=True),
        _choice("boolq", "BoolQ", "super_glue/boolq", split="validation"),
    ),
    # lm-eval's default for a model without a maximum length, used for Mamba's numbers.
    max_length=2048,
    prepare=prepare,
    paper={
        "Transformer": (15.3, 13.6, 45.6, 72.1, 57.6, 59.5, 70.7, 35.8, 39.4, 61.9, 55.3),
        "Mamba-2": (16.7, 13.5, 40.9, 72.1, 57.1, 54.0, 71.2, 38.3, 40.3, 56.2, 53.8),
        "GDN": (16.4, 13.6, 42.8, 71.8, 54.7, 57.3, 70.5, 37.5, 39.3, 59.9, 54.2),
        "Mamba-3-SISO": (16.1, 13.7, 45.2, 72.8, 57.2, 55.6, 72.3, 36.3, 40.6, 57.0, 54.6),
        "Mamba-3-MIMO": (15.9, 12.3, 47.3, 72.8, 57.9, 55.9, 73.2, 39.2, 38.6, 57.5, 55.3),
        "FRAC": (16.5, 13.5, 44.9, 72.4, 56.4, 55.6, 71.6, 38.0, 41.8, 60.0, 55.1),
    },
)
