"""Train by a recipe with `frac train` itself, and append its speed as a row.

    python benchmarks/train.py RECIPE [--any_training_argument VALUE] [--commit C] [--out CSV]

Tokens/s and MFU are medians of the logs of the second half of the run, optimizer, loss, clipping
and data included. Rows go to benchmarks/results/train/<gpu>.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import RESULTS, default_path, describe_machine

from flash_frac.train import load_recipe, train
from flash_frac.train.monitor import LOG_NAME, read_lines

COLUMNS = (
    *("recipe", "parameters", "steps", "tokens_per_step", "sequence_length", "dtype"),
    *("tokens_per_s", "mfu", "peak_gib", "first_loss", "last_loss"),
    *("command", "commit", "machine", "threads", "python", "torch", "triton", "transformers"),
)


def row_of(recipe_path: str, overrides: Sequence[str]) -> dict:
    """Train, and say what the logs say."""
    recipe = load_recipe(recipe_path, overrides)
    result = train(recipe)
    logs = [line for line in read_lines(result.output_dir / LOG_NAME) if "loss" in line]
    half = logs[len(logs) // 2 :]
    args = recipe.training
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "recipe": Path(recipe_path).name,
        "parameters": result.model.num_parameters(),
        "steps": logs[-1]["step"],
        "tokens_per_step": sequences * args.world_size * recipe.data.sequence_length,
        "sequence_length": recipe.data.sequence_length,
        "dtype": "bfloat16 autocast" if args.bf16 else "float32",
        "tokens_per_s": round(statistics.median(line["tokens_per_second"] for line in half)),
        "mfu": _median(half, "mfu", 4),
        "peak_gib": _median(half, "peak_memory_gib", 1),
        "first_loss": round(logs[0]["loss"], 4),
        "last_loss": round(logs[-1]["loss"], 4),
    }


def _median(logs: list[dict], name: str, digits: int) -> float | None:
    values = [line[name] for line in logs if name in line]
    return round(statistics.median(values), digits) if values else None


def append(row: dict, path: Path) -> None:
    """Add a row; the header too, if the file is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--commit", help="what to record where there is no git")
    parser.add_argument("--out", type=Path, help="CSV to append to")
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options, overrides = parser.parse_known_args(typed)
    path = options.out or RESULTS / "train" / default_path().name
    machine = describe_machine(__file__, typed, options.commit)
    row = row_of(options.recipe, overrides)
    append(row | machine, path)
    print({key: row[key] for key in COLUMNS[:11]})


if __name__ == "__main__":
    main()
