"""Hugging Face's cache of linear-attention layers, holding the states of Frac layers.

The tensors live in `transformers`' own `LinearAttentionLayer`: conv_states (B, I, K - 1) and
recurrent_states (B, H, M, D), so that reordering beams, resetting and offloading are its work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from flash_frac.layers import MixerState


class FracCache(DynamicCache):
    """A `DynamicCache` of linear-attention layers that also counts the tokens it has seen.

    `generate` needs the count to tell new tokens from those already in the cache; Hugging Face's
    caches take it from attention layers, of which a Frac model has none.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.num_tokens

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile unasked, as it does not for a `DynamicCache`."""
        return False

    def tensors(self) -> list[Tensor]:
        """The memory of all layers that have seen tokens: recurrent states and windows."""
        states = (_tensor(x) for y in self.layers for x in (y.recurrent_states, y.conv_states))  # pyright: ignore
        return [state for state in states if state is not None]

    def reset(self) -> None:
        """Empty the cache, keeping its memory."""
        super().reset()
        self.num_tokens = 0


def _tensor(states: Any) -> Tensor | None:
    """Releases of transformers keep one tensor, or a dict of several with ours at 0."""
    return states[0] if isinstance(states, dict) else states


def read_state(cache: Cache, layer_idx: int) -> MixerState | None:
    """The state of a layer, or None before its first tokens."""
    layer = cache.layers[layer_idx]
    if not cache.has_previous_state(layer_idx):
        return None
    state = MixerState(_tensor(layer.recurrent_states), _tensor(layer.conv_states))  # pyright: ignore
    # The cache will be overwritten in place, under a graph that still needs these values.
    return state.clone() if torch.is_grad_enabled() else state


def write_state(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Replace the state of a layer, in the same memory once there is some."""
    layer: Any = cache.layers[layer_idx]
    if cache.has_previous_state(layer_idx) and not getattr(layer, "record_past", False):
        for mine, new in (
            (_tensor(layer.recurrent_states), state.recurrent),
            (_tensor(layer.conv_states), state.conv),
        ):
            # A step in place has written it already.
            if mine is not new:
                mine.copy_(new)  # pyright: ignore[reportOptionalMemberAccess]
        return
    cache.update_conv_state(state.conv, layer_idx)
    # transformers 5.10 would make the recurrent state in the dtype of the window.
    layer.dtype = state.recurrent.dtype
    cache.update_recurrent_state(state.recurrent, layer_idx)
