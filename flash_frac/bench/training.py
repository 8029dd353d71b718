"""Speed of a training run, from its own logs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from flash_frac.bench.rows import MADE_WITH
from flash_frac.train import load_recipe, train
from flash_frac.train.monitor import LOG_NAME, read_lines
from flash_frac.train.plan import setup_of

# Speed depends neither on the text nor on its tokens, so a short run needs no network.
SHORT = (
    "--tokenizer bytes --held_out 0 --eval_strategy no --save_strategy no --report_to none "
    "--disable_tqdm true --memory_law_steps 0 --dataloader_num_workers 0"
)
TRAIN_COLUMNS = (
    *("recipe", "parameters", "steps", "tokens_per_step", "batch", "accumulation"),
    *("sequence_length", "recompute", "compile", "dtype"),
    *("tokens_per_s", "mfu", "peak_gib", "first_loss", "last_loss"),
    *MADE_WITH,
)


def short_run(text: Path, folder: Path) -> list[str]:
    """The arguments of 60 steps on a file of text, whose output goes to a folder.

    Example: `training_row("frac-1.3b", short_run(Path("text.jsonl"), Path("run")))`
    """
    paths = ["--data_files", text, "--cache_dir", folder / "tokens", "--output_dir", folder / "run"]
    return [*SHORT.split(), *map(str, paths), "--max_steps", "60", "--logging_steps", "5"]


def training_row(recipe_path: str, overrides: Sequence[str]) -> dict:
    """Train, and return the columns computed from the logs.

    Tokens/s and MFU are medians over the second half of the run, including optimizer, loss,
    clipping and data.

    Example: `training_row("small", ["--max_steps", "100"])["tokens_per_s"]`
    """
    recipe = load_recipe(recipe_path, overrides)
    result = train(recipe)
    logs = [line for line in read_lines(result.output_dir / LOG_NAME) if "loss" in line]
    half = logs[len(logs) // 2 :]
    args = recipe.training
    setup, _ = setup_of(recipe, args.world_size)
    return {
        "recipe": Path(recipe_path).name,
        "parameters": result.model.num_parameters(),
        "steps": logs[-1]["step"],
        "tokens_per_step": setup.tokens_per_step,
        "batch": setup.batch,
        "accumulation": setup.accumulation,
        "sequence_length": setup.length,
        "recompute": setup.recomputed,
        "compile": setup.compile,
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
