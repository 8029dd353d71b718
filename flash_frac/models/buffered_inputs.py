"""Positions for the attention layers of mixed models in a pass with a `BufferedCache`."""

from __future__ import annotations

from torch import Tensor
from transformers import Qwen3Config

from flash_frac.models.attention_inputs import AttentionInputs
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.configuration import FracConfig


class BufferedAttentionInputs(AttentionInputs):
    """`AttentionInputs` for a `BufferedCache`, which computes attention itself without masks."""

    def __init__(
        self,
        config: FracConfig,
        hidden_states: Tensor,
        mask: Tensor | None,
        cache: BufferedCache,
        cu_seqlens: Tensor | None,
    ) -> None:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens cannot be used with a BufferedCache; pass a batch")
        self.config, self.hidden_states, self.cache = config, hidden_states, cache
        self.position_ids = cache.begin(hidden_states.shape[1], mask).to(hidden_states.device)

    def _full_mask(self, config: Qwen3Config) -> None:
        return None

    def _sliding_mask(self, config: Qwen3Config) -> None:
        return None

    def remember(self) -> None:
        """Do nothing: the cache has already counted."""
