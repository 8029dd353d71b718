"""A training run as one YAML file: `TrainingArguments` and a few fields on model and data.

Everything in a recipe is checked before anything is read, downloaded or started: an unknown key, a
value of the wrong type, and settings that exclude each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.utils import logging

from flash_frac.data import DataArguments
from flash_frac.recipes import MODELS, find_config, find_recipe

logger = logging.get_logger(__name__)


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
        if isinstance(self.config_overrides, str):
            self.config_overrides = json.loads(self.config_overrides)
        if self.config_overrides is not None and self.config_name is None:
            raise ValueError("config_overrides changes a configuration: it needs config_name")


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
        if self.fsdp and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            logger.warning("fsdp: there is one process, and nothing to shard.")
            self.fsdp = None
        super().__post_init__()
        if self.context_parallel_size < 1 or self.world_size % self.context_parallel_size:
            raise ValueError(
                f"context_parallel_size must divide the number of processes, {self.world_size}, "
                f"got {self.context_parallel_size}; start more with torchrun --nproc_per_node"
            )
        if self.memory_law_steps < 0:
            raise ValueError(f"memory_law_steps must be 0 or more, got {self.memory_law_steps}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run, resolved: what to train, on what, and how."""

    model: ModelArguments
    data: DataArguments
    training: FracTrainingArguments

    def __post_init__(self) -> None:
        data, training = self.data, self.training
        if training.gradient_checkpointing and data.stateful:
            raise ValueError(
                "stateful carries states between steps, which gradient_checkpointing drops: set "
                "one of the two to false"
            )
        if training.context_parallel_size > 1 and data.stateful:
            raise ValueError(
                "stateful and context_parallel_size exclude each other: set stateful to false or "
                "context_parallel_size to 1"
            )
        if data.sequence_length % training.context_parallel_size:
            raise ValueError(
                f"sequence_length ({data.sequence_length}) must be a multiple of "
                f"context_parallel_size ({training.context_parallel_size})"
            )
        if data.streaming and training.max_steps <= 0:
            raise ValueError("streaming has no end that is known: set max_steps")
        if data.streaming and training.context_parallel_size > 1:
            raise ValueError(
                "streaming cannot give the ranks of a context the same batch: set streaming to "
                "false or context_parallel_size to 1"
            )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """All settings, defaults included, as JSON has them."""
        return {
            "model": dataclasses.asdict(self.model),
            "data": dataclasses.asdict(self.data),
            "training": self.training.to_dict(),
        }


# Fields of the recipe that are dropped if the command line gives the one on the left.
_REPLACES = {
    "data_files": ("dataset_name", "dataset_config", "streaming"),
    "dataset_name": ("data_files",),
    "config_name": ("model_name_or_path",),
    "model_name_or_path": ("config_name", "config_overrides"),
}


class _Parser(HfArgumentParser):
    """Errors are raised, for callers other than a command line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe with command-line arguments such as --max_steps=100 on top.

    Args:
        path: the path of a YAML file, or the name of an installed recipe.
        overrides: arguments as they are typed; they replace what the recipe says.

    Example:
        >>> recipe = load_recipe("small", ["--learning_rate", "3e-4"])
    """
    path = find_recipe(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold 'key: value' lines, got {type(values).__name__}")
    parser = _Parser(
        [ModelArguments, DataArguments, FracTrainingArguments],  # pyright: ignore
        allow_abbrev=False,
        add_help=False,
    )
    options = {name.removeprefix("--"): a for name, a in parser._option_string_actions.items()}
    for key in values:
        _check_name(str(key), options, f"{path}: ")
    for argument in overrides:
        if match := re.match(r"--([A-Za-z_][\w-]*)", argument):
            _check_name(match[1].replace("-", "_"), options, "")
    typed = [key for key in _REPLACES if any(_names(a, key) for a in overrides)]
    for name in typed:
        values = {key: value for key, value in values.items() if key not in _REPLACES[name]}
    arguments = [text for key, value in values.items() for text in _typed(options[key], value)]
    try:
        model, data, training = parser.parse_args_into_dataclasses([*arguments, *overrides])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if model.config_name is not None:
        found = find_config(model.config_name, "" if "config_name" in typed else path.parent)
        # An installed size keeps its name, which means the same on every machine.
        model.config_name = found.name if found.parent == MODELS else str(found)
    return Recipe(model=model, data=data, training=training)


def _names(argument: str, field_name: str) -> bool:
    """Whether an argument of the command line is for a field."""
    return argument.split("=")[0].removeprefix("--").replace("-", "_") == field_name


def _check_name(name: str, options: dict[str, argparse.Action], where: str) -> None:
    if name in options:
        return
    near = difflib.get_close_matches(name, options, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; see `frac train --help`"
    raise ValueError(f"{where}unknown key {name}{hint}")


def _typed(action: argparse.Action, value: Any) -> list[str]:
    """A value of the YAML file as one would type it, so that there is one check of types."""
    name = f"--{action.dest}"
    if value is None:
        return []
    # `--fsdp` takes any text, and the text "true" is none of its strategies.
    if value is True and action.nargs == "?":
        return [name]
    if value is False and action.nargs == "?" and action.default is None:
        return []
    if isinstance(value, bool):
        return [f"{name}={str(value).lower()}"]
    if isinstance(value, dict):
        return [f"{name}={json.dumps(value)}"]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [f"{name}={value}"]
