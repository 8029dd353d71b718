"""Check names, types and ranges of configuration fields: a mistake must not build another model."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from transformers import GenerationConfig, PreTrainedConfig

# Names of our fields in other model families.
_ALIASES = {
    "d_model": "hidden_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "d_state": "frac_num_modes",
    "state_size": "frac_num_modes",
    "d_conv": "frac_conv_kernel",
    "rope_theta": "attention_rope_parameters",
    "rope_scaling": "attention_rope_parameters",
    "rope_parameters": "attention_rope_parameters",
}
# Names that transformers reads or writes, in this and the previous major release, apart from the
# fields of its base class and generation settings.
_OF_TRANSFORMERS = {
    "add_cross_attention", "attn_implementation", "auto_map", "cross_attention_hidden_size",
    "decoder_start_token_id", "experts_implementation", "finetuning_task", "is_decoder",
    "model_type", "name_or_path", "num_labels", "output_attentions", "prefix", "pruned_heads",
    "quantization_config", "sep_token_id", "task_specific_params", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript", "transformers_weights",
    "use_bfloat16",
}  # fmt: skip
# Fields with a range of their own; those whose range depends on others are checked by FracConfig.
_RANGES: tuple[tuple[str, tuple[str, ...], Callable[[Any], bool]], ...] = (
    (
        "at least 1",
        (
            *("intermediate_size", "frac_head_dim", "max_position_embeddings", "frac_chunk_size"),
            *("mlp_intermediate_size", "attention_intermediate_size", "attention_head_dim"),
            *("attention_key_value_heads", "sliding_window", "frac_time_dilation"),
            *("delta_num_heads", "delta_head_dim", "delta_conv_kernel"),
        ),
        lambda x: x >= 1,
    ),
    (
        "at least 0",
        (
            *("pad_token_id", "bos_token_id", "eos_token_id", "initializer_range"),
            "attention_temperature_slope",
        ),
        lambda x: x >= 0,
    ),
    ("above 0", ("frac_expand", "delta_expand_v"), lambda x: x > 0),
    # transformers' own tests set an epsilon of 1.
    ("in (0, 1]", ("rms_norm_eps",), lambda x: 0 < x <= 1),
    ("in (0, 1)", ("frac_write_scale_init",), lambda x: 0 < x < 1),
    ("in [0, 1)", ("attention_dropout",), lambda x: 0 <= x < 1),
)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    NoneType: "None",
    list[int]: "a list of whole numbers",
    list[float]: "a list of finite numbers",
    list[str]: "a list of names",
    dict[str, Any]: "a mapping",
}


def unknown_names(names: Iterable[str], config_class: type[PreTrainedConfig]) -> list[str]:
    """Names that are neither fields of a configuration nor used by transformers.

    Private names (_name_or_path) are notes of the tool that wrote the file.
    """
    known = {field.name for field in fields(config_class)} | _OF_TRANSFORMERS
    known |= {*vars(GenerationConfig()), *getattr(config_class, "older_names", ())}
    return [name for name in names if name not in known and not name.startswith("_")]


def own_fields(config_class: type[PreTrainedConfig]) -> list[str]:
    """The fields that a configuration adds to its base class, including older names."""
    common = {field.name for field in fields(PreTrainedConfig)}
    added = [field.name for field in fields(config_class) if field.name not in common]
    return [*added, *getattr(config_class, "older_names", ())]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The closest known name, if one is close enough.

    Example: `nearest("frac_nummodes", ["frac_num_modes"]) == "frac_num_modes"`
    """
    known = list(known)
    if _ALIASES.get(name) in known:
        return _ALIASES[name]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about an unknown name.

    Example: `raise ValueError(f"unknown key {name}{did_you_mean(name, keys, 'see --help')}")`
    """
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else f"; {otherwise}"


def check_names(names: Iterable[str], config_class: type[PreTrainedConfig]) -> None:
    """Raise a ValueError for the first unknown name, with a suggestion.

    Example: `check_names(["d_model"], FracConfig)`
    """
    for name in unknown_names(names, config_class):
        kind = config_class.__name__
        hint = did_you_mean(name, own_fields(config_class), f"see help({kind})")
        raise ValueError(f"{kind} has no field {name}{hint}")


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first value of a wrong type.

    Example: `check_types({"frac_num_modes": "8"}, {"frac_num_modes": int})`
    """
    for name, hint in hints.items():
        if not _fits(values[name], hint):
            kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            wanted = " or ".join(_WORDS.get(kind, str(kind)) for kind in kinds)
            raise ValueError(f"{name} must be {wanted}, got {values[name]!r}")


def check_ranges(values: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first value out of range; `check_types` handles None.

    Example: `check_ranges({"rms_norm_eps": 1e-6})`
    """
    for wanted, names, is_fine in _RANGES:
        for name in names:
            value = values.get(name)
            if value is None:
                continue
            if not all(is_fine(x) for x in (value if isinstance(value, list) else [value])):
                raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_special_tokens(values: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first special token outside the vocabulary.

    Example: `check_special_tokens({"vocab_size": 259, "pad_token_id": 0})`
    """
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value, size = values.get(name), values["vocab_size"]
        if any(x >= size for x in (value if isinstance(value, list) else [value or 0])):
            raise ValueError(f"{name} must be below vocab_size ({size}), got {value!r}")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, kind) for kind in get_args(hint))
    if hint is Any or isinstance(value, bool):
        return hint in (Any, bool)
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        return isinstance(value, list | tuple | range) and all(_fits(x, kind) for x in value)
    if hint is float:
        # A configuration is JSON, which has no NaN, and no field may be infinite.
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, get_origin(hint) or hint)
