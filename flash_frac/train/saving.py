"""Save checkpoints in the background while training continues, and resume from them.

The state at a checkpoint's step is copied to host memory. A thread writes the copy, syncs it to
disk and renames it while the next steps run. There is one such thread at a time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from transformers import Trainer

from flash_frac.files import process_name
from flash_frac.train import checkpoint as checkpoints
from flash_frac.train import resuming, shards
from flash_frac.train.arguments import FracTrainingArguments
from flash_frac.train.monitor import write_log_sum
from flash_frac.train.parallel import gather_numbers, on_main
from flash_frac.train.reading import Reading
from flash_frac.train.stateful import CarriedStates

_SCHEDULER, _WHOLE_WEIGHTS = "scheduler.pt", "model.safetensors"


class Saver:
    """Runs one task at a time: in a thread or, with `background` false, synchronously.

    The interpreter waits for the thread, however the run ends.
    """

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Start a task; the one before must have ended."""
        assert not self.busy
        if not self.background:
            work()
            return
        self._thread = threading.Thread(target=self._run, args=(work,), name="saving")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error

    def join(self) -> None:
        """Wait until the task ends, in success or failure."""
        if self._thread is not None:
            self._thread.join()

    def check(self, failed_ranks: list[int] | None = None) -> None:
        """Raise the error of a failed task, on this rank or on others."""
        if failed_ranks:
            # The task is about to end here too, perhaps for the same reason.
            self.join()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if failed_ranks:
            names = ", ".join(f"rank {rank}" for rank in failed_ranks)
            raise checkpoints.CheckpointError(
                f"{names} could not write a checkpoint; see the error there"
            )


@contextmanager
def finishing(saver: Saver) -> Iterator[None]:
    """Wait for a checkpoint still being written when the block ends, however it ends."""
    try:
        yield
    finally:
        saver.join()


