"""A training run as one YAML file: `TrainingArguments` and a few fields for model and data.

A recipe is checked before anything is read, downloaded or started: for unknown keys, values of the
wrong type, and settings that cannot be combined.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from flash_frac.data import DataArguments
from flash_frac.data.arguments import PREPARED_FIELDS, STREAM_FIELDS
from flash_frac.models.fields import did_you_mean
from flash_frac.recipes import MODELS, find_config, find_recipe
from flash_frac.train.arguments import FracTrainingArguments, ModelArguments
from flash_frac.train.others import check_settings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The resolved settings of a run: model, data and training."""

    model: ModelArguments
    data: DataArguments
    training: FracTrainingArguments

    def __post_init__(self) -> None:
        data, training = self.data, self.training
        check_settings(self.model.config_class(), data, training)
        if training.gradient_checkpointing and data.stateful:
            raise ValueError(
                "stateful carries states between steps, which gradient_checkpointing drops: set "
                "one of the two to false"
            )
        if training.context_parallel_size > 1 and data.stateful:
            raise ValueError(
                "stateful and context_parallel_size cannot be combined; set stateful to false or "
                "context_parallel_size to 1"
            )
        if data.sequence_length % training.context_parallel_size:
            raise ValueError(
                f"sequence_length ({data.sequence_length}) must be a multiple of "
                f"context_parallel_size ({training.context_parallel_size})"
            )
        nothing = not (data.held_out or data.held_out_documents or data.held_out_files)
        # Whether prepared data has held-out text is only known when it is opened.
        nothing = nothing and data.prepared_data is None
        if training.eval_strategy != "no" and nothing:
            field = "held_out_documents" if data.streaming else "held_out"
            raise ValueError(
                f"eval_strategy is set, but no text is held out: set {field} or held_out_files, or "
                "eval_strategy to 'no'"
            )
        if data.streaming and training.max_steps <= 0:
            raise ValueError("streaming has no known end: set max_steps")
        if data.streaming and training.context_parallel_size > 1:
            raise ValueError(
                "streaming cannot give the same batch to ranks that share a sequence: set "
                "streaming to false or context_parallel_size to 1"
            )

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """All settings including defaults, as JSON values."""
        return {
            "model": dataclasses.asdict(self.model),
            "data": dataclasses.asdict(self.data),
            "training": self.training.to_dict(),
        }


# If the command line sets the field on the left, those on the right are dropped from the recipe;
# so are those of a base, if a recipe does.
_REPLACES = {
    "data_files": (
        *("prepared_data", "dataset_name", "dataset_config", "streaming"),
        *STREAM_FIELDS,
    ),
    "prepared_data": (
        *("data_files", "dataset_name", "dataset_config", "dataset_split", "streaming"),
        *(*PREPARED_FIELDS, *STREAM_FIELDS),
    ),
    "held_out_files": ("held_out_documents",),
    "held_out_documents": ("held_out",),
    "num_train_epochs": ("max_steps",),
    "dataset_name": ("data_files", "prepared_data"),
    "config_name": ("model_name_or_path",),
    "model_name_or_path": ("config_name", "config_overrides"),
}


# Fields whose value is a mapping; some also accept the path of a file.
_MAPPINGS = ("config_overrides", "liger_kernel_config", *TrainingArguments._VALID_DICT_FIELDS)


