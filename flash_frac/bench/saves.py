"""Overhead of saving checkpoints in a training run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import TrainerCallback

from flash_frac.bench.rows import MADE_WITH
from flash_frac.files import folder_size
from flash_frac.train import load_recipe, train
from flash_frac.train.checkpoint import checkpoints

SAVE_COLUMNS = (
    *("recipe", "parameters", "tokens_per_step", "saving", "checkpoint_gib", "steps", "saves"),
    *("step_ms", "first_save_ms", "save_ms", "writing_step_ms", "writing_steps", "lost_s_per_save"),
    *MADE_WITH,
)
# Ways to save checkpoints, and their arguments.
MODES = {
    "none": ("--save_strategy", "no"),
    "async": ("--save_strategy", "steps", "--async_save", "true"),
    "sync": ("--save_strategy", "steps", "--async_save", "false"),
}
# Earlier steps warm up the GPU and the compilers.
_FIRST = 5


class StepTimes(TrainerCallback):
    """Records when each step ended, before it was saved, and whether files were written."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}
        self.saved: list[int] = []
        self.writing: set[int] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends[state.global_step] = time.perf_counter()
        # A checkpoint gets its name when it is complete.
        if self.saved and not (Path(args.output_dir) / f"checkpoint-{self.saved[-1]}").exists():
            self.writing.add(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)

    def milliseconds(self, steps: Sequence[int]) -> list[float]:
        """Time since the end of the previous step, which includes a save after that step."""
        return [1e3 * (self.ends[n] - self.ends[n - 1]) for n in steps if n - 1 in self.ends]

    def columns(self) -> dict[str, Any]:
        """The columns with the times of steps.

        save_ms is the extra time of a step after a save; lost_s_per_save is the total extra time of
        a run with saves.
        """
        late = [n for n in self.ends if n > _FIRST]
        after = [n + 1 for n in self.saved if n + 1 in self.ends]
        writing = [n for n in late if n in self.writing and n not in after]
        plain = [n for n in late if n not in after and n not in self.writing]
        step = statistics.median(self.milliseconds(plain))
        saves = [x - step for x in self.milliseconds(after)]
        slower = [x - step for x in self.milliseconds(writing)]
        return {
            "steps": len(self.ends),
            "saves": len(after),
            "step_ms": round(step, 2),
            "first_save_ms": round(saves[0], 1) if saves else None,
            "save_ms": round(statistics.median(saves[1:]), 1) if saves[1:] else None,
            "writing_step_ms": round(statistics.median(slower) + step, 2) if slower else None,
            "writing_steps": len(writing),
            "lost_s_per_save": round(sum(saves + slower) / 1e3 / len(after), 3) if saves else None,
        }


def saves_rows(recipe_path: str, overrides: Sequence[str]) -> list[dict]:
    """Train without checkpoints, with asynchronous ones, and with synchronous ones.

    The first save also allocates the memory for the copy. save_steps must leave a few steps without
    a save. The last save of a run, for which the run waits, is not measured.

    Example: `saves_rows("small", ["--max_steps", "50", "--save_steps", "10"])[1]["save_ms"]`
    """
    rows = []
    for mode, arguments in MODES.items():
        with TemporaryDirectory(dir=".", prefix=".saves-") as folder:
            recipe = load_recipe(recipe_path, [*overrides, *arguments, "--output_dir", folder])
            times, args = StepTimes(), recipe.training
            result = train(recipe, callbacks=[times])
            last = next(reversed(checkpoints(folder)), None)
            sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps
            rows.append(
                {
                    "recipe": Path(recipe_path).name,
                    "parameters": result.model.num_parameters(),
                    "tokens_per_step": sequences * args.world_size * recipe.data.sequence_length,
                    "saving": mode,
                    "checkpoint_gib": last and round(folder_size(last) / 2**30, 2),
                    **times.columns(),
                }
            )
            del result
            # The next run needs the memory of this one.
            gc.collect()
            torch.cuda.empty_cache()
    return rows
