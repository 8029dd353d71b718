"""The settings of model and training; those of the data are in `flash_frac.data`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.utils import logging

from flash_frac.models import FracConfig
from flash_frac.models.fields import check_names, did_you_mean
from flash_frac.recipes import find_config
from flash_frac.train.parallel import meeting, set_timeout

logger = logging.get_logger(__name__)
# Trainer takes other values of these for "always", "never", or "by another setting".
_POSITIVE = (
    "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
    "gradient_accumulation_steps", "logging_steps", "save_steps", "eval_steps", "save_total_limit",
    "peak_tflops", "ddp_timeout",
)  # fmt: skip
_NOT_NEGATIVE = (
    "learning_rate", "weight_decay", "max_grad_norm", "label_smoothing_factor", "memory_law_steps",
)  # fmt: skip
# Trainer picks these, and does not look for others.
_FSDP_KEYS = (
    "version", "reshard_after_forward", "cpu_offload", "activation_checkpointing",
    "cpu_ram_efficient_loading", "state_dict_type", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "min_num_params", "xla", "xla_fsdp_settings", "xla_fsdp_v2",
    "xla_fsdp_grad_ckpt", "forward_prefetch", "backward_prefetch", "use_orig_params",
    "sync_module_states", "limit_all_gathers",
)  # fmt: skip


@dataclass(kw_only=True)
class ModelArguments:
    """Which model is trained: fresh weights of a configuration, or those of a checkpoint."""

    config_name: str | None = field(
        default=None,
        metadata={
            "help": "An installed model size, a config.json or its folder: start from fresh "
            "weights. In a recipe a relative path starts from the recipe's folder."
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A checkpoint or hub id: go on from its weights."}
    )
    config_overrides: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Fields to change in the configuration of config_name."}
    )

    def __post_init__(self) -> None:
        if (self.config_name is None) == (self.model_name_or_path is None):
            given = "neither" if self.config_name is None else "both"
            raise ValueError(
                "exactly one of config_name (fresh weights) and model_name_or_path (weights to go "
                f"on from) must be given, got {given}"
            )
        overrides = self.config_overrides
        if overrides is not None and not isinstance(overrides, dict):
            raise ValueError(
                f"config_overrides must be a mapping such as {{frac_num_modes: 8}}, got {overrides}"
            )
        if overrides is not None and self.config_name is None:
            raise ValueError("config_overrides changes a configuration: it needs config_name")

    def config(self) -> FracConfig:
        """The configuration of `config_name` with `config_overrides`, every field checked."""
        assert self.config_name is not None
        path = find_config(self.config_name)
        path = path / "config.json" if path.is_dir() else path
        overrides: Any = self.config_overrides or {}
        where = "config_overrides"
        try:
            check_names(map(str, overrides), FracConfig)
            where = f"config_name {path}"
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"it must hold fields and values, got {values!r}")
            check_names(values, FracConfig)
            return FracConfig.from_dict(values, **overrides)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: {error}") from error


@dataclass
class FracTrainingArguments(TrainingArguments):
    """`TrainingArguments` and what a Frac run adds."""

    context_parallel_size: int = field(
        default=1, metadata={"help": "Ranks that share each sequence; divides their number."}
    )
    memory_law_steps: int = field(
        default=100, metadata={"help": "Steps between logs of the memory law; 0 for none."}
    )
    peak_tflops: float | None = field(
        default=None, metadata={"help": "The device's matrix rate for MFU, where it is not known."}
    )

    def __post_init__(self) -> None:
        # Batches carry cu_seqlens and labels already shifted, which are no columns of a dataset.
        self.remove_unused_columns = False
        # Every parameter takes part in every step, and looking for others costs time at each.
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        # A loss that is not a number is to stop the run, not to be averaged away.
        self.logging_nan_inf_filter = False
        # Batches have one shape; and each process reads its own, since packed rows cannot be cut.
        self.dataloader_drop_last = True
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.cuda.is_available()
        if self.accelerator_config is None:
            self.accelerator_config = {"dispatch_batches": False}
        self._check_numbers()
        if self.fsdp and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            logger.warning("fsdp: there is one process, and nothing to shard.")
            self.fsdp = None
        with meeting(self):
            super().__post_init__()
        # Trainer passes it on to some backends only.
        set_timeout(self.ddp_timeout_delta)
        self._check_mappings()
        if self.context_parallel_size < 1 or self.world_size % self.context_parallel_size:
            raise ValueError(
                f"context_parallel_size must divide the number of processes, {self.world_size}, "
                f"got {self.context_parallel_size}; start more with torchrun --nproc_per_node"
            )

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, or copied: all but secrets, which transformers names *_token."""
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
        if isinstance(self.fsdp_config, dict):
            for key in self.fsdp_config:
                if key.removeprefix("fsdp_") not in _FSDP_KEYS:
                    hint = did_you_mean(key, _FSDP_KEYS, f"the keys are {', '.join(_FSDP_KEYS)}")
                    raise ValueError(f"fsdp_config has no key {key}{hint}")
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        try:
            # Trainer would find out when all text is tokenised.
            get_scheduler(
                self.lr_scheduler_type,
                optimizer,
                num_warmup_steps=0,
                num_training_steps=2,
                scheduler_specific_kwargs=self.lr_scheduler_kwargs or {},  # pyright: ignore
            )
        except TypeError as error:
            raise ValueError(f"lr_scheduler_kwargs {self.lr_scheduler_kwargs}: {error}") from error
