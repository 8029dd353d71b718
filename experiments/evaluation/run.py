"""Evaluate a checkpoint on the suites of `frac eval`, beside scores by chance.

    python -m experiments.evaluation.run CHECKPOINT --data-dir DIR [--suites niah longppl lm]
    python -m experiments.evaluation.run --shape frac-1.3b --one-sample 65536

Rows go to results.csv. Measurements are saved in --work as they come, and not repeated.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.evaluation.chance import chance_of
from experiments.evaluation.one_sample import time_one_sample
from experiments.evaluation.toy import toy_checkpoint, toy_data
from experiments.table import Table, add_run_options, made_with, parse_options
from flash_frac.evals.language_model import FracLM
from flash_frac.evals.runner import Settings, evaluate, model_name
from flash_frac.evals.suites import SUITES, Suite, Unit
from flash_frac.recipes import find_config

HERE = Path(__file__).parent
LENGTHS = [2**n for n in range(10, 17)]
KEY = ("name", "suite", "task", "length", "metric")
COLUMNS = (
    *KEY,
    *("value", "chance", "samples", "tokens_read", "seconds", "tokens_per_s", "peak_mib"),
    *("parameters", "commit", "machine", "torch", "lm_eval"),
)


def results(folder: Path) -> Table:
    """The table of a folder; KEY identifies a row."""
    return Table(folder / "results.csv", COLUMNS, num_key=len(KEY))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("checkpoint", nargs="?", help="folder of a model and its tokenizer")
    parser.add_argument("--data-dir", type=Path, help="local files, see docs/evaluation.md")
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=["niah", "longppl", "lm"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--limit", type=int, help="most examples per task; default all")
    parser.add_argument("--name", help="model name in the table; default its folder's")
    parser.add_argument("--shape", help="model size, or folder of a config.json, for --one-sample")
    parser.add_argument("--one-sample", type=int, help="time one needle at this length")
    parser.add_argument("--tokenizer", default="bytes", help="folder, for --one-sample")
    parser.add_argument("--work", type=Path, help="folder for results; runs/evaluation/NAME")
    add_run_options(parser, smoke="a tiny model, seconds on a CPU")
    options = parse_options(parser, arguments, {"lengths": [512], "limit": 2})
    if (options.shape is None) != (options.one_sample is None):
        parser.error("--shape and --one-sample must be given together")
    given = options.checkpoint is not None and options.data_dir is not None
    if not (options.smoke or options.shape or given):
        parser.error("CHECKPOINT and --data-dir must be given, or --shape, or --smoke")
    return options


def shrink(options: argparse.Namespace, folder: Path) -> None:
    """Fill in a tiny model and a little data if none are given, in place."""
    options.out = options.out or folder / "out"
    options.work = options.work or folder / "work"
    if options.shape is None:
        options.checkpoint = options.checkpoint or str(toy_checkpoint(folder / "tiny"))
        options.data_dir = options.data_dir or toy_data(folder / "data")


def settings_of(name: str, options: argparse.Namespace) -> Settings:
    """Settings of a suite: the user's files as tasks, and the lengths, if it takes any."""
    suite = SUITES[name]
    # The user's own documents must be named.
    files = (options.data_dir / name).glob("*.jsonl") if suite.own else ()
    return Settings(
        suites=(name,),
        tasks=tuple(sorted(path.stem for path in files)),
        lengths=tuple(options.lengths) if suite.lengths else (),
        data_dir=options.data_dir,
        skip_missing=True,
        limit=options.limit,
    )


def rows_of(unit: dict[str, Any], suite: Suite, vocab_size: int, data_dir: Path) -> Iterator[dict]:
    """One row per number in a result of `evaluate`, in the units of its tables."""
    results, seconds = unit["results"], unit["seconds"]
    task = next(t for t in suite.with_tasks([unit["task"]]).tasks if t.name == unit["task"])
    for metric in task.metrics:
        value = results[metric.key]
        chance = chance_of(
            suite,
            Unit(task=task, length=unit["length"]),
            metric,
            data_dir=data_dir,
            limit=unit["conditions"]["limit"],
            vocab_size=vocab_size,
        )
        yield {
            "suite": suite.name,
            "task": task.name,
            "length": unit["length"],
            "metric": metric.key.split(",")[0],
            # A result that is not finite is null.
            "value": None if value is None else f"{value * metric.scale:.5g}",
            "chance": None if chance is None else f"{chance * metric.scale:.5g}",
            "samples": results["num_examples"],
            "tokens_read": results["tokens_read"],
            "seconds": seconds,
            "tokens_per_s": round(results["tokens_read"] / max(seconds, 0.01)),
            "peak_mib": unit["peak_memory_mib"],
            **{name: unit["made_with"][name] for name in ("commit", "machine", "torch", "lm_eval")},
        }


def measure(options: argparse.Namespace, checkpoint: str, name: str, table: Table) -> None:
    """Run the suites in turn; save the rows of each when it is done."""
    lm = FracLM(checkpoint, batch_size="auto")
    facts = {"name": name, "parameters": lm.model.num_parameters()}
    if options.commit:
        facts["commit"] = options.commit
    work = options.work or Path("runs") / "evaluation" / name
    for suite in options.suites:
        settings = settings_of(suite, options)
        asked = {(unit.task.name, unit.length) for unit in settings.units(SUITES[suite])}
        report = evaluate(checkpoint, work, settings, lm=lm)
        vocab_size = lm.model.config.vocab_size
        # The folder may hold results of earlier runs, for other tasks and lengths.
        for unit in report["units"]:
            if unit["suite"] == suite and (unit["task"], unit["length"]) in asked:
                rows = rows_of(unit, SUITES[suite], vocab_size, options.data_dir)
                table.append([{**row, **facts} for row in rows])


def one_sample(options: argparse.Namespace, table: Table) -> None:
    """Time one needle on a model shape, and save it as a row."""
    shape = find_config(options.shape)
    taken = time_one_sample(shape, options.one_sample, options.tokenizer)
    row = {
        "name": options.name or f"{shape.name}-shape",
        "suite": "niah",
        "task": "niah_single_1",
        "length": options.one_sample,
        "metric": "seconds",
        "value": f"{taken.seconds:.4g}",
        "samples": 1,
        "tokens_read": taken.tokens_read,
        "seconds": round(taken.seconds, 3),
        "tokens_per_s": round(taken.tokens_read / taken.seconds),
        "peak_mib": taken.peak_mib,
        "parameters": taken.parameters,
        **made_with(options.commit, ("commit", "machine", "torch", "lm_eval")),
    }
    table.append([dict.fromkeys(COLUMNS) | row])
    print(
        f"{row['name']}: {taken.tokens_read:,} tokens read and {taken.tokens_written} written in "
        f"{taken.seconds:.2f} s, of which the prompt {taken.prompt_seconds:.2f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            shrink(options, Path(folder))
        table = results(options.out or HERE)
        if options.shape is not None:
            one_sample(options, table)
        else:
            name = options.name or model_name(options.checkpoint)
            measure(options, options.checkpoint, name, table)
        print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
