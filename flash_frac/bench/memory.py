"""Memory of training runs, measured over a few steps and as predicted by `frac plan`."""

from __future__ import annotations

import gc
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_frac.bench.rows import MADE_WITH
from flash_frac.bench.training import SHORT
from flash_frac.data import load_tokenizer
from flash_frac.train import FracTrainer, Recipe, load_recipe
from flash_frac.train.memory import GIB, memory_of
from flash_frac.train.plan import setup_of
from flash_frac.train.run import build_data, build_model

MEMORY_COLUMNS = (
    *("recipe", "arguments", "parameters", "batch", "accumulation", "sequence_length"),
    *("recompute", "compile", "dtype", "cap_gib", "peak_gib", "planned_gib", "reserved_gib"),
    "tokens_per_s",
    *MADE_WITH,
)
# 46M to 1.4B parameters, pure and mixed, with and without recomputation. With two micro-batches per
# step, gradients are already allocated during the second.
_PURE = "--config_name frac-30m"
CASES = {
    "30m": f"frac-mixed-30m {_PURE}",
    "30m-recomputed": f"frac-mixed-30m {_PURE} --gradient_checkpointing true",
    "mixed-30m": "frac-mixed-30m",
    "delta-30m": "frac-delta-30m",
    "390m": "frac-390m --per_device_train_batch_size 8 --gradient_accumulation_steps 2",
    "390m-recomputed": "frac-390m --per_device_train_batch_size 8 --gradient_accumulation_steps 1 "
    "--gradient_checkpointing true",
    "1.3b": "frac-1.3b --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    "1.3b-recomputed": "frac-1.3b --per_device_train_batch_size 8 --gradient_accumulation_steps 1 "
    "--gradient_checkpointing true",
    "mixed-1.3b": "frac-mixed-1.3b --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
    "delta-1.3b": "frac-delta-1.3b --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
}
# The first step allocates the optimizer state, and the first batches compile kernels.
_SHORT = f"{SHORT} --logging_steps 1 --max_steps 6"


def load_case(words: str, folder: Path) -> Recipe:
    """Load a recipe for a few steps; words are its name and arguments, text is in folder/text."""
    name, *overrides = shlex.split(words)
    paths = ["--data_files", str(folder / "text"), "--cache_dir", str(folder / "tokens")]
    output = ["--output_dir", str(folder / "run")]
    return load_recipe(name, [*shlex.split(_SHORT), *paths, *output, *overrides])


def memory_row(words: str, folder: Path, *, cap_gib: float | None = None) -> dict:
    """Train a few steps, and return the measured columns.

    Args:
        words: a recipe and its arguments, as typed after `frac train`.
        folder: contains the folder `text`, and receives all output of the run.
        cap_gib: memory limit of the allocator.

    Example: `memory_row("frac-390m --gradient_accumulation_steps 1", folder)["peak_gib"]`
    """
    recipe = load_case(words, folder)
    args, data = recipe.training, recipe.data
    setup, _ = setup_of(recipe, 1)
    gpu = args.device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(args.device).total_memory / GIB
        share = 1.0 if cap_gib is None else min(1.0, cap_gib / total)
        torch.cuda.set_per_process_memory_fraction(share)
        torch.cuda.reset_peak_memory_stats()
    logs = _train(recipe)
    parameters = logs.pop("parameters")
    name, *overrides = shlex.split(words)
    return {
        "recipe": name,
        "arguments": shlex.join(overrides),
        "parameters": parameters,
        "batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "sequence_length": data.sequence_length,
        "recompute": setup.recomputed,
        "compile": setup.compile,
        "dtype": "bfloat16 autocast" if args.bf16 else "float32",
        "cap_gib": cap_gib,
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if gpu else None,
        "planned_gib": round(memory_of(setup).peak / GIB, 2) if setup.is_frac else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2) if gpu else None,
        **logs,
    }


def _train(recipe: Recipe) -> dict:
    """Train; return parameters and the tokens/s of the second half, and free everything else."""
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    # Initialise on the device: 1.3B parameters on a CPU would take longer than the steps.
    with torch.device(recipe.training.device):
        model = build_model(recipe.model, tokenizer)
    _, dataset, _ = build_data(recipe, tokenizer)
    trainer = FracTrainer(model, recipe, tokenizer=tokenizer, train_dataset=dataset)
    trainer.train_from(None)
    speeds = [x["tokens_per_second"] for x in trainer.state.log_history if "loss" in x]
    half: Sequence[float] = speeds[len(speeds) // 2 :]
    return {
        "parameters": model.num_parameters(),
        "tokens_per_s": round(statistics.median(half)),
    }
