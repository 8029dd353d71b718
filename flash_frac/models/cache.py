"""Hugging Face's cache: states of frac and delta layers, keys and values of attention.

The tensors live in `transformers`' own `LinearAttentionLayer`: conv_states (B, I, K - 1) and
recurrent_states (B, H, M, D), and in its `DynamicLayer`: keys and values (B, heads, T, channels).
transformers handles beam reordering, reset and offloading. W is the window of sliding layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from flash_frac.layers import MixerState

CANNOT_CROP = (
    "tokens cannot be removed from the cache of a Frac model (crop), as assisted decoding does "
    "with rejected ones: a state sums over all tokens; use a transformer as assistant_model, or "
    "prompt_lookup_num_tokens with one, or decode without"
)


class FracCache(DynamicCache):
    """A `DynamicCache` that also counts the tokens it has seen, and records which were padding.

    `generate` needs the count to tell new tokens from those already in the cache. Hugging Face's
    caches get it from attention layers, which most Frac models lack. Sliding layers keep the last
    W - 1 real tokens of every sequence, regardless of padding between them.

    Attributes:
        num_tokens: tokens seen, including padding.
        real: (B, num_held) for a model with attention, False at padding; None without padding.
        before: (B,), number of earlier real tokens, not in `real`; None if all earlier ones were.
        layer_types: kinds of all layers, as in the configuration.
        state_layers, attention_layers, sliding_layers: indices of layers with a fixed-size state
            (frac, delta), of layers with keys and values, and of the sliding ones among these.
        is_never_seen: whether `generate` created it only for itself and need not fill it.
    """

    is_never_seen = False

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.num_tokens = 0
        self.real: Tensor | None = None
        self.before: Tensor | None = None
        self.layer_types = list(config.layer_types)  # pyright: ignore[reportAttributeAccessIssue]
        kinds = list(enumerate(self.layer_types))
        self.state_layers = [n for n, kind in kinds if kind == "linear_attention"]
        self.attention_layers = [n for n, kind in kinds if kind != "linear_attention"]
        self.sliding_layers = [n for n, kind in kinds if kind == "sliding_attention"]
        self.window: int | None = getattr(config, "sliding_window", None)
        for n in self.sliding_layers:
            # Hugging Face's sliding layer would count padding as part of the window.
            self.layers[n] = DynamicLayer()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        return self.num_tokens

    @property
    def num_sliding(self) -> int:
        """Columns of keys that sliding layers hold."""
        if not self.sliding_layers or not self.num_tokens:
            return 0
        layer: Any = self.layers[self.sliding_layers[0]]
        return layer.get_seq_length()

    @property
    def num_held(self) -> int:
        """Largest number of key columns that any layer holds."""
        if len(self.sliding_layers) == len(self.attention_layers):
            return self.num_sliding
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of key columns of full attention, and the first; sliding masks do not use this."""
        return self.num_tokens + query_length, 0

    @property
    def is_compileable(self) -> bool:
        """False, so that `generate` does not compile unasked, as for a `DynamicCache`."""
        return False

    def count(self, num_tokens: int) -> None:
        """Note that all layers have seen this many tokens more."""
        self.num_tokens += num_tokens

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error: a state is a sum over all tokens, and none can be removed."""
        raise ValueError(CANNOT_CROP)

    def tensors(self) -> list[Tensor]:
        """Recurrent states and windows of all frac and delta layers that have seen tokens."""
        layers: list[Any] = [self.layers[n] for n in self.state_layers]
        states = (_tensor(x) for y in layers for x in (y.recurrent_states, y.conv_states))
        return [state for state in states if state is not None]

    def reset(self) -> None:
        """Empty the cache, keeping the memory of states."""
        super().reset()
        self.forget()

    def forget(self) -> None:
        """Drop all keys and values, and the token count; keep the states."""
        for n in self.attention_layers:
            # transformers 5.10 would zero its tensors, and keep their length.
            self.layers[n] = DynamicLayer()
        self.num_tokens, self.real, self.before = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Select the sequences at `beam_idx`, in that order."""
        super().reorder_cache(beam_idx)  # pyright: ignore[reportArgumentType]
        if self.real is not None:
            self.real = self.real.index_select(0, beam_idx.to(self.real.device))
        if self.before is not None:
            self.before = self.before.index_select(0, beam_idx.to(self.before.device))

    def batch_select_indices(self, indices: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Select the sequences at `indices`, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, such as to sample several answers to one prompt."""
        keys = (getattr(self.layers[n], "keys", None) for n in self.attention_layers)
        held = [*self.tensors(), *(x for x in map(_tensor, keys) if x is not None)]
        if held:
            rows = torch.arange(held[0].shape[0], device=held[0].device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def slide(self) -> None:
        """Drop the keys and values that no later token of a sliding layer will see."""
        num = self.num_sliding
        kept = self._num_to_keep(num)
        if kept == num:
            return
        for n in self.sliding_layers:
            layer: Any = self.layers[n]
            # Copy if most is dropped, because a view would keep all the memory.
            for name in ("keys", "values"):
                rest = getattr(layer, name)[:, :, num - kept :]
                setattr(layer, name, rest.clone() if 2 * kept < num else rest)
        if self.real is not None and len(self.sliding_layers) == len(self.attention_layers):
            dropped = self.real.shape[1] - kept
            # Without recorded padding, all dropped tokens were real.
            earlier = self.num_tokens - self.real.shape[1]
            before = self.before if self.before is not None else earlier
            self.before = before + self.real[:, :dropped].sum(1)
            self.real = self.real[:, dropped:]

    def _num_to_keep(self, num: int) -> int:
        """Number of sliding columns that contain the last W - 1 real tokens."""
        if self.window is None or num < self.window:
            return num
        if self.real is None:
            return self.window - 1
        # Checking waits for the GPU, so it is not done for every token.
        if num < 2 * self.window:
            return num
        real = self.real[:, -num:]
        later = real.flip(1).cumsum(1).flip(1)
        needed = (real & (later < self.window)).any(0)
        return int(num - needed.int().argmax()) if bool(needed.any()) else 0

    def unpack(self, cu_seqlens: Tensor) -> None:
        """Turn N sequences packed in one row into a left-padded batch."""
        ends = cu_seqlens.long()
        begins, ends = ends[:-1, None], ends[1:, None]
        self.num_tokens = int((ends - begins).max())
        columns = ends - self.num_tokens + torch.arange(self.num_tokens, device=ends.device)
        real = columns >= begins
        self.real = None if bool(real.all()) else real
        for n in self.attention_layers:
            layer: Any = self.layers[n]
            rows = columns.clamp_min(0).to(layer.keys.device)
            layer.keys = layer.keys[0][:, rows].transpose(0, 1)
            layer.values = layer.values[0][:, rows].transpose(0, 1)


class FracStaticCache(StaticCache):
    """The cache of `cache_implementation="static"`, for decoding with a compiled model.

    Attention layers get room for `max_cache_len` tokens, and sliding ones for their window; other
    states have a fixed size anyway. It does not record padding: pass masks that cover all tokens.
    With sliding layers, padding must be on the left.

    Attributes:
        num_tokens: tokens seen, including padding; a tensor, so that a compiled step can count.
    """

    def __init__(self, config: PreTrainedConfig, max_cache_len: int) -> None:
        super().__init__(config=config, max_cache_len=max_cache_len)
        self.num_tokens = torch.zeros((), dtype=torch.long)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # pyright: ignore
        """Tokens seen, padding included."""
        return self.num_tokens

    @property
    def is_sliding(self) -> list[bool | None]:  # pyright: ignore
        """By layer; None for layers with a state: masks take their size from the first False."""
        return [
            None if hasattr(layer, "recurrent_states") else getattr(layer, "is_sliding", False)
            for layer in self.layers
        ]

    def place(self, device: torch.device) -> None:
        """Move the token count to this device, on which the model runs."""
        if self.num_tokens.device != device:
            self.num_tokens = self.num_tokens.to(device)
            torch._dynamo.mark_static_address(self.num_tokens)

    def count(self, num_tokens: int) -> None:
        """Note that all layers have seen this many tokens more."""
        self.num_tokens.add_(num_tokens)

    def reset(self) -> None:
        """Empty the cache, keeping its memory."""
        super().reset()
        self.num_tokens.zero_()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error, as `FracCache` does."""
        raise ValueError(CANNOT_CROP)


def _tensor(states: Any) -> Tensor | None:
    """The tensor of a state: some releases of transformers keep it in a dict at 0."""
    return states[0] if isinstance(states, dict) else states


def read_state(cache: Cache, layer_idx: int) -> MixerState | None:
    """The state of a layer, or None before its first tokens."""
    layer = cache.layers[layer_idx]
    if not cache.has_previous_state(layer_idx):
        return None
    state = MixerState(_tensor(layer.recurrent_states), _tensor(layer.conv_states))  # pyright: ignore
    # Clone, because the cache is overwritten in place while autograd still needs these values.
    return state.clone() if torch.is_grad_enabled() else state


def write_state(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Replace the state of a layer, in the same memory if it exists."""
    layer: Any = cache.layers[layer_idx]
    if cache.has_previous_state(layer_idx) and not getattr(layer, "record_past", False):
        for mine, new in (
            (_tensor(layer.recurrent_states), state.recurrent),
            (_tensor(layer.conv_states), state.conv),
        ):
            # An in-place step has already written it.
            if mine is not new:
                mine.copy_(new)  # pyright: ignore[reportOptionalMemberAccess]
        return
    cache.update_conv_state(state.conv, layer_idx)
    # transformers 5.10 would allocate the recurrent state in the dtype of the window.
    layer.dtype = state.recurrent.dtype
    cache.update_recurrent_state(state.recurrent, layer_idx)


def hold_state(cache: Cache, layer_idx: int, state: MixerState) -> None:
    """Make a layer's state refer to these tensors, such as views of others, without a copy."""
    layer: Any = cache.layers[layer_idx]
    for name, x in (("recurrent_states", state.recurrent), ("conv_states", state.conv)):
        held = getattr(layer, name)
        if isinstance(held, dict):
            held[0] = x
        else:
            setattr(layer, name, x)
