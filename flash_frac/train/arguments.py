"""Settings of the model and of training; those of the data are in `flash_frac.data`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, TrainingArguments, get_scheduler
from transformers.utils import logging

from flash_frac.files import read_object
from flash_frac.models import FracConfig
from flash_frac.models.fields import check_names, did_you_mean
from flash_frac.models.recomputing import policy_of
from flash_frac.recipes import find_config
from flash_frac.train.others import config_class_of, make_config
from flash_frac.train.parallel import meeting, set_timeout
from flash_frac.train.sharding import plugin_settings
from flash_frac.train.watching import check_reports

logger = logging.get_logger(__name__)
# Trainer reads 0 or less in these as "always", "never", or "see another setting".
_POSITIVE = (
    "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "logging_steps", "save_steps", "eval_steps", "save_total_limit",
    "peak_tflops", "ddp_timeout",
)  # fmt: skip
_NOT_NEGATIVE = (
    "learning_rate", "weight_decay", "max_grad_norm", "label_smoothing_factor", "memory_law_steps",
)  # fmt: skip
# Those of torch's checkpoint function, and our policy.
_CHECKPOINTING_KEYS = (
    *("policy", "use_reentrant", "preserve_rng_state", "determinism_check", "debug"),
    *("context_fn", "early_stop"),
)
# Trainer reads these keys and ignores all others.
_FSDP_KEYS = (
    "version", "reshard_after_forward", "cpu_offload", "activation_checkpointing",
    "cpu_ram_efficient_loading", "state_dict_type", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "min_num_params", "xla", "xla_fsdp_settings", "xla_fsdp_v2",
    "xla_fsdp_grad_ckpt", "forward_prefetch", "backward_prefetch", "use_orig_params",
    "sync_module_states", "limit_all_gathers",
)  # fmt: skip


@dataclass(kw_only=True)
class ModelArguments:
    """The model to train: a configuration with fresh weights, or a checkpoint."""

    config_name: str | None = field(
        default=None,
        metadata={
            "help": "Train fresh weights of this model: an installed model size, a config.json or "
            "its folder. In a recipe, relative paths start at the recipe's folder."
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Start from the weights of this checkpoint or hub id."}
    )
    config_overrides: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Fields to change in the configuration of config_name."}
    )

    def __post_init__(self) -> None:
        if (self.config_name is None) == (self.model_name_or_path is None):
            given = "neither" if self.config_name is None else "both"
            raise ValueError(
                "exactly one of config_name (fresh weights) and model_name_or_path (weights to "
                f"start from) must be given, got {given}"
            )
        overrides = self.config_overrides
        if overrides is not None and not isinstance(overrides, dict):
            raise ValueError(
                f"config_overrides must be a mapping such as {{frac_num_modes: 8}}, got {overrides}"
            )
        if overrides is not None and self.config_name is None:
            raise ValueError("config_overrides changes a configuration: it needs config_name")

    def config(self) -> PreTrainedConfig:
        """The configuration of `config_name` with `config_overrides`, with every field checked.

        It is a `FracConfig`, or the class of the model family that model_type names.
        """
        path, values = self._read()
        overrides: Any = self.config_overrides or {}
        where = f"config_name {path}"
        try:
            kind = config_class_of(values)
            check_names(values, kind)
            where = "config_overrides"
            check_names(map(str, overrides), kind)
            where = f"config_name {path}"
            return make_config(kind, values, overrides)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error

    def config_class(self) -> type[PreTrainedConfig]:
        """The class of the configuration; checkpoints to start from are always Frac models."""
        return FracConfig if self.config_name is None else config_class_of(self._read()[1])

    def _read(self) -> tuple[Path, dict[str, Any]]:
        """The path of the config.json, and its content."""
        assert self.config_name is not None
        path = find_config(self.config_name)
        path = path / "config.json" if path.is_dir() else path
        try:
            return path, read_object(path)
        except ValueError as error:
            raise ValueError(f"config_name: {error}") from error


@dataclass
class FracTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the settings that only Frac runs have.

    Attributes:
        planned: number of GPUs of a run that is only planned; None for one that starts here.
        sharded: whether FSDP shards the model over the processes.
    """

    planned: ClassVar[int | None] = None
    sharded: bool = field(default=False, init=False)
    context_parallel_size: int = field(
        default=1,
        metadata={"help": "Ranks that share each sequence; must divide the number of ranks."},
    )
    memory_law_steps: int = field(
        default=100, metadata={"help": "Log the memory law every N steps; 0 turns it off."}
    )
    peak_tflops: float | None = field(
        default=None,
        metadata={"help": "Peak TFLOP/s of the device, for MFU on devices that are not listed."},
    )

    compile_blocks: bool = field(
        default=False,
        metadata={
            "help": "Compile the model block by block with torch.compile, each type of block once. "
            "torch_compile compiles the whole model, which takes longer."
        },
    )
    async_save: bool = field(
        default=True,
        metadata={
            "help": "Write checkpoints in the background, from a copy in host memory. "
            "With False, training waits for the write and no copy is made."
        },
    )

    def __post_init__(self) -> None:
        # Batches carry cu_seqlens and shifted labels, which are not columns of the dataset.
        self.remove_unused_columns = False
        # Every parameter is used in every step, and searching for unused ones costs time.
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        # A NaN loss must stop the run, not be averaged away.
        self.logging_nan_inf_filter = False
        # All batches have one shape, and each process reads its own: packed rows cannot be split.
        self.dataloader_drop_last = True
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        if self.accelerator_config is None:
            self.accelerator_config = {"dispatch_batches": False}
        self._check_numbers()
        processes = self.planned or int(os.environ.get("WORLD_SIZE", "1"))
        if self.fsdp and processes == 1:
            logger.warning("fsdp is ignored: there is only one process, so nothing to shard.")
            self.fsdp = None
        self.sharded = bool(self.fsdp)
        if self.planned:
            # A planned run does not run here, so this machine needs no GPU.
            self.fsdp, self.use_cpu = None, True
        with meeting(self):
            super().__post_init__()
        # Trainer passes the timeout to some backends only.
        set_timeout(self.ddp_timeout_delta)
        self._check_mappings()
        if self.report_to and not self.planned:
            check_reports(self.report_to)
        processes = self.planned or self.world_size
        if self.context_parallel_size < 1 or processes % self.context_parallel_size:
            raise ValueError(
                f"context_parallel_size must divide the number of processes, {processes}, "
                f"got {self.context_parallel_size}; start more with torchrun --nproc_per_node"
            )
        self._check_compilers()

    def _check_compilers(self) -> None:
        if self.compile_blocks and self.torch_compile:
            raise ValueError(
                "compile_blocks and torch_compile cannot be combined; set one: the first compiles "
                "each block, the second the whole model"
            )
        if self.compile_blocks and self.context_parallel_size > 1:
            raise ValueError(
                "compile_blocks cannot compile the communication between ranks that share a "
                "sequence: set context_parallel_size to 1, or use torch_compile, which leaves "
                "that part uncompiled"
            )

    def _process_fsdp_args(self) -> dict[str, Any] | None:
        return plugin_settings(super()._process_fsdp_args())

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle or copy, without secrets: transformers names those *_token."""
        return {k: None if k.endswith("_token") else v for k, v in self.__dict__.items()}

    def _check_numbers(self) -> None:
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(
                f"max_steps must be above 0, or -1 to train for num_train_epochs, got "
                f"{self.max_steps}"
            )
        for name in _POSITIVE:
            value: Any = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")

    def _check_mappings(self) -> None:
        kwargs = self.gradient_checkpointing_kwargs
        for key in kwargs if isinstance(kwargs, dict) else ():
            if key not in _CHECKPOINTING_KEYS:
                known = f"the keys are {', '.join(_CHECKPOINTING_KEYS)}"
                hint = did_you_mean(key, _CHECKPOINTING_KEYS, known)
                raise ValueError(f"gradient_checkpointing_kwargs has no key {key}{hint}")
        if isinstance(kwargs, dict) and "policy" in kwargs:
            policy_of(kwargs)
            if not self.gradient_checkpointing:
                raise ValueError(
                    "gradient_checkpointing_kwargs has a policy, but gradient_checkpointing is "
                    "off: set it to true, or leave the policy out"
                )
        if isinstance(self.fsdp_config, dict):
            for key in self.fsdp_config:
                if key.removeprefix("fsdp_") not in _FSDP_KEYS:
                    hint = did_you_mean(key, _FSDP_KEYS, f"the keys are {', '.join(_FSDP_KEYS)}")
                    raise ValueError(f"fsdp_config has no key {key}{hint}")
                if key.endswith("version") and self.fsdp_config[key] != 2:
                    raise ValueError(
                        f"fsdp_config: {key} must be 2, got {self.fsdp_config[key]}: FSDP1 would "
                        "cast the parameters that carry time"
                    )
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        try:
            # Trainer would only fail after all text is tokenised.
            get_scheduler(
                self.lr_scheduler_type,
                optimizer,
                num_warmup_steps=0,
                num_training_steps=2,
                scheduler_specific_kwargs=self.lr_scheduler_kwargs or {},  # pyright: ignore
            )
        except TypeError as error:
            raise ValueError(f"lr_scheduler_kwargs {self.lr_scheduler_kwargs}: {error}") from error
