"""The attention layers of mixed models: Qwen3's, with or without positions.

Qwen3 is the transformer that the paper compares with: grouped-query attention, query and key norms,
and rotary positions. Names and shapes of parameters are those of Qwen3's layers. Hugging Face, or
the caller, selects the attention kernel (`attn_implementation`).
Letters: B batch, T time, P tokens before, E width, W window of sliding layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from flash_frac.layers import GatedMLP, RMSNorm, add_mlp
from flash_frac.layers.branches import in_branches
from flash_frac.layers.plain import call_linear
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.configuration import FracConfig


class FracRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, but no cast takes its frequencies below float32: large positions need it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FracRotaryEmbedding:
        def keep_precision(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            narrowed = result.is_floating_point() and result.dtype.itemsize < 4
            return tensor.to(result.device) if narrowed else result

        return super()._apply(keep_precision, recurse)


class Attention(Qwen3Attention):
    """Causal attention, full or sliding, with the parameters of Qwen3's.

    Args:
        config: see `FracConfig.attention_config`.
        layer_idx: index of the layer in the model.
    """

    def __init__(self, config: Qwen3Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        query_scale: Tensor | None = None,
        gather: Callable[[Tensor, int | None], Tensor] | None = None,
        lanes: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, T, E), and weights (B, heads, T, P + T) if the implementation returns them.

        Args:
            attention_mask: in the format of the implementation; None applies only causality and
                the window.
            position_embeddings: cosines and sines of rotary positions; None for no positions.
            query_scale: (B or 1, T), factors of the queries; 1 if None.
            gather: fetches keys and values of earlier ranks, as far as the window reaches; None if
                rows are whole.
            lanes: number of equal parts of one row to read as a batch, each after its own past.
        """
        given = hidden_states.shape
        if lanes is not None:
            hidden_states = hidden_states.view(lanes, -1, given[2])
        q, k, v = self.project(hidden_states, position_embeddings, query_scale)
        if isinstance(past_key_values, BufferedCache):
            y = past_key_values.attend(self.layer_idx, q, k, v, self.scaling).transpose(1, 2)
            return call_linear(self.o_proj, y.reshape(*given[:2], -1)), None
        if gather is not None:
            k, v = gather(torch.cat([k, v], -1), self.sliding_window).chunk(2, -1)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        implementation = self.config._attn_implementation or "eager"
        attend = partial(
            ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward),
            self,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        window, plain = self.sliding_window, attention_mask is None and implementation == "sdpa"
        if plain and window is not None and needs_blocks(q.shape[2], window):
            y, weights = attend_in_blocks(attend, q, k, v, window), None
        else:
            y, weights = attend(q, k, v, attention_mask)
        return call_linear(self.o_proj, y.reshape(*given[:2], -1)), weights

    def project(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        query_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, T, D), keys and values (B, key heads, T, D), as in `forward`."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        heads = in_branches(
            lambda: self.q_norm(call_linear(self.q_proj, hidden_states).view(shape)),
            lambda: self.k_norm(call_linear(self.k_proj, hidden_states).view(shape)),
            lambda: call_linear(self.v_proj, hidden_states).view(shape),
        )
        q, k, v = (x.transpose(1, 2) for x in heads)
        if position_embeddings is not None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if query_scale is not None:
            q = (q * query_scale[:, None, :, None]).to(q.dtype)
        return q, k, v


class AttentionBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then, if the configuration has one, x + MLP(norm(x))."""

    def __init__(self, config: FracConfig, attention_config: Qwen3Config, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(attention_config, layer_idx)
        # Keep the order of Qwen3's layers: older stream files identify their model by it.
        width = config.mlp_width(layer_idx)
        self.mlp = None if width is None else GatedMLP(config.hidden_size, width)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.mlp is not None:
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """Arguments as in `Attention`."""
        hidden_states = (
            hidden_states + self.self_attn(self.input_layernorm(hidden_states), **inputs)[0]
        )
        if self.mlp is None:
            return hidden_states
        return add_mlp(hidden_states, self.post_attention_layernorm, self.mlp)


def needs_blocks(num_tokens: int, window: int) -> bool:
    """Whether T tokens are too many for a T x T mask."""
    return num_tokens > 2 * window


def attend_in_blocks(
    attend: Callable[..., tuple[Tensor, Any]], q: Tensor, k: Tensor, v: Tensor, window: int
) -> Tensor:
    """Exact attention to the last W tokens in memory linear in T; output (B, T, heads, D).

    A block of W queries sees only its own keys and those of the block before.

    Args:
        attend: called with queries, keys, values and a mask; returns (B, T, heads, D) first.
        q: (B, heads, T, D), with T > W.
        k, v: (B, key heads, P + T, D), with P < W.
    """
    num_tokens, num_before = q.shape[2], k.shape[2] - q.shape[2]
    begin = num_before + window
    mask = _band(window, begin, window, q.device)
    first = attend(q[:, :, :window], k[:, :, :begin], v[:, :, :begin], mask)[0]
    # Pad at the end, where no earlier token sees it.
    missing = -num_tokens % window
    queries = F.pad(q[:, :, window:], (0, 0, 0, missing)).unflatten(2, (-1, window))
    keys, values = (
        F.pad(x[:, :, num_before:], (0, 0, 0, missing)).unfold(2, 2 * window, window).mT
        for x in (k, v)
    )
    # Treat every block as a sequence of the batch.
    blocks = [x.transpose(1, 2).flatten(0, 1) for x in (queries, keys, values)]
    rest = attend(*blocks, _band(window, 2 * window, window, q.device))[0]
    rest = rest.unflatten(0, (q.shape[0], -1)).flatten(1, 2)
    return torch.cat([first, rest], 1)[:, :num_tokens]


def _band(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """(1, 1, queries, keys), True at the last W keys of each query; aligned at the last ones."""
    key = torch.arange(num_keys, device=device)
    ahead = key - key[num_keys - num_queries :, None]
    return ((ahead <= 0) & (ahead > -window))[None, None]


@contextmanager
def recorded_attentions(blocks: Iterable[nn.Module]) -> Iterator[list[Any]]:
    """Collect the attention weights (B, heads, T, P + T) computed inside the block."""
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
