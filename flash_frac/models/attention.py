"""The attention layers of hybrid models: Hugging Face's Qwen3, given masks and positions.

Qwen3, because it is the transformer that the paper compares with: attention over all tokens, heads
of keys and values that queries share, norms of queries and keys, rotary positions, and an MLP.
Which kernel computes it (`attn_implementation`) is Hugging Face's choice, or the caller's.
Letters: B batch, T time, P tokens before, N sequences packed in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, Qwen3Config
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from flash_frac.models.cache import FracCache, FracStaticCache

AttentionBlock = Qwen3DecoderLayer


class FracRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, except that no cast takes its frequencies below float32: late positions need it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FracRotaryEmbedding:
        def keep_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrowed = result.is_floating_point() and result.dtype.itemsize < 4
            return tensor.to(result.device) if narrowed else result

        return super()._apply(keep_precision, recurse)


class AttentionInputs:
    """What attention layers need to know of a forward pass, beside its hidden states.

    Args:
        hidden_states: (B, T, E), of which shape, dtype and device matter.
        mask: (B, T), 0 at padding; None if there is none.
        cache: the tokens before; None if there are none and none will be.
        cu_seqlens: (N + 1,) boundaries of sequences packed in one row.

    Attributes:
        real: (B, P + T), False at padding, or None if there is none.
        position_ids: (B or 1, T), the number of real tokens before each, of its own sequence.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        check_attention(mask, cache, cu_seqlens)
        self.cache, self.cu_seqlens = cache, cu_seqlens
        batch, num_tokens = hidden_states.shape[:2]
        past, before = (cache.num_tokens, cache.real) if isinstance(cache, FracCache) else (0, None)
        device = hidden_states.device
        self.real: Tensor | None = None
        if mask is not None or before is not None:
            parts = [
                torch.ones(batch, size, dtype=torch.bool, device=device) if x is None else x != 0
                for x, size in ((before, past), (mask, num_tokens))
            ]
            self.real = torch.cat([x.to(device) for x in parts], 1)
            self.position_ids = self.real.cumsum(1)[:, past:].sub(1).clamp_min(0)
        else:
            self.position_ids = torch.arange(past, past + num_tokens, device=device)[None]
        if cu_seqlens is not None:
            ends = cu_seqlens.to(device=device, dtype=torch.long)
            sequence = torch.searchsorted(ends, self.position_ids[0], right=True) - 1
            self.position_ids = self.position_ids - ends[sequence]

    def arguments(
        self, config: Qwen3Config, rotary: Qwen3RotaryEmbedding, hidden_states: Tensor
    ) -> dict[str, Any]:
        """Of a call of `AttentionBlock`: masks for the implementation that config names."""
        return {
            # Packed sequences are told by positions that begin again, if there is no cache.
            "attention_mask": create_causal_mask(
                config=config,
                inputs_embeds=hidden_states,
                attention_mask=self.real,
                past_key_values=self.cache if self.cu_seqlens is None else None,
                position_ids=self.position_ids,
            ),
            "position_ids": self.position_ids,
            "position_embeddings": rotary(hidden_states, self.position_ids),
        }

    def remember(self) -> None:
        """Note in the cache, which has taken keys and values, what is padding."""
        if not isinstance(self.cache, FracCache):
            return
        self.cache.real = self.real
        if self.cu_seqlens is not None:
            self.cache.unpack(self.cu_seqlens)


class StaticAttentionInputs(AttentionInputs):
    """The same beside a static cache, which knows no padding: masks are of all tokens.

    Args:
        mask: (B, P + T), 0 at padding, or (B, 1, T, room) as `create_causal_mask` made it.
        position_ids: (B or 1, T); by default counted from the mask or from the cache.
    """

    def __init__(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        cache: FracStaticCache,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
    ) -> None:
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens cannot be used with a static cache in a model with attention_layers; "
                "use FracCache(model.config)"
            )
        num_tokens = hidden_states.shape[1]
        self.cache, self.cu_seqlens, self.real = cache, None, mask
        whole = mask if mask is not None and mask.ndim == 2 else None
        if whole is not None and not torch.compiler.is_compiling():
            seen = int(cache.num_tokens) + num_tokens
            if whole.shape[1] != seen:
                raise ValueError(
                    "attention_mask beside a static cache must cover all tokens, those before "
                    f"included: expected {seen} columns, got {whole.shape[1]}"
                )
        if position_ids is None and whole is not None:
            position_ids = whole.ne(0).cumsum(1)[:, -num_tokens:].sub(1).clamp_min(0)
        elif position_ids is None:
            tokens = torch.arange(num_tokens, device=hidden_states.device)
            position_ids = (tokens + cache.num_tokens)[None]
        self.position_ids = position_ids


@contextmanager
def recorded_attentions(blocks: Iterable[nn.Module]) -> Iterator[list[Any]]:
    """The attention weights (B, heads, T, P + T) that the attention layers compute meanwhile."""
    found: list[Any] = []
    hooks = [
        block.self_attn.register_forward_hook(lambda module, args, out: found.append(out[1]))
        for block in blocks
        if isinstance(block, AttentionBlock)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def check_attention(mask: Tensor | None, cache: Cache | None, cu_seqlens: Tensor | None) -> None:
    """ValueError for what a hybrid model cannot do, and a Frac model can."""
    if cache is not None and not isinstance(cache, FracCache):
        raise ValueError(
            "past_key_values of a model with attention_layers must be a FracCache, which knows "
            f"what is padding, got {type(cache).__name__}; use FracCache(model.config)"
        )
    if cu_seqlens is not None and mask is not None:
        raise ValueError(
            "attention_mask beside cu_seqlens is not supported by models with attention_layers; "
            "leave padding out of the packed row"
        )
    if cu_seqlens is not None and cache is not None and cache.get_seq_length():
        raise ValueError(
            "cu_seqlens cannot go on from a cache in a model with attention_layers; pass the "
            "sequences as a batch, padded on the left with an attention_mask"
        )
