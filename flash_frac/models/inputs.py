"""Check and complete the inputs of a Frac model.

Letters: B batch, T time, E width, N sequences (B, or those packed in a row).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.utils import logging

from flash_frac.layers.checks import can_be_read, check_mask
from flash_frac.models.cache import FracCache
from flash_frac.models.configuration import FracConfig
from flash_frac.models.fields import nearest

logger = logging.get_logger(__name__)

# Arguments of transformers' models that have no effect here: the longest packed sequence, cache
# positions (our cache counts by itself), text segments, and arguments that `generate` passes on to
# the model.
UNUSED = (
    "max_length_q",
    "max_length_k",
    "cache_position",
    "token_type_ids",
    "tokenizer",
    "assistant_tokenizer",
)
# How transformers and TRL mark the starts of packed sequences, see `boundaries`.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# Arguments of the loss.
LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")


def wants_cache(model: Any, asked: bool | None, cache: Cache | None) -> bool:
    """Whether a forward pass returns states; a ValueError if it cannot continue those given."""
    if not (model.gradient_checkpointing and model.training):
        return asked if asked is not None else model.config.use_cache and not model.training
    # transformers would run each layer twice, without its cache.
    if cache is not None:
        raise ValueError(
            "past_key_values must be None in training with gradient checkpointing, which ignores "
            "it; call model.eval() or model.gradient_checkpointing_disable(), or generate with "
            "use_cache=False"
        )
    if asked:
        logger.warning_once("gradient checkpointing turns use_cache=True off.")
    return False


def loss_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of the loss from all arguments, and return them."""
    found = {name: arguments.pop(name) for name in LOSS if name in arguments}
    if isinstance(shifted := found.get("shift_labels"), Tensor):
        # transformers takes a view of it, and slices of rows are not contiguous.
        found["shift_labels"] = shifted.contiguous()
    return found


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError for an unknown argument, with the closest known name."""
    known = {*known, *UNUSED, *PACKING, *LOSS}
    for name in names:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise TypeError(f"forward() got an unexpected argument {name}{hint}")


def check_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    config: FracConfig,
) -> None:
    """Raise a ValueError unless the inputs fit the model and each other.

    Token ids are checked against the vocabulary only on a CPU: on a GPU the check would stall it.
    """
    _check_past(cache, config)
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            "exactly one of input_ids and inputs_embeds must be given, "
            f"got {'neither' if input_ids is None else 'both'}"
        )
    if inputs_embeds is not None:
        name, inputs = "inputs_embeds", inputs_embeds
        expected = f"(B, T, {config.hidden_size})"
        fits = inputs.ndim == 3 and inputs.shape[-1] == config.hidden_size
    else:
        assert input_ids is not None
        name, inputs, expected, fits = "input_ids", input_ids, "(B, T)", input_ids.ndim == 2
    if not fits:
        raise ValueError(f"{name} must have shape {expected}, got {tuple(inputs.shape)}")
    if inputs.numel() == 0:
        raise ValueError(f"{name} must hold at least one token, got shape {tuple(inputs.shape)}")
    _check_positions(position_ids, *inputs.shape[:2])
    _check_keys(cache, config, inputs.shape[0])
    if input_ids is not None and input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be torch.int64 or torch.int32, got {input_ids.dtype}; use .long()"
        )
    if input_ids is None or not can_be_read(input_ids):
        return
    low, high = (int(x) for x in input_ids.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {config.vocab_size}), got ids from {low} to {high}; the "
            f"vocabulary has {config.vocab_size}"
        )


def _check_positions(position_ids: Tensor | None, batch: int, num_tokens: int) -> None:
    """Raise a ValueError unless there is one position for each token, of one row or of all."""
    if position_ids is None:
        return
    if position_ids.shape not in ((batch, num_tokens), (1, num_tokens)):
        raise ValueError(
            f"position_ids must have shape (B or 1, T) with B = {batch} and T = {num_tokens}, got "
            f"{tuple(position_ids.shape)}"
        )


def _check_past(cache: Cache | None, config: FracConfig) -> None:
    """Raise a ValueError unless a cache fits the layers of the model."""
    if cache is None or torch.compiler.is_compiling():
        return
    remedy = "use the past_key_values that the model returned, or FracCache(model.config)"
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values must be a FracCache, got {type(cache).__name__}; {remedy}"
        )
    if isinstance(cache, FracCache):
        fits = cache.layer_types == list(config.layer_types)
    else:
        fits = len(cache.layers) == len(config.layer_types)
    if not fits:
        raise ValueError(
            f"past_key_values must have the layers of this model, got a {type(cache).__name__} "
            f"with others; {remedy}"
        )
    if isinstance(cache, FracCache) and cache.sliding_layers:
        window = config.sliding_window
        if cache.window != window:
            raise ValueError(
                f"past_key_values must have the sliding_window of this model ({window}), got "
                f"{cache.window}; {remedy}"
            )


def _check_keys(cache: Cache | None, config: FracConfig, batch: int) -> None:
    """Raise a ValueError unless cached keys are those of B sequences and of the model's heads.

    Layers with a state check theirs.
    """
    if not isinstance(cache, FracCache) or torch.compiler.is_compiling():
        return
    layers: list[Any] = [cache.layers[n] for n in cache.attention_layers]
    heads = config.attention_key_value_heads or config.num_attention_heads
    size = config.attention_head_dim or config.hidden_size // config.num_attention_heads
    for keys in (layer.keys for layer in layers if layer.is_initialized and layer.keys.numel()):
        if (*keys.shape[:2], keys.shape[-1]) != (batch, heads, size):
            raise ValueError(
                f"past_key_values must hold keys of shape ({batch}, {heads}, tokens, {size}), got "
                f"{tuple(keys.shape)}; are they from another model or batch?"
            )


def check_labels(
    labels: Tensor | None,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    vocab_size: int,
    of_loss: Mapping[str, Any],
) -> None:
    """Raise a ValueError unless there is one label, an integer, for each token.

    Like token ids, labels are checked against the vocabulary only on a CPU. `of_loss` are the
    arguments of the loss.
    """
    ignore_index = of_loss.get("ignore_index", -100)
    inputs = inputs_embeds if input_ids is None else input_ids
    if labels is None or inputs is None:
        return
    if labels.shape != inputs.shape[:2] or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers of shape {tuple(inputs.shape[:2])}, like the tokens, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}"
        )
    if not (can_be_read(labels) and labels.numel()):
        return
    low, high = (int(x) for x in labels.masked_fill(labels == ignore_index, 0).aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"labels must be in [0, {vocab_size}), the vocabulary, or {ignore_index} where there "
            f"is nothing to predict, got labels from {low} to {high}"
        )


def local_mask(
    attention_mask: Tensor | None, hidden_states: Tensor, past_key_values: Cache | None
) -> Tensor | None:
    """The part (B, T) of the mask for the new tokens; ValueError if the mask does not fit."""
    if attention_mask is None:
        return None
    batch, num_tokens = hidden_states.shape[:2]
    fits = attention_mask.ndim == 2 and attention_mask.shape[0] == batch
    if past_key_values is None:
        fits = fits and attention_mask.shape[1] == num_tokens
    else:
        fits = fits and attention_mask.shape[1] >= num_tokens
    if not fits:
        expected = f"({batch}, {num_tokens})"
        if past_key_values is not None:
            expected += f" or, with earlier tokens, ({batch}, past + {num_tokens})"
        raise ValueError(
            f"attention_mask must have shape {expected}, got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - num_tokens :]
    # A mask without padding costs a useless reordering. Checking it waits for the GPU, so it is
    # done once per pass over many tokens, but not for each decoded token.
    on_cpu = mask.device.type == "cpu"
    if torch.compiler.is_compiling() or not (on_cpu or num_tokens > 1):
        return mask
    if not on_cpu and torch.cuda.is_current_stream_capturing():
        return mask
    # A mask on the CPU is checked there and moves asynchronously.
    if bool((mask == 1).all()):
        return None
    check_mask(mask)
    return mask.to(hidden_states.device, non_blocking=True)


def wants_attentions(asked: bool | None, config: FracConfig, masks: object) -> bool:
    """Whether to return attention weights; ValueError if there are none.

    Args:
        masks: the attention_mask argument; a dict was prepared for one implementation.
    """
    wanted = config.output_attentions if asked is None else asked
    if wanted and not config.attention_layers:
        raise ValueError(
            "output_attentions must be False for a model without attention_layers; "
            "`flash_frac.inspect` measures what Frac layers read from earlier tokens"
        )
    if wanted and isinstance(masks, dict) and config._attn_implementation != "eager":
        raise ValueError(
            "output_attentions with a static cache needs attn_implementation='eager', got "
            f"{config._attn_implementation!r}; call model.set_attn_implementation('eager')"
        )
    return bool(wanted)


def random_elapsed(hidden_states: Tensor, cu_seqlens: Tensor | None, dilation: float) -> Tensor:
    """Times (B, T) before each token, constant in a sequence, log-uniform in [1, dilation]."""
    batch, num_tokens = hidden_states.shape[:2]
    num = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    times = torch.exp(math.log(dilation) * torch.rand(num, device=hidden_states.device))
    if cu_seqlens is None:
        return times[:, None].expand(batch, num_tokens)
    token = torch.arange(num_tokens, device=hidden_states.device)
    return times[torch.searchsorted(cu_seqlens, token, right=True) - 1][None]
