"""Determine the mixer of each layer, and check the fields of attention and delta layers.

Letters: E hidden_size, K key channels of a delta head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flash_frac.models.fields import check_types, did_you_mean

if TYPE_CHECKING:
    from flash_frac.models.configuration import FracConfig

ATTENTION = ("attention", "sliding_attention")
MIXER_TYPES = ("frac", "delta", *ATTENTION)
# transformers' name for each layer type; frac and delta states have a fixed size.
LAYER_TYPES = {
    "frac": "linear_attention",
    "delta": "linear_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_attention",
}
# MLP width / hidden_size in Qwen3 0.6B and 1.7B, and in layers given as `attention_layers`.
MLP_EXPAND = 3


def mixer_types_of(
    types: Sequence[str] | None, attention_layers: Sequence[int] | None, count: int
) -> list[str]:
    """One type for each of `count` layers; a ValueError if the fields are wrong or disagree.

    Args:
        types: one for each layer, or a pattern that repeats.
        attention_layers: indices of attention layers, as in older checkpoints; the rest is Frac.

    Example: `mixer_types_of(["frac", "delta"], None, 3) == ["frac", "delta", "frac"]`
    """
    if types is None:
        return _from_attention_layers(attention_layers or [], count)
    types = list(types)
    for name in types:
        if name not in MIXER_TYPES:
            names = ", ".join(MIXER_TYPES)
            hint = did_you_mean(name, MIXER_TYPES, f"the types are {names}")
            raise ValueError(f"mixer_types has an unknown type {name!r}{hint}")
    # If all layers have one type, treat it as a pattern of one, however many were stored.
    if types and len(set(types)) == 1:
        types = types[:1]
    if not 1 <= len(types) <= count:
        raise ValueError(
            f"mixer_types must have from 1 to num_hidden_layers ({count}) entries, got "
            f"{len(types)}; pass one for each layer, or a shorter pattern that repeats"
        )
    expanded = [types[n % len(types)] for n in range(count)]
    if attention_layers is not None:
        found = [n for n, name in enumerate(expanded) if name in ATTENTION]
        if sorted(attention_layers) != found:
            raise ValueError(
                f"attention_layers ({list(attention_layers)}) must agree with mixer_types, which "
                f"has attention in layers {found}; leave attention_layers out"
            )
    return expanded


def check_num_layers(
    stored: Sequence[str] | None, stored_count: int | None, count: int | None
) -> None:
    """Raise a ValueError if a checkpoint with different layer types gets another number of layers.

    A file whose pattern is shorter than its number of layers is unambiguous.
    """
    one_each = stored is not None and len(stored) == stored_count and len(set(stored)) > 1
    if stored is not None and one_each and count not in (None, len(stored)):
        raise ValueError(
            f"num_hidden_layers ({count}) needs mixer_types too, because the {len(stored)} layers "
            f"of the checkpoint differ: {list(stored)}; pass mixer_types=[...], one for each layer"
        )


def final_types(config: FracConfig) -> list[str]:
    """The types of all layers, checked again because num_hidden_layers may have changed since."""
    types, count = config.mixer_types or [], config.num_hidden_layers
    check_num_layers(types, len(types), count)
    return mixer_types_of(types or None, None, count)


def _from_attention_layers(layers: Sequence[int], count: int) -> list[str]:
    check_types({"attention_layers": layers}, {"attention_layers": list[int]})
    if len(set(layers)) != len(layers) or not all(0 <= n < count for n in layers):
        raise ValueError(
            "attention_layers must be a list of different whole numbers from 0 to "
            f"{count - 1}, the layers of the model, got {layers!r}"
        )
    return ["attention" if n in layers else "frac" for n in range(count)]


def check_attention(config: FracConfig) -> None:
    """Raise a ValueError unless the attention fields fit each other and the list of layers."""
    _check_window(config)
    _check_temperature(config)
    if not config.attention_layers:
        return
    heads = config.num_attention_heads
    if config.attention_head_dim is None and config.hidden_size % heads:
        raise ValueError(
            f"attention_head_dim must be given, because hidden_size ({config.hidden_size}) is not "
            f"a multiple of num_attention_heads ({heads})"
        )
    if heads % (config.attention_key_value_heads or heads):
        raise ValueError(
            f"attention_key_value_heads must divide num_attention_heads ({heads}), got "
            f"{config.attention_key_value_heads}"
        )
    _check_positions(config, config.attention_head_dim or config.hidden_size // heads)


def _check_positions(config: FracConfig, head_dim: int) -> None:
    if config.attention_positions not in ("rope", "none"):
        raise ValueError(
            f"attention_positions must be 'rope' or 'none', got {config.attention_positions!r}"
        )
    if config.attention_positions == "none" and config.attention_rope_parameters is not None:
        raise ValueError(
            "attention_rope_parameters must be None with attention_positions='none', got "
            f"{config.attention_rope_parameters}"
        )
    if config.attention_positions == "rope" and head_dim % 2:
        raise ValueError(
            f"attention_head_dim must be even, for rotary positions, got {head_dim}; or set "
            "attention_positions='none'"
        )
    rope = config.attention_rope_parameters or {}
    if "type" in rope or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            "attention_rope_parameters must name its kind rope_type, and have no "
            f"partial_rotary_factor but 1: whole heads are rotated, got {rope}"
        )
    for name in ("rope_theta", "factor"):
        value = rope.get(name, 1)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"attention_rope_parameters: {name} must be a number above 0, got {value!r}"
            )
    kind = rope.get("rope_type", "default")
    if kind not in (kinds := ("default", *ROPE_INIT_FUNCTIONS)):
        raise ValueError(
            f"attention_rope_parameters has an unknown rope_type {kind!r}; use one of "
            f"{', '.join(kinds)}"
        )
    if kind in ("linear", "dynamic", "yarn", "llama3") and "factor" not in rope:
        raise ValueError(f"attention_rope_parameters must have a factor for rope_type {kind!r}")


def _check_temperature(config: FracConfig) -> None:
    length, slope = config.attention_temperature_length, config.attention_temperature_slope
    if length is not None and length < 2:
        raise ValueError(f"attention_temperature_length must be at least 2, got {length}")
    if slope is not None and length is None:
        raise ValueError(
            f"attention_temperature_slope ({slope}) needs attention_temperature_length, the number "
            "of tokens from which it counts"
        )
    if length is not None and "attention" not in (config.mixer_types or []):
        raise ValueError(
            f"attention_temperature_length ({length}) needs a layer of type attention in "
            "mixer_types; leave it out"
        )


def _check_window(config: FracConfig) -> None:
    slides, window = "sliding_attention" in (config.mixer_types or []), config.sliding_window
    if slides and window is None:
        raise ValueError(
            "sliding_window must be the number of tokens that sliding_attention layers see, got "
            "None"
        )
    if window is not None and not slides:
        raise ValueError(
            f"sliding_window ({window}) needs a layer of type sliding_attention in mixer_types; "
            "leave it out"
        )


def check_delta(config: FracConfig) -> None:
    """Set missing fields of delta layers; raise a ValueError unless they fit each other."""
    if config.delta_num_heads is None:
        config.delta_num_heads = config.num_attention_heads
    if config.delta_head_dim is None:
        # A layer then has as many parameters as the published Gated DeltaNet: 6 E^2.
        config.delta_head_dim, rest = divmod(3 * config.hidden_size, 4 * config.delta_num_heads)
        if rest or not config.delta_head_dim:
            raise ValueError(
                "delta_head_dim must be given, because 3/4 of hidden_size "
                f"({config.hidden_size}) is not a multiple of delta_num_heads "
                f"({config.delta_num_heads})"
            )
    value_dim = config.delta_expand_v * config.delta_head_dim
    if value_dim < 1 or value_dim != int(value_dim):
        raise ValueError(
            f"delta_expand_v times delta_head_dim ({config.delta_head_dim}) must be a positive "
            f"whole number, got {config.delta_expand_v}"
        )
