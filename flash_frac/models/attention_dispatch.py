"""Select the positions and masks of attention layers by the model's cache and context group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache

from flash_frac.models.attention_inputs import AttentionInputs, StaticAttentionInputs
from flash_frac.models.buffered_inputs import BufferedAttentionInputs
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.cache import FracStaticCache
from flash_frac.models.configuration import FracConfig
from flash_frac.models.context_attention import ContextAttentionInputs
from flash_frac.models.lanes import LaneAttentionInputs, LaneCache

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def attention_inputs(
    config: FracConfig,
    hidden_states: Tensor,
    masks: Any,
    mask: Tensor | None,
    cache: Cache | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    group: ProcessGroup | None,
) -> AttentionInputs:
    """Attention inputs of a forward pass over (B, T, E).

    Args:
        masks: the caller's, for all tokens or by type of layer; used with a static cache.
        mask: (B, T), for the new tokens; used otherwise. None without padding.
        group: the ranks that share each row; None if rows are whole.
    """
    if group is not None and isinstance(cache, FracStaticCache | BufferedCache):
        raise ValueError(
            "past_key_values must be a FracCache while ranks share rows, got "
            f"{type(cache).__name__}; call model.set_context_group(None) to decode"
        )
    if isinstance(cache, FracStaticCache):
        return StaticAttentionInputs(config, hidden_states, masks, cache, cu_seqlens, position_ids)
    inputs: Any = (config, hidden_states, mask, cache, cu_seqlens)
    if isinstance(cache, LaneCache):
        return LaneAttentionInputs(*inputs)
    if group is not None:
        return ContextAttentionInputs(*inputs, group=group)
    if isinstance(cache, BufferedCache):
        return BufferedAttentionInputs(*inputs)
    return AttentionInputs(*inputs)