class SavingTrainer(Trainer):
    """A Trainer with atomic, verified checkpoints that are written in the background."""

    args: FracTrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    carried: CarriedStates | None
    reading: Reading

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.saver = Saver(background=self.args.async_save)
        self.resumed_from: Path | None = None
        # Seconds spent on saving and evaluating since the last log.
        self._paused = 0.0
        # The folder where Trainer drafts a checkpoint, and the parts still to be written.
        self._draft_dir: str | None = None
        self._parts: dict[str, Any] = {}
        self._gathered: dict[str, Any] | None = None
        self._stager: BlockingAsyncStager | None = None
        self._writer = on_main(self.args, process_name)
        self._group = None
        if self.is_fsdp_enabled:
            # A group of its own: the thread communicates while the steps do, and on CPUs.
            self._group = dist.new_group(backend="gloo", timeout=self.args.ddp_timeout_delta)

    def frac_model(self) -> Any:
        """The model without wrappers for compilation, data parallelism or sharding."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _tied_names(self) -> dict[str, str]:
        """Names of tied weights, each with the name that the tensor is saved under."""
        model = self.frac_model()
        return model._tied_weights_keys if model.config.tie_word_embeddings else {}

    @property
    def _output_dir(self) -> str:
        assert self.args.output_dir is not None
        return self.args.output_dir

    @property
    def _sharded(self) -> bool:
        """Whether every rank writes its shard of the weights."""
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        return plugin is not None and "SHARDED_STATE_DICT" in str(plugin.state_dict_type)

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        started = time.perf_counter()
        self.await_save()
        name, main = f"checkpoint-{self.state.global_step}", self.args.should_save
        draft = checkpoints.clear_draft(self._output_dir, name, writer=self._writer, main=main)
        self.accelerator.wait_for_everyone()
        with checkpoints.naming_the_last_good_one(draft):
            draft.mkdir(parents=True, exist_ok=True)
            self._draft_dir = str(draft.parent)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._draft_dir = None
            self._save_position(draft)
        # The main process's thread relies on these files.
        self.accelerator.wait_for_everyone()
        self.saver.start(self._work(draft))
        if self.args.push_to_hub:
            self.await_save()
            self._push_from_checkpoint(os.path.join(self._output_dir, name))
        self._paused += time.perf_counter() - started

    def _save_position(self, draft: Path) -> None:
        """Write, synchronously, the few bytes of state that Trainer does not know of."""
        if self.carried is not None:
            self.carried.save(draft / self._carried_name())
        self.reading.save(draft)
        if self.state.best_model_checkpoint:
            # The draft's path would be gone when all processes load it at the end.
            best = Path(self.state.best_model_checkpoint).name
            self.state.best_model_checkpoint = os.path.join(self._output_dir, best)
        if self.args.should_save:
            write_log_sum(self._output_dir, draft)
            self.state.save_to_json(str(draft / "trainer_state.json"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._draft_dir is None or not self._sharded:
            super().save_model(output_dir, _internal_call)
            return
        self._parts[checkpoints.SHARDS] = shards.model_state(self.model)
        if self.args.should_save:
            self.frac_model().config.save_pretrained(output_dir)
            self.processing_class.save_pretrained(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._draft_dir is None:
            super()._save(output_dir, state_dict)
            # Nothing reads this pickle; run.json has the settings.
            (Path(output_dir or self._output_dir) / "training_args.bin").unlink(missing_ok=True)
            return
        self.processing_class.save_pretrained(output_dir)
        if state_dict is None:
            weights = self.frac_model().state_dict()
            # In a copy, tied weights would no longer be the same tensor.
            tied = self._tied_names()
            self._parts[_WHOLE_WEIGHTS] = {n: x for n, x in weights.items() if n not in tied}
        else:
            # Gathered from all ranks, so it is already a copy.
            self._gathered = state_dict

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled or self.args.should_save:
            self._parts[shards.OPTIMIZER] = shards.optimizer_state(self.model, self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Trainer calls this before the checkpoint is complete, `_save_checkpoint` afterwards.
        if self._draft_dir is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _work(self, draft: Path) -> Callable[[], None]:
        """The remaining work for a checkpoint, on a copy of everything that training changes."""
        parts, self._parts = self._parts, {}
        if self.saver.background:
            parts = self._copy(parts)
        weights, self._gathered = parts.pop(_WHOLE_WEIGHTS, self._gathered), None
        best = self.state.best_model_checkpoint
        return partial(self._write, draft, parts, weights, self.frac_model(), best)

    def _copy(self, parts: dict[str, Any]) -> Any:
        if self._stager is None:
            # With a GPU, pinned memory is kept for the next checkpoint: pinning takes longer than
            # copying.
            cuda = self.args.device.type == "cuda"
            self._stager = BlockingAsyncStager(cache_staged_state_dict=cuda)
        return self._stager.stage(parts)

    def _write(
        self, draft: Path, parts: dict[str, Any], weights: Any, model: Any, best: str | None
    ) -> None:
        with checkpoints.naming_the_last_good_one(draft):
            for name, state in parts.items():
                shards.write(draft / name, state, group=self._group)
            if not self.args.should_save:
                return
            if weights is not None:
                model.save_pretrained(draft, state_dict=weights)
            checkpoints.complete(draft)
        checkpoints.rotate(self._output_dir, self.args.save_total_limit, best)

    def await_save(self) -> None:
        """Wait until all ranks have written the last checkpoint; raise the error if one failed.

        All ranks learn of a failure at the same step, so none waits for a rank that has exited.
        """
        self.saver.join()
        failed = gather_numbers([self.saver.failure is not None], self.args)
        self.saver.check([rank for rank, (number,) in enumerate(failed) if number])

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        self.await_save()
        self._stager = None
        # Trainer would delete the last checkpoint, which marks the run as complete.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit

    def save_final(self) -> Path:
        """Write the unsharded model and its tokenizer to output_dir/final for `from_pretrained`."""
        with self._whole("final") as draft:
            state = None
            if self.is_fsdp_enabled:
                whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
                state = states.get_model_state_dict(self.frac_model(), options=whole)
            if self.args.should_save:
                self._save(str(draft), state_dict=state)
        return Path(self._output_dir) / "final"

    def _whole(self, name: str) -> AbstractContextManager[Path]:
        """A folder to write to; it becomes `name` in output_dir when all ranks are done."""
        wait = self.accelerator.wait_for_everyone
        main, writer = self.args.should_save, self._writer
        return checkpoints.whole(self._output_dir, name, writer=writer, main=main, wait=wait)

    def _get_output_dir(self, trial: Any) -> str:
        return self._draft_dir or super()._get_output_dir(trial)

    # Resuming

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Like `Trainer.train`, but verifies the checkpoint first."""
        asked, folder = resume_from_checkpoint, None
        if asked is True:
            folder = on_main(self.args, lambda: resuming.newest_whole(self._output_dir))
        elif asked:
            folder = on_main(self.args, lambda: resuming.check_asked(Path(asked)))
        return self.train_from(folder, trial, ignore_keys_for_eval)

    def train_from(self, folder: Path | None, trial: Any = None, ignore_keys: Any = None) -> Any:
        """Train from a verified checkpoint, or from the beginning."""
        if folder is not None:
            self._load_position(folder)
        self.resumed_from = folder
        return super().train(None if folder is None else str(folder), trial, ignore_keys)

    def load_best(self) -> None:
        """Load the weights of the best checkpoint if load_best_model_at_end is set."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        on_main(self.args, lambda: resuming.check_best(best))
        if not self._load_shared(best):
            super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_shared(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_shared(self, folder: Path) -> bool:
        """Load the weights of an FSDP model; return False if Trainer has to do it.

        Checkpoints of earlier versions have a file of accelerate's beside model.safetensors.
        """
        if not self.is_fsdp_enabled or (folder / f"{checkpoints.SHARDS[:-2]}.bin").exists():
            return False
        if (folder / checkpoints.SHARDS).is_dir():
            shards.load_model(folder / checkpoints.SHARDS, self.model)
            return True
        path, main = folder / _WHOLE_WEIGHTS, self.args.should_save
        shards.load_whole_model(path, self.model, main=main, tied=self._tied_names())
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = checkpoint and Path(checkpoint) / shards.OPTIMIZER
        if not folder or not folder.is_dir():
            # Written by an earlier version, or left out by save_only_model.
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        alone = not self.is_fsdp_enabled
        shards.load_optimizer(folder, self.model, self.optimizer, alone=alone)
        saved = torch.load(folder.parent / _SCHEDULER, weights_only=True)
        self.lr_scheduler.load_state_dict(saved)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise where Trainer would warn, except for tied weights, which are saved once."""
        tied = self._tied_names()
        missing = [name for name in load_result.missing_keys if name not in tied]
        if missing or load_result.unexpected_keys:
            raise ValueError(
                f"the checkpoint {self.resumed_from or self.state.best_model_checkpoint} does not "
                f"fit this model: missing {missing}, unexpected {load_result.unexpected_keys}"
            )

    def _load_position(self, folder: Path) -> None:
        """Restore carried states and the position in the stream from a checkpoint."""
        if self.carried is not None:
            self.carried.load(folder / self._carried_name(), self.args.device)
        self.reading.load(folder)

    def _carried_name(self) -> str:
        return f"carried_{self.args.process_index}.safetensors"
