"""The speed of a training run by a recipe, as its own logs say it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from flash_frac.bench.rows import MADE_WITH
from flash_frac.train import load_recipe, train
from flash_frac.train.monitor import LOG_NAME, read_lines

TRAIN_COLUMNS = (
    *("recipe", "parameters", "steps", "tokens_per_step", "sequence_length", "dtype"),
    *("tokens_per_s", "mfu", "peak_gib", "first_loss", "last_loss"),
    *MADE_WITH,
)


def training_row(recipe_path: str, overrides: Sequence[str]) -> dict:
    """Train, and return the columns that the logs fill.

    Tokens/s and MFU are medians of the logs of the second half of the run, optimizer, loss,
    clipping and data included.

    Example: `training_row("small", ["--max_steps", "100"])["tokens_per_s"]`
    """
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
