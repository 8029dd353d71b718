"""Positions, masks and temperatures of a forward pass, for the attention layers of mixed models.

Letters: B batch, T time, P tokens before, C columns of them that the cache holds, N sequences
packed in a row, W window of sliding attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, Qwen3Config
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from flash_frac.models.attention import needs_blocks
from flash_frac.models.cache import FracCache, FracStaticCache
from flash_frac.models.configuration import FracConfig
from flash_frac.models.mixers import ATTENTION


class AttentionInputs:
    """Inputs of attention layers in a forward pass, apart from hidden states.

    Args:
        config: the model's configuration.
        hidden_states: (B, T, E); only shape, dtype and device are used.
        mask: (B, T), 0 at padding; None without padding.
        cache: the cache of earlier tokens; None without a cache.
        cu_seqlens: (N + 1,) boundaries of sequences packed in one row.

    Attributes:
        real: (B, C + T), False at padding; None without padding.
        position_ids: (B or 1, T), the number of real tokens before each in its sequence.
    """

    def __init__(
        self,
        config: FracConfig,
        hidden_states: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        check_cache(mask, cache, cu_seqlens)
        self.config, self.hidden_states = config, hidden_states
        self.cache, self.cu_seqlens = cache, cu_seqlens
        past = cache if isinstance(cache, FracCache) else FracCache(config)
        batch, self.num_tokens = hidden_states.shape[:2]
        num_held, device = past.num_held, hidden_states.device
        self.real: Tensor | None = None
        # Positions of all C + T tokens.
        if mask is not None or past.real is not None:
            parts = [
                torch.ones(batch, size, dtype=torch.bool, device=device) if x is None else x != 0
                for x, size in ((past.real, num_held), (mask, self.num_tokens))
            ]
            self.real = torch.cat([x.to(device) for x in parts], 1)
            before = past.num_tokens - num_held if past.before is None else past.before[:, None]
            self._positions = self.real.cumsum(1).sub(1).clamp_min(0) + before
        else:
            begin, end = past.num_tokens - num_held, past.num_tokens + self.num_tokens
            self._positions = torch.arange(begin, end, device=device)[None]
        if cu_seqlens is not None:
            ends = cu_seqlens.to(device=device, dtype=torch.long)
            sequence = torch.searchsorted(ends, self._positions[0], right=True) - 1
            self._positions = self._positions - ends[sequence]
        self.position_ids = self._positions[:, -self.num_tokens :]

    def arguments(
        self, config: Qwen3Config, rotary: Qwen3RotaryEmbedding | None
    ) -> dict[str, dict[str, Any]]:
        """Arguments of `AttentionBlock` by type of layer, with masks for config's implementation.

        Args:
            config: see `FracConfig.attention_config`.
            rotary: None for a model without positions.
        """
        shared = {
            "position_ids": self.position_ids,
            "position_embeddings": None
            if rotary is None
            else rotary(self.hidden_states, self.position_ids),
        }
        masks = {"attention": self._full_mask, "sliding_attention": self._sliding_mask}
        found = {
            name: {**shared, "attention_mask": masks[name](config)}
            for name in ATTENTION
            if name in (self.config.mixer_types or [])
        }
        if "attention" in found:
            found["attention"]["query_scale"] = query_scale(self.config, self.position_ids)
        return found

    def _full_mask(self, config: Qwen3Config) -> Any:
        return create_causal_mask(
            config=config,
            inputs_embeds=self.hidden_states,
            attention_mask=self.real,
            # Without a cache, positions that restart mark packed sequences. Pass none otherwise:
            # checking them would wait for the device, or build a mask of all pairs while a graph is
            # recorded.
            past_key_values=self.cache if self.cu_seqlens is None else None,
            position_ids=None if self.cu_seqlens is None else self.position_ids,
        )

    def _sliding_mask(self, config: Qwen3Config) -> Tensor | None:
        """Like `_full_mask`, built here: windows count real tokens and skip padding."""
        implementation, window = config._attn_implementation or "eager", config.sliding_window
        assert window is not None
        if "flex" in implementation:
            raise ValueError(
                "attn_implementation='flex_attention' does not support sliding_attention layers; "
                "use 'sdpa'"
            )
        held = self.cache.num_sliding if isinstance(self.cache, FracCache) else 0
        if "flash" in implementation:
            return None if self.real is None else self.real[:, -(held + self.num_tokens) :]
        return self._mask_by_hand(implementation, held + self.num_tokens, window)

    def _mask_by_hand(self, implementation: str, num: int, window: int) -> Tensor | None:
        """Mask over the last `num` columns for sdpa or eager attention; None if none is needed."""
        real = None if self.real is None else self.real[:, -num:]
        plain = real is None and self.cu_seqlens is None and implementation == "sdpa"
        # An exported program must take the same path for all lengths.
        if plain and not torch.compiler.is_exporting():
            # Plain causal attention, one token that sees everything, or too many tokens for a mask.
            short = num <= window and self.num_tokens in (1, num)
            if short or needs_blocks(self.num_tokens, window):
                return None
        keys, queries = self._positions[:, None, -num:], self.position_ids[:, :, None]
        column = torch.arange(num, device=keys.device)
        column_of_query = column[-self.num_tokens :, None]
        visible = (column <= column_of_query) & (queries - keys < window)
        if real is not None:
            visible = visible & real[:, None]
        if self.cu_seqlens is not None:
            # Tokens of one sequence share the difference of column and position.
            visible = visible & (column - keys == column_of_query - queries)
        # Padding sees itself, because attention to nothing is NaN.
        visible = (visible | (column == column_of_query))[:, None]
        return as_mask(visible, implementation, self.hidden_states.dtype)

    def remember(self) -> None:
        """Record the padding in the cache, after it has stored keys and values."""
        if not isinstance(self.cache, FracCache):
            return
        self.cache.real = self.real
        if self.cu_seqlens is not None:
            self.cache.unpack(self.cu_seqlens)
        self.cache.slide()


class StaticAttentionInputs(AttentionInputs):
    """`AttentionInputs` for a static cache, which does not record padding: masks cover all tokens.

    Args:
        masks: by transformers' type of layer, each (B, 1, T, room) as `generate` builds it, or one
            (B, P + T) for all, 0 at padding.
        position_ids: (B or 1, T); by default counted from the mask or from the cache.
    """

    def __init__(
        self,
        config: FracConfig,
        hidden_states: Tensor,
        masks: dict[str, Any] | Tensor | None,
        cache: FracStaticCache,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
    ) -> None:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens cannot be used with a static cache in a model with attention layers; "
                "use FracCache(model.config)"
            )
        self.config, self.hidden_states, self.cache = config, hidden_states, cache
        self.num_tokens = hidden_states.shape[1]
        self.masks = masks if isinstance(masks, dict) else {}
        self.real, self.cu_seqlens = (None if isinstance(masks, dict) else masks), None
        if self.real is not None and not torch.compiler.is_compiling():
            seen = int(cache.num_tokens) + self.num_tokens
            if self.real.shape[1] != seen:
                raise ValueError(
                    "attention_mask with a static cache must cover all tokens, including earlier "
                    f"ones: expected {seen} columns, got {self.real.shape[1]}"
                )
            check_static_padding(config, self.real)
        if position_ids is None and self.real is not None:
            position_ids = self.real.ne(0).cumsum(1)[:, -self.num_tokens :].sub(1).clamp_min(0)
        elif position_ids is None:
            tokens = torch.arange(self.num_tokens, device=hidden_states.device)
            position_ids = (tokens + cache.num_tokens)[None]
        self.position_ids = position_ids

    def _full_mask(self, config: Qwen3Config) -> Any:
        if "full_attention" in self.masks:
            return self.masks["full_attention"]
        return super()._full_mask(config)

    def _sliding_mask(self, config: Qwen3Config) -> Any:
        if "sliding_attention" in self.masks:
            return self.masks["sliding_attention"]
        return create_sliding_window_causal_mask(
            config=config,
            inputs_embeds=self.hidden_states,
            attention_mask=self.real,
            past_key_values=self.cache,
            position_ids=self.position_ids,
        )


def as_mask(visible: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    """The mask for sdpa (True where visible) or for eager attention (added to the scores)."""
    if implementation != "eager":
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def query_scale(config: FracConfig, position_ids: Tensor) -> Tensor | None:
    """Factors (B or 1, T) of queries beyond attention_temperature_length; None if it is off."""
    length, slope = config.attention_temperature_length, config.attention_temperature_slope
    if length is None:
        return None
    slope = 1 / math.log(length) if slope is None else slope
    return 1 + slope * ((position_ids + 1) / length).log().clamp_min(0)


def check_static_padding(config: FracConfig, mask: Tensor) -> None:
    """Raise a ValueError for padding (B, P + T) that sliding layers of a static cache would count.

    They keep the last W columns, which contain fewer than W real tokens if some are padding.
    """
    if "sliding_attention" in config.layer_types and bool((mask.ne(0).int().diff(dim=1) < 0).any()):
        raise ValueError(
            "attention_mask must have padding on the left only, with a static cache in a model "
            "with sliding_attention layers, whose window would count it; pad on the left, or omit "
            "cache_implementation"
        )


def check_cache(mask: Tensor | None, cache: Cache | None, cu_seqlens: Tensor | None) -> None:
    """Raise a ValueError for inputs that only models without attention layers support."""
    if cache is not None and not isinstance(cache, FracCache):
        raise ValueError(
            "past_key_values of a model with attention layers must be a FracCache, which records "
            f"padding, got {type(cache).__name__}; use FracCache(model.config)"
        )
    if cu_seqlens is not None and mask is not None:
        raise ValueError(
            "attention_mask with cu_seqlens is not supported by models with attention layers; "
            "leave padding out of the packed row"
        )
    if cu_seqlens is not None and cache is not None and cache.get_seq_length():
        raise ValueError(
            "cu_seqlens cannot continue from a cache in a model with attention layers; pass the "
            "sequences as a batch, padded on the left with an attention_mask"
        )
