"""FracTrainer: Hugging Face's Trainer for Frac models and reliable runs.

It adds to Trainer: a batch order that resumes exactly, atomic checkpoints, states carried between
batches, sequences shared between ranks, a loss over exactly the held-out tokens, throughput and
memory law in the logs, and an error at the first non-finite number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flash_frac.data import Collator
from flash_frac.models import FracForCausalLM
from flash_frac.train import checkpoint as checkpoints
from flash_frac.train.compiling import compiled_blocks
from flash_frac.train.context import CountingCollator, Seen
from flash_frac.train.course import Course
from flash_frac.train.decay import decayed_parameters
from flash_frac.train.flops import training_flops
from flash_frac.train.held_out import held_out_loss
from flash_frac.train.monitor import (
    JsonLinesCallback,
    device_peak_flops,
    memory_law,
    peak_memory_gib,
)
from flash_frac.train.nonfinite import NotFiniteError, first_not_finite
from flash_frac.train.others import next_token_loss
from flash_frac.train.pace import Pace, compare, describe_slow, slow_ranks
from flash_frac.train.parallel import context_group, gather_numbers, know_hosts
from flash_frac.train.reading import Reading
from flash_frac.train.recipe import Recipe
from flash_frac.train.sampler import EpochOrder, EvalShard
from flash_frac.train.saving import SavingTrainer
from flash_frac.train.sharding import autocast, shard_on_cpus
from flash_frac.train.stateful import CarriedStates
from flash_frac.train.watching import Console, use_our_console

LAW_TOKENS = 2048


class FracTrainer(SavingTrainer):
    """Trains a model according to a recipe.

    Args:
        model: a FracForCausalLM, or a causal language model of another family.
        recipe: all settings.
        tokenizer: saved with every checkpoint.
        train_dataset: a dataset of `flash_frac.data`; eval_dataset: a `PackedDataset`, or None.
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
        self.is_frac = isinstance(model, FracForCausalLM)
        super().__init__(
            model=model,
            args=args,
            data_collator=CountingCollator(collator, getattr(model.config, "sliding_window", None)),
            compute_loss_func=None
            if self.is_frac
            else partial(next_token_loss, smoothing=args.label_smoothing_factor),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
        )
        if self.is_frac:
            model.set_context_group(self.context_group)
        self.reading = Reading(train_dataset, args)
        # Hooks do not see inside a fully compiled model; other families have unknown layers.
        timed = args.world_size > 1 and not args.torch_compile and self.is_frac
        self.pace = Pace(model.model.layers, args.device) if timed else None
        self._hosts, self._slow = know_hosts(args), set[int]()
        if (smoother := self.label_smoother) is not None:
            # Trainer would shift the labels, which `Collator` has already shifted.
            self.label_smoother = lambda *args, shift_labels=False, **kwargs: smoother(
                *args, **kwargs
            )
        # Before the console, because a completed run needs no live line.
        self.add_callback(Course(self))
        self.console = Console(live=not args.disable_tqdm)
        use_our_console(self, self.console)
        self.add_callback(JsonLinesCallback(lambda: self.resumed_from))
        peak = args.peak_tflops and args.peak_tflops * 1e12
        self.peak_flops = (peak or device_peak_flops(args.device)) if self.is_frac else None
        self._last_inputs: dict[str, Any] = {}
        self._tokens, self._since = 0, time.perf_counter()
        # Counts over the batches since the last log, and for the last batch.
        self._seen, self._last_seen = Seen(), Seen()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        settings: Any = self.args.fsdp_plugin_args
        if settings is not None and shard_on_cpus(self.accelerator, settings):
            self.is_fsdp_enabled = True

    def autocast_smart_context_manager(self, cache_enabled: Any = True) -> Any:
        return autocast(self.accelerator)

    def train_from(self, folder: Path | None, trial: Any = None, ignore_keys: Any = None) -> Any:
        if not self.args.compile_blocks:
            return super().train_from(folder, trial, ignore_keys)
        with compiled_blocks(self.frac_model()):
            return super().train_from(folder, trial, ignore_keys)

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
            # Lanes are already in the order in which they must be read.
            seed=None if self.carried is not None else seed,
        )
        return self.order

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = epoch_iterator if self.pace is None else self.pace.timed(epoch_iterator)
        return super().get_batch_samples(batches, num_batches, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if not self.is_frac:
            # Other families accept only these; `compute_loss_func` computes the loss.
            inputs = {name: inputs[name] for name in ("input_ids", "labels")}
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
        if self.args.world_size == 1:
            # With several ranks, `_meet` checks this on all of them at the same step.
            self.saver.check()
        self.reading.note(inputs.pop("bookmark", None))
        self._last_seen = inputs.pop("seen")
        self._seen += self._last_seen
        # A copy, because the carried state is added to the original and would be kept alive.
        self._last_inputs = dict(inputs)
        self._tokens += inputs["input_ids"].numel() * self.args.world_size
        return super().training_step(model, inputs, num_items_in_batch)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        if not self.is_frac:
            return super().floating_point_ops(dict(inputs))
        config = self.frac_model().config
        return inputs["input_ids"].numel() * training_flops(config, *self._last_seen.contexts)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        # Infinite gradients are normal with a float16 scaler, which skips the step.
        if self.accelerator.scaler is None and not math.isfinite(float(norm)):
            inputs = {k: v for k, v in self._last_inputs.items() if k != "first_sequence"}
            # Hooks do not run inside compiled blocks.
            with torch.compiler.set_stance("force_eager"), self.compute_loss_context_manager():
                name = first_not_finite(self.frac_model(), self._prepare_inputs(inputs))
            self.saver.join()
            last = checkpoints.last_checkpoint(self._output_dir)
            raise NotFiniteError(
                f"step {self.state.global_step + 1}: the gradient norm is {float(norm)}; first "
                f"non-finite tensor: {name}. The last checkpoint is {last or 'none'}. Try a lower "
                "learning_rate or max_grad_norm, or more warmup_steps"
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
            raise ValueError("no text is held out for evaluation: set held_out or held_out_files")
        share = self.recipe.training.context_parallel_size
        shard = EvalShard(dataset, self.args.process_index // share, self.args.world_size // share)
        batch = 1 if share > 1 else self.args.per_device_eval_batch_size
        loader = DataLoader(shard, batch_size=batch, collate_fn=self.eval_collator)
        model: Any = self.model_wrapped if self.is_in_train else self.model
        if not self.is_in_train:
            self._move_model_to_device(model, self.args.device)
        with self.compute_loss_context_manager():
            mean, count = held_out_loss(
                model, loader, self._prepare_inputs, self.args.device, is_frac=self.is_frac
            )
        metrics = {
            f"{metric_key_prefix}_loss": mean,
            f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700)),
            f"{metric_key_prefix}_tokens": count,
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
            logs |= self._speed() | self._meet()
        super().log(logs, start_time)
        every = self.recipe.training.memory_law_steps
        # Only Frac layers have a memory law.
        every = every if "frac" in getattr(self.frac_model().config, "mixer_types", ()) else 0
        if "loss" in logs and every and self.state.global_step % every == 0:
            law = self._memory_law()
            # Bypass Trainer, which would store these hundreds of numbers in every checkpoint.
            self.callback_handler.on_log(self.args, self.state, self.control, law)

    def _meet(self) -> dict[str, float]:
        """Exchange times and save failures between ranks, all at the same step.

        Returns the times for the log; ends the run if a rank could not save.
        """
        if self.args.world_size == 1:
            return {}
        times = (0.0, 0.0) if self.pace is None else self.pace.take()
        everyone = gather_numbers([*times, self.saver.failure is not None], self.args)
        self.saver.check([rank for rank, (*_, failed) in enumerate(everyone) if failed])
        if self.pace is None:
            return {}
        seconds = [(wait, work) for wait, work, _ in everyone]
        before, self._slow = self._slow, slow_ranks(seconds)
        if self.args.should_save:
            # Slow in two logs in a row, because any rank may stall for a moment.
            for rank in sorted(self._slow & before):
                self.console.say(describe_slow(rank, seconds, self._hosts))
        return compare(seconds)

    def _speed(self) -> dict[str, float]:
        """Throughput since the last log, without the time for evaluation and checkpoints."""
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
        """Memory statistics of every layer on the start of the last batch."""
        started = time.perf_counter()
        model = self.frac_model()
        model.set_context_group(None)
        ids = self._last_inputs["input_ids"][:1, :LAW_TOKENS].to(self.args.device)
        with self.compute_loss_context_manager():
            law = memory_law(model, ids)
        model.set_context_group(self.context_group)
        self._paused += time.perf_counter() - started
        return law
