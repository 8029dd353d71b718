"""Lanes: rows that continue from batch to batch, for truncated backpropagation through time.

A batch of b lanes of T tokens is one packed row of b T tokens. The first sequence of a lane
continues its last one in the previous batch; it is empty if the lane starts with a new document.
Frac and delta layers carry their states. Sliding attention carries the keys and values of the last
W - 1 tokens of each lane, in tensors of fixed size.
Letters: b lanes, T tokens of a lane, W window, N sequences of the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from flash_frac.models.attention_inputs import AttentionInputs, as_mask
from flash_frac.models.cache import FracCache
from flash_frac.models.configuration import FracConfig


@dataclass(frozen=True)
class LaneWindows:
    """The windows of a model's sliding layers for each lane.

    Attributes:
        real: (b, W - 1), whether a token belongs to the lane's last document.
        seen: (b,), number of tokens of that document so far.
        layers: by layer index, keys and values (b, heads, W - 1, channels).
    """

    real: Tensor
    seen: Tensor
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def detach(self) -> LaneWindows:
        """The same values, detached from the autograd graph."""
        layers = {n: (keys.detach(), values.detach()) for n, (keys, values) in self.layers.items()}
        return LaneWindows(self.real, self.seen, layers)


class LaneCache(FracCache):
    """The states of the N sequences of a row, and the windows of its b lanes.

    Args:
        config: configuration of a model without full attention.
        first_sequence: (b,), index of the first sequence of each lane.
        windows: windows before the row; None at the start.

    Attributes:
        windows_after: windows after a model with sliding layers has read the row.
    """

    def __init__(
        self, config: PreTrainedConfig, first_sequence: Tensor, windows: LaneWindows | None
    ) -> None:
        super().__init__(config)
        self.first_sequence = first_sequence
        num, length = first_sequence.shape[0], (self.window or 1) - 1
        if windows is None:
            real = first_sequence.new_zeros(num, length, dtype=torch.bool)
            windows = LaneWindows(real, first_sequence.new_zeros(num))
        self.windows, self.windows_after = windows, windows
        self._updated: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (b, heads, W - 1 + T, channels), starting with those before the row."""
        new, length = (key_states, value_states), self.windows.real.shape[1]
        before = self.windows.layers.get(layer_idx)
        if before is None:
            before = [x.new_zeros(*x.shape[:2], length, x.shape[3]) for x in new]
        keys, values = (torch.cat([old, x], 2) for old, x in zip(before, new, strict=True))
        start = keys.shape[2] - length
        # Copy, because a view would keep the memory of the whole row.
        self._updated[layer_idx] = (keys[:, :, start:].clone(), values[:, :, start:].clone())
        return keys, values

    def remember(self, real: Tensor, seen: Tensor) -> None:
        """Record `real` and `seen` after the row, with the keys and values of `update`."""
        self.windows_after = LaneWindows(real, seen, self._updated)


class LaneAttentionInputs(AttentionInputs):
    """Inputs of sliding layers for a row of lanes, which they read as a batch of b.

    Args:
        cache: holds the windows before the row.
        cu_seqlens: (N + 1,) boundaries of the sequences of the row.
        The rest as in `AttentionInputs`.
    """

    def __init__(
        self,
        config: FracConfig,
        hidden_states: Tensor,
        mask: Tensor | None,
        cache: LaneCache,
        cu_seqlens: Tensor | None,
    ) -> None:
        assert mask is None and cu_seqlens is not None, "lanes come packed, without padding"
        self.config, self.hidden_states, self.lanes = config, hidden_states, cache
        windows, num = cache.windows, cache.first_sequence.shape[0]
        self.num_tokens, num_before = hidden_states.shape[1] // num, windows.real.shape[1]
        token = torch.arange(hidden_states.shape[1], device=hidden_states.device).view(num, -1)
        ends = cu_seqlens.long()
        sequence = torch.searchsorted(ends, token, right=True) - 1
        continues = sequence == cache.first_sequence[:, None]
        since = token - ends[sequence]
        self.position_ids = since + continues * windows.seen[:, None]
        # Columns are the W - 1 tokens before the row, then those of the row.
        self._column = torch.arange(num_before, num_before + self.num_tokens, device=token.device)
        self._begin = torch.where(continues, 0, self._column - since)
        self._real = torch.cat([windows.real, torch.ones_like(token, dtype=torch.bool)], 1)

    def arguments(
        self, config: Qwen3Config, rotary: Qwen3RotaryEmbedding | None
    ) -> dict[str, dict[str, Any]]:
        found = super().arguments(config, rotary)
        num = self.lanes.first_sequence.shape[0]
        return {name: {**inputs, "lanes": num} for name, inputs in found.items()}

    def _full_mask(self, config: Qwen3Config) -> Any:
        raise ValueError("lanes cannot be carried through full attention, which needs all tokens")

    def _sliding_mask(self, config: Qwen3Config) -> Tensor:
        """(b, 1, T, W - 1 + T), True for keys in the window and in the query's document."""
        implementation, window = config._attn_implementation or "eager", config.sliding_window
        if implementation not in ("sdpa", "eager"):
            raise ValueError(
                "attn_implementation must be 'sdpa' or 'eager' to carry states from batch to "
                f"batch (stateful), got {implementation!r}"
            )
        assert window is not None
        column = torch.arange(self._real.shape[1], device=self._real.device)
        query, begin = self._column[:, None], self._begin[:, :, None]
        visible = (column <= query) & (query - column < window) & (column >= begin)
        visible = (visible & self._real[:, None])[:, None]
        return as_mask(visible, implementation, self.hidden_states.dtype)

    def remember(self) -> None:
        """Record the ends of the lanes in the cache."""
        column = torch.arange(self._real.shape[1], device=self._real.device)
        real = self._real & (column >= self._begin[:, -1:])
        self.lanes.remember(real[:, self.num_tokens :], self.position_ids[:, -1] + 1)
