"""Context-parallel attention: positions and masks of this rank's slice of a row.

Keys and values of earlier ranks come in one exchange per layer, see
`flash_frac.ops.context_parallel`.
Letters: B batch, T time (of a slice), P tokens before it in the row, W window of sliding attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from flash_frac.models.attention_inputs import AttentionInputs
from flash_frac.models.cache import FracCache
from flash_frac.models.configuration import FracConfig
from flash_frac.ops.context_parallel import slice_borders, with_tokens_before

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ContextAttentionInputs(AttentionInputs):
    """Inputs of attention layers for the slice of this rank.

    Args:
        group: the ranks that share the row.
        cu_seqlens: boundaries of the sequences of this slice; the first one continues the last one
            of the previous rank, and may be empty.
        cache: empty; receives the keys and values of this slice and all earlier ones.
        The rest as in `AttentionInputs`.
    """

    def __init__(
        self,
        config: FracConfig,
        hidden_states: Tensor,
        mask: Tensor | None,
        cache: FracCache | None,
        cu_seqlens: Tensor | None,
        group: ProcessGroup,
    ) -> None:
        if mask is not None:
            raise ValueError(
                "attention_mask must be None with a context_group; leave the mask out and pad the "
                "end of the row, where it changes nothing before it, or pack with cu_seqlens"
            )
        if cache is not None and cache.get_seq_length():
            raise ValueError(
                "past_key_values must be empty with a context_group: a slice continues that of "
                "the previous rank; call set_context_group(None) to continue from a cache"
            )
        super().__init__(config, hidden_states, None, cache, cu_seqlens)
        self.group = group
        borders = slice_borders(hidden_states, group=group, cu_seqlens=cu_seqlens)
        self.lengths, self.offset, self.begin = borders
        # The first sequence began `offset - begin` tokens before the slice.
        token = torch.arange(self.num_tokens, device=hidden_states.device)
        first = token < (self.num_tokens if cu_seqlens is None else cu_seqlens[1].to(token))
        self.position_ids = self.position_ids + first * (self.offset - self.begin)
        column = torch.arange(self.offset, device=hidden_states.device)
        # Tokens of earlier documents get positions that match no token of this slice.
        before = torch.where(column < self.begin, column + 1, column - self.begin)
        self._positions = torch.cat([before[None], self.position_ids], 1)

    def arguments(
        self, config: Qwen3Config, rotary: Qwen3RotaryEmbedding | None
    ) -> dict[str, dict[str, Any]]:
        if (config._attn_implementation or "eager") not in ("sdpa", "eager"):
            raise ValueError(
                "attn_implementation must be 'sdpa' or 'eager' with a context_group, got "
                f"{config._attn_implementation!r}"
            )
        found = super().arguments(config, rotary)
        return {name: {**inputs, "gather": self._gather} for name, inputs in found.items()}

    def _gather(self, x: Tensor, window: int | None) -> Tensor:
        """x (B, heads, T, channels), preceded by the earlier tokens that `_held` counts."""
        whole = with_tokens_before(x, self.lengths, group=self.group)
        return whole[:, :, self.offset - self._held(window) :]

    def _held(self, window: int | None) -> int:
        """How many of the P tokens before the slice a layer gets."""
        # A cache of packed rows needs all of them, because documents are cut out of it.
        if window is None or (self.cache is not None and self.cu_seqlens is not None):
            return self.offset
        return min(self.offset, window - 1)

    def _full_mask(self, config: Qwen3Config) -> Any:
        num = self.offset + self.num_tokens
        if self.cu_seqlens is None and self.offset and config._attn_implementation == "sdpa":
            # Avoid a T (P + T) mask, because context parallelism is for long rows.
            return causal_lower_right(self.num_tokens, num)
        return self._mask_by_hand(config._attn_implementation or "eager", num, num)

    def _sliding_mask(self, config: Qwen3Config) -> Tensor | None:
        window = config.sliding_window
        assert window is not None
        num = self._held(window) + self.num_tokens
        return self._mask_by_hand(config._attn_implementation or "eager", num, window)

    def remember(self) -> None:
        """Record in the cache what it holds, including tokens of earlier ranks."""
        if not isinstance(self.cache, FracCache):
            return
        self.cache.count(self.offset)
        if self.cu_seqlens is not None:
            ends = self.cu_seqlens.long() + self.offset
            self.cache.unpack(torch.cat([ends.new_tensor([self.begin]), ends[1:]]))
        self.cache.slide()
