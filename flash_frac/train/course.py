"""Start, resume and stop a run, and report it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from flash_frac.train.checkpoint import last_checkpoint
from flash_frac.train.parallel import on_main
from flash_frac.train.resuming import best_of, check_best, describe_fresh_parts

if TYPE_CHECKING:
    from flash_frac.train.trainer import FracTrainer


class AlreadyTrained(Exception):
    """The run to resume is already complete."""


class Course(TrainerCallback):
    """Sets the sampler's epoch, which accelerate does not do when a run resumes.

    It also ends a run that is already complete: Trainer would do one more step.
    """

    def __init__(self, trainer: FracTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._find_best(args, state)
        if state.global_step >= state.max_steps:
            raise AlreadyTrained
        if self.trainer.resumed_from is not None and args.should_save:
            print(describe_resuming(self.trainer), flush=True)

    def _find_best(self, args: Any, state: Any) -> None:
        """Look for the best checkpoint next to the others: Trainer loses it if they have moved."""
        best = self.trainer.resumed_from and best_of(self.trainer.resumed_from)
        if best is None:
            return
        if args.load_best_model_at_end:
            on_main(args, lambda: check_best(best))
        state.best_model_checkpoint = str(best) if best.is_dir() else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.order is not None:
            self.trainer.order.set_epoch(math.floor((state.epoch or 0) + 1e-6))


def describe_resuming(trainer: FracTrainer) -> str:
    """A message that says where the run resumes and which tokens it skips."""
    args, recipe, step = trainer.args, trainer.recipe, trainer.state.global_step
    replicas = args.world_size // recipe.training.context_parallel_size
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * replicas
    skipped = f"skipping the {step * rows * recipe.data.sequence_length:,} tokens before it"
    if args.ignore_data_skip:
        skipped = "reading the text from its beginning (ignore_data_skip)"
    fresh = trainer.resumed_from and describe_fresh_parts(trainer.resumed_from)
    begun = f"Resuming from {trainer.resumed_from} at step {step + 1}, {skipped}"
    return f"{begun}; {fresh}" if fresh else begun


@contextmanager
def saying_what_is_kept(args: Any, trainer: FracTrainer | None = None) -> Iterator[None]:
    """On Ctrl-C, print which checkpoint is kept; `trainer` is None before it is built."""
    try:
        with ExitStack() as stack:
            if trainer is not None:
                stack.callback(trainer.console.close)
            yield
    except KeyboardInterrupt:
        last = last_checkpoint(args.output_dir)
        kept = "there is no checkpoint yet, so the same command starts over"
        if last is not None:
            kept = f"{last.name} is kept; the same command resumes from it"
        where = f"at step {trainer.state.global_step}" if trainer else "before the first step"
        if args.should_save:
            print(f"stopped {where}; {kept}", flush=True)
        raise