class _Parser(HfArgumentParser):
    """A parser that raises errors instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-3 as a number, as YAML 1.2 does, and refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"the key {name} occurs twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _mapping(text: str) -> Any:
    """Parse '{key: value}', which is YAML and, with quotes, JSON; return other text as it is."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text} is not a mapping: {error}") from error


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, planned: int | None = None
) -> Recipe:
    """Load a recipe, and apply command-line arguments such as --max_steps=100.

    Args:
        path: the path of a YAML file, or the name of an installed recipe.
        overrides: command-line arguments; they replace the values of the recipe, except that
            `config_overrides` adds to those of the recipe.
        planned: load it for a plan on this many GPUs; such a recipe cannot be trained.

    Example:
        >>> recipe = load_recipe("small", ["--learning_rate", "3e-4"])
    """
    path = find_recipe(path)
    values = _read(path)
    training_type = FracTrainingArguments
    if planned is not None:
        training_type = type("PlannedArguments", (training_type,), {"planned": planned})
    parser = _Parser(
        [ModelArguments, DataArguments, training_type],  # pyright: ignore
        allow_abbrev=False,
        add_help=False,
    )
    options = {name.removeprefix("--"): a for name, a in parser._option_string_actions.items()}
    for name in _MAPPINGS:
        options[name].type = _mapping
    # Trainer declares it as text, but "true" is not one of its strategies.
    options["fsdp"].type = string_to_bool
    # Trainer declares it as a single name.
    options["report_to"].nargs = "+"
    for key in values:
        _check_name(str(key), options, f"{path}: ")
    for argument in overrides:
        if match := re.match(r"--([A-Za-z_][\w-]*)", argument):
            _check_name(match[1].replace("-", "_"), options, "")
    typed = [key for key in options if any(_names(a, key) for a in overrides)]
    for name in typed:
        replaced = _REPLACES.get(name, ())
        values = {key: value for key, value in values.items() if key not in replaced}
    try:
        arguments = [text for key, value in values.items() for text in _typed(options[key], value)]
        model, data, training = parser.parse_args_into_dataclasses([*arguments, *overrides])
        if "config_overrides" in typed:
            model.config_overrides = (values.get("config_overrides") or {}) | model.config_overrides
        if model.config_name is not None:
            found = find_config(model.config_name, "" if "config_name" in typed else path.parent)
            # An installed size keeps its name, which is the same on every machine.
            model.config_name = found.name if found.parent == MODELS else str(found)
            model.config()
    except (ValueError, TypeError) as error:
        # The value may come from the command line, which is not the recipe's mistake.
        is_typed = any(re.search(rf"\b{name}\b", str(error)) for name in typed)
        raise ValueError(str(error) if is_typed else f"{path}: {error}") from error
    return Recipe(model=model, data=data, training=training)


def _read(path: Path) -> dict[str, Any]:
    """The values of a recipe, on top of those of its `base`."""
    values = _load(path)
    name = values.pop("base", None)
    if name is None:
        return values
    try:
        is_path = Path(str(name)).suffix in (".yaml", ".yml")
        base = find_recipe(path.parent / name if is_path else str(name))
    except ValueError as error:
        raise ValueError(f"{path}: base: {error}") from error
    before = _load(base)
    if "base" in before:
        raise ValueError(f"{path}: base {base} has a base itself; name that one instead")
    if isinstance(config := before.get("config_name"), str) and "config_name" not in values:
        before["config_name"] = str(find_config(config, base.parent))
    for name in values:
        for other in _REPLACES.get(name, ()):
            before.pop(other, None)
    return before | values


def _load(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold 'key: value' lines, got {type(values).__name__}")
    return values


def _names(argument: str, field_name: str) -> bool:
    """Whether a command-line argument sets a field."""
    return argument.split("=")[0].removeprefix("--").replace("-", "_") == field_name


def _check_name(name: str, options: dict[str, argparse.Action], where: str) -> None:
    if name not in options:
        hint = did_you_mean(name, options, "see `frac train --help`")
        raise ValueError(f"{where}unknown key {name}{hint}")


def _typed(action: argparse.Action, value: Any) -> list[str]:
    """A value of the YAML file as command-line arguments, so that both get the same type check."""
    name = f"--{action.dest}"
    if value is None:
        if action.default is not None:
            raise ValueError(
                f"{action.dest} is null: leave it out for its default, {action.default}"
            )
        return []
    if isinstance(value, bool):
        return [f"{name}={str(value).lower()}"]
    if isinstance(value, dict):
        return [f"{name}={json.dumps(value)}"]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [f"{name}={value}"]
