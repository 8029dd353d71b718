"""FracTrainer: Hugging Face's Trainer with what a Frac model and a dependable run need.

It adds to Trainer: an order of batches that resumes exactly, checkpoints that are complete or not
there, states carried between batches, sequences shared among ranks, a loss over exactly the
held-out tokens, speed and memory law in the logs, and an error at the first number that is not
finite.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from flash_frac.data import Collator
from flash_frac.files import process_name
from flash_frac.train import checkpoint as checkpoints
from flash_frac.train import resuming
from flash_frac.train.context import CountingCollator, Seen
from flash_frac.train.course import Course
from flash_frac.train.decay import decayed_parameters
from flash_frac.train.flops import training_flops
from flash_frac.train.monitor import (
    ConsoleCallback,
    JsonLinesCallback,
    device_peak_flops,
    memory_law,
    peak_memory_gib,
    write_log_sum,
)
from flash_frac.train.nonfinite import NotFiniteError, first_not_finite
from flash_frac.train.parallel import context_group, on_main
from flash_frac.train.reading import Reading
from flash_frac.train.recipe import Recipe
from flash_frac.train.sampler import EpochOrder, EvalShard
from flash_frac.train.stateful import CarriedStates

LAW_TOKENS = 2048


class FracTrainer(Trainer):
    """Trains a Frac model by a recipe.

    Args:
        model: a FracForCausalLM.
        recipe: all settings.
        tokenizer: saved with every checkpoint.
        train_dataset: of `flash_frac.data`; eval_dataset: a `PackedDataset`, or None.
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        *,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any = None,
    ) -> None:
        args, data = recipe.training, recipe.data
        self.recipe, self.order = recipe, None
        self.context_group, shard = context_group(args.context_parallel_size, args)
        self.carried = CarriedStates(model.config) if data.stateful else None
        self.eval_collator = Collator(data.separate_documents, shard=shard)
        collator = Collator(data.separate_documents, lanes=data.stateful, shard=shard)
        super().__init__(
            model=model,
            args=args,
            data_collator=CountingCollator(collator, model.config.sliding_window),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
        )
        model.set_context_group(self.context_group)
        self.reading = Reading(train_dataset, args)
        if (smoother := self.label_smoother) is not None:
            # Trainer would have it shift labels, which `Collator` has shifted already.
            self.label_smoother = lambda *args, shift_labels=False, **kwargs: smoother(
                *args, **kwargs
            )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        # First, because a run that is complete needs no bar.
        self.add_callback(Course(self))
        self.console = ConsoleCallback()
        if not args.disable_tqdm:
            self.add_callback(self.console)
        self.add_callback(JsonLinesCallback(lambda: self.resumed_from))
        peak = args.peak_tflops and args.peak_tflops * 1e12
        self.peak_flops = peak or device_peak_flops(args.device)
        # Where Trainer writes a checkpoint while it is not complete.
        self._draft_dir: str | None = None
        self._writer = on_main(args, process_name)
        self.resumed_from: Path | None = None
        self._last_inputs: dict[str, Any] = {}
        self._tokens, self._since, self._paused = 0, time.perf_counter(), 0.0
        # Of the batches since the last log, and of the last batch.
        self._seen, self._last_seen = Seen(), Seen()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate would leave FSDP out on CPUs, in silence.
            settings: Any = self.args.fsdp_plugin_args
            plugin = FullyShardedDataParallelPlugin(**settings)
            state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
            # Each new view of the state takes this one's type.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.is_fsdp_enabled = True

    # Batches and their loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_parameters(model)

    def get_train_dataloader(self) -> DataLoader:
        return self.reading.own_batches(super().get_train_dataloader())

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochOrder | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not hasattr(dataset, "__len__"):
            return None
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.order = EpochOrder(
            len(dataset),  # pyright: ignore[reportArgumentType]
            self.args.per_device_train_batch_size,
            repeats=self.recipe.training.context_parallel_size,
            # Lanes are dealt in the order in which they must come.
            seed=None if self.carried is not None else seed,
        )
        return self.order

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.carried is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        first, count = inputs.pop("first_sequence"), inputs["cu_seqlens"].shape[0] - 1
        inputs |= {"past_key_values": self.carried.cache(first, count), "use_cache": True}
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        assert isinstance(outputs, Mapping)
        self.carried.keep(outputs["past_key_values"], count)
        return (loss, outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        self.reading.note(inputs.pop("bookmark", None))
        self._last_seen = inputs.pop("seen")
        self._seen += self._last_seen
        # A copy, because a carried state is put into the dictionary, and would live on in it.
        self._last_inputs = dict(inputs)
        self._tokens += inputs["input_ids"].numel() * self.args.world_size
        return super().training_step(model, inputs, num_items_in_batch)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        config = self.frac_model().config
        return inputs["input_ids"].numel() * training_flops(config, *self._last_seen.contexts)

    def frac_model(self) -> Any:
        """The model without what trains it: compiled, wrapped or spread over ranks."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # A scaler for float16 meets infinite gradients as a matter of course, and skips the step.
        if self.accelerator.scaler is None and not math.isfinite(float(norm)):
            inputs = {k: v for k, v in self._last_inputs.items() if k != "first_sequence"}
            name = first_not_finite(self.frac_model(), self._prepare_inputs(inputs))
            last = checkpoints.last_checkpoint(self._output_dir)
            raise NotFiniteError(
                f"step {self.state.global_step + 1}: the gradient's norm is {float(norm)}; first "
                f"not finite: {name}. The last checkpoint is {last or 'none'}. A lower "
                "learning_rate or max_grad_norm, or more warmup_steps, are the usual remedies"
            )
        return norm

    # Held-out loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss over exactly the held-out tokens, each counted once."""
        started = time.perf_counter()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("there is nothing to evaluate on: set held_out or held_out_files")
        share = self.recipe.training.context_parallel_size
        shard = EvalShard(dataset, self.args.process_index // share, self.args.world_size // share)
        batch = 1 if share > 1 else self.args.per_device_eval_batch_size
        loader = DataLoader(shard, batch_size=batch, collate_fn=self.eval_collator)
        model: Any = self.model_wrapped if self.is_in_train else self.model
        if not self.is_in_train:
            self._move_model_to_device(model, self.args.device)
        was_training = model.training
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            for inputs in loader:
                inputs = self._prepare_inputs(inputs)
                # One item, so that the loss is a sum.
                loss = model(**inputs, use_cache=False, num_items_in_batch=1).loss
                count = (inputs["shift_labels"] != -100).sum()
                # A slice that predicts nothing has no loss, and not one that is not a number.
                total += torch.stack([torch.where(count > 0, loss, 0).double(), count.double()])
        model.train(was_training)
        if self.args.world_size > 1:
            dist.all_reduce(total)
        mean = (total[0] / total[1]).item()
        metrics = {
            f"{metric_key_prefix}_loss": mean,
            f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700)),
            f"{metric_key_prefix}_tokens": total[1].item(),
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self._paused += time.perf_counter() - started
        return metrics

    # Logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self._speed()
        super().log(logs, start_time)
        every = self.recipe.training.memory_law_steps
        # Only Frac layers have one.
        every = every if "frac" in self.frac_model().config.mixer_types else 0
        if "loss" in logs and every and self.state.global_step % every == 0:
            law = self._memory_law()
            # Past Trainer, whose state would keep it: hundreds of numbers in every checkpoint.
            self.callback_handler.on_log(self.args, self.state, self.control, law)

    def _speed(self) -> dict[str, float]:
        """Tokens a second since the last log, evaluation and checkpoints apart."""
        now = time.perf_counter()
        seconds = now - self._since - self._paused
        speed = {"tokens_per_second": self._tokens / max(seconds, 1e-9)}
        self._tokens, self._since, self._paused = 0, now, 0.0
        if self.peak_flops:
            cost = training_flops(self.frac_model().config, *self._seen.contexts)
            rate = speed["tokens_per_second"] * cost
            speed["mfu"] = rate / self.peak_flops / self.args.world_size
        self._seen = Seen()
        return speed | {"peak_memory_gib": peak_memory_gib(self.args.device)}

    def _memory_law(self) -> dict[str, float]:
        """The memory of every layer on the beginning of the last batch."""
        started = time.perf_counter()
        model = self.frac_model()
        model.set_context_group(None)
        ids = self._last_inputs["input_ids"][:1, :LAW_TOKENS].to(self.args.device)
        with self.compute_loss_context_manager():
            law = memory_law(model, ids)
        model.set_context_group(self.context_group)
        self._paused += time.perf_counter() - started
        return law

    # Checkpoints

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As Trainer has it; a checkpoint is verified first."""
        asked, folder = resume_from_checkpoint, None
        if asked is True:
            folder = on_main(self.args, lambda: resuming.newest_whole(self._output_dir))
        elif asked:
            folder = on_main(self.args, lambda: resuming.check_asked(Path(asked)))
        return self.train_from(folder, trial, ignore_keys_for_eval)

    def train_from(self, folder: Path | None, trial: Any = None, ignore_keys: Any = None) -> Any:
        """Train from a checkpoint that was verified, or from the beginning."""
        if folder is not None:
            self._load_position(folder)
        self.resumed_from = folder
        return super().train(None if folder is None else str(folder), trial, ignore_keys)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: Any) -> Any:
        # Trainer would delete the last checkpoint, by which the same command knows that it is done.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)
        finally:
            self.args.save_total_limit = limit

    def load_best(self) -> None:
        """Take the weights of the best checkpoint, where load_best_model_at_end wants them."""
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        on_main(self.args, lambda: resuming.check_best(best))
        super()._load_best_model()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse what Trainer warns of, but for tied weights, which are saved under one name."""
        model = self.frac_model()
        tied = model._tied_weights_keys if model.config.tie_word_embeddings else {}
        missing = [name for name in load_result.missing_keys if name not in tied]
        if missing or load_result.unexpected_keys:
            raise ValueError(
                f"the checkpoint {self.resumed_from or self.state.best_model_checkpoint} is not of "
                f"this model: missing {missing}, unexpected {load_result.unexpected_keys}"
            )

    def _load_position(self, folder: Path) -> None:
        """Take up carried states and the position of a stream from a checkpoint."""
        if self.carried is not None:
            self.carried.load(folder / self._carried_name(), self.args.device)
        self.reading.load(folder)

    def _carried_name(self) -> str:
        return f"carried_{self.args.process_index}.safetensors"

    @property
    def _output_dir(self) -> str:
        assert self.args.output_dir is not None
        return self.args.output_dir

    def _whole(self, name: str) -> AbstractContextManager[Path]:
        """A folder to write into, which becomes `name` in output_dir when all ranks are done."""
        wait = self.accelerator.wait_for_everyone
        main, writer = self.args.should_save, self._writer
        return checkpoints.whole(self._output_dir, name, writer=writer, main=main, wait=wait)

    def _get_output_dir(self, trial: Any) -> str:
        return self._draft_dir or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        started = time.perf_counter()
        with self._whole(f"checkpoint-{self.state.global_step}") as draft:
            self._draft_dir = str(draft.parent)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._draft_dir = None
            if self.args.should_save and self.is_fsdp_enabled:
                self.frac_model().config.save_pretrained(draft)
                self.processing_class.save_pretrained(draft)  # pyright: ignore
            if self.carried is not None:
                self.carried.save(draft / self._carried_name())
            if self.args.should_save:
                write_log_sum(self._output_dir, draft)
            self.reading.save(draft)
            if self.state.best_model_checkpoint:
                # All processes load it at the end.
                best = Path(self.state.best_model_checkpoint).name
                self.state.best_model_checkpoint = os.path.join(self._output_dir, best)
                if self.args.should_save:
                    self.state.save_to_json(str(draft / "trainer_state.json"))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            checkpoints.rotate(self._output_dir, self.args.save_total_limit, best)
        self._paused += time.perf_counter() - started

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickled file, which nothing reads; run.json has the settings.
        (Path(output_dir or self._output_dir) / "training_args.bin").unlink(missing_ok=True)

    def save_final(self) -> Path:
        """Write the model and its tokenizer to output_dir/final, whole, for `from_pretrained`."""
        with self._whole("final") as draft:
            state = None
            if self.is_fsdp_enabled:
                whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
                state = get_model_state_dict(self.frac_model(), options=whole)
            if self.args.should_save:
                self._save(str(draft), state_dict=state)
        return Path(self._output_dir) / "final"
