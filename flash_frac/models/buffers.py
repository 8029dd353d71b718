"""KV cache in buffers of fixed length at fixed addresses, for CUDA graphs of decoding.

Tokens are stored in order and without padding. The token at position p of a sequence is in column p
of a full-attention layer, and in column p mod W, a ring buffer, of a sliding one. The number of
tokens is a tensor, which a graph reads and increments.
Letters: B sequences, T new tokens, S columns of a buffer, W window of sliding layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.layers import MixerState
from flash_frac.models.buffered_attention import (
    attend_by_position,
    attend_causally,
    attend_in_window,
    attend_one,
)
from flash_frac.models.cache import FracCache, read_state, write_state

if TYPE_CHECKING:
    from flash_frac.models.configuration import FracConfig

Pair = tuple[Tensor, Tensor]
# Columns of the smallest buffer.
LEAST_ROOM = 256


def rounded(num_tokens: int) -> int:
    """Round up to 256, 320, 384, 448, 512, 640, ...: four sizes per doubling.

    Buffers and graphs have these sizes, so few are needed and at most a fifth is unused.
    """
    num_tokens = max(num_tokens, LEAST_ROOM)
    unit = (1 << (num_tokens - 1).bit_length()) // 8
    return -(-num_tokens // unit) * unit


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values (B, heads, S, channels) of full-attention layers, by layer index.

    They are only appended to, so an owner with fewer tokens is not affected by later ones.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """S."""
        return next((keys.shape[2] for keys, _ in self.layers.values()), 0)

    def resized(self, size: int) -> KeyValues:
        """A copy in new memory with this many columns."""
        return KeyValues.cat([self], size)

    @staticmethod
    @torch.no_grad()
    def cat(parts: Sequence[KeyValues], size: int, rows: Sequence[int] | None = None) -> KeyValues:
        """All sequences, or those at `rows`, in new memory with this many columns."""

        def joined(found: Sequence[Tensor]) -> Tensor:
            whole = torch.cat([_with_columns(x, size) for x in found])
            return whole if rows is None else whole[torch.as_tensor(rows, device=whole.device)]

        # Tensors created in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            return KeyValues(
                {
                    n: (
                        joined([part.layers[n][0] for part in parts]),
                        joined([part.layers[n][1] for part in parts]),
                    )
                    for n in parts[0].layers
                }
            )


def _with_columns(x: Tensor, size: int) -> Tensor:
    x = x[:, :, :size]
    return F.pad(x, (0, 0, 0, size - x.shape[2]))


class _Tokens(NamedTuple):
    """The new tokens of a forward pass, the same for all layers.

    Attributes:
        before, after: (B,), real tokens of every sequence before and after the pass.
        positions: (B, T), number of real tokens before each.
        order: (B, 1, T, 1), indices of the real tokens, then of padding; None without padding, or
            for a single token.
    """

    before: Tensor
    after: Tensor
    positions: Tensor
    order: Tensor | None

    def to(self, device: torch.device) -> _Tokens:
        return _Tokens(*(None if x is None else x.to(device) for x in self))  # pyright: ignore


class BufferedCache(FracCache):
    """A cache for inference, whose tensors keep their addresses until `reserve` reallocates them.

    The caller of the model reserves room before and counts on the host after, because replaying a
    graph runs no Python:

        cache.reserve(T); model(ids, past_key_values=cache); cache.took([T] * B)

    Args:
        config: the model's configuration.
        batch_size: B.
        examples: by attention layer index, a tensor with the dtype and device of its keys.

    Attributes:
        counts: tokens of every sequence, on the host; `lengths`, (B,), is the same on the device.
        full: keys and values of full-attention layers, possibly shared with other caches.
        rings: by sliding layer index, keys and values (B, heads, W, channels).
        fixed_room: columns that tokens attend to, even if fewer are in use, so that one graph
            serves all lengths up to this; None depends on the longest sequence.
    """

    fixed_room: int | None = None

    def __init__(
        self, config: FracConfig, batch_size: int, examples: Mapping[int, Tensor] | None = None
    ) -> None:
        super().__init__(config)
        self._config = config
        self.counts = [0] * batch_size
        with torch.inference_mode(False):
            self._examples = {n: x.detach().new_empty(0) for n, x in (examples or {}).items()}
            device = next((x.device for x in self._examples.values()), None)
            self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
            self.rings = {n: self._blank(n, self.window or 0) for n in self.sliding_layers}
            others = [n for n in self.attention_layers if n not in self.rings]
            self.full = KeyValues({n: self._blank(n, 0) for n in others})
        self._tokens: _Tokens | None = None

    def _blank(self, layer_idx: int, size: int) -> Pair:
        config, example = self._config, self._examples[layer_idx]
        heads = config.attention_key_value_heads or config.num_attention_heads
        channels = config.attention_head_dim or config.hidden_size // config.num_attention_heads
        sizes = (self.batch_size, heads, size, channels)
        return example.new_zeros(sizes), example.new_zeros(sizes)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.counts)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest sequence."""
        return self.longest

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.counts)

    @property
    def room(self) -> int:
        """Columns that a step reads for one more token; 0 without attention layers."""
        if not self.attention_layers:
            return 0
        size = self.full.size if self.full.layers else self.window or 0
        wanted = rounded(self.longest + 1) if self.fixed_room is None else self.fixed_room
        return min(wanted, size)

    def signature(self, num_tokens: int) -> tuple[int, ...]:
        """Host values that a pass over T tokens depends on; each needs its own graph."""
        if num_tokens == 1 or not self.attention_layers:
            return (self.room,)
        return (self.longest, min(self.counts) == self.longest)

    def reserve(self, num_tokens: int, *, size: int | None = None) -> bool:
        """Make room for this many more tokens; return whether that reallocated memory.

        Args:
            size: number of columns after that; by default the required number, rounded up.
        """
        needed = self.longest + num_tokens
        if not self.full.layers or self.full.size >= needed:
            return False
        self.full = self.full.resized(size or rounded(needed))
        return True

    def took(self, counts: Sequence[int]) -> None:
        """Count this many more tokens on the host; the device has already counted them."""
        self.counts = [n + new for n, new in zip(self.counts, counts, strict=True)]

    def fixed(self) -> list[Tensor]:
        """The tensors of fixed size: states, windows, ring buffers and lengths."""
        rings = [x for pair in self.rings.values() for x in pair]
        return [*self.tensors(), *rings, self.lengths]

    @property
    def nbytes(self) -> int:
        """Bytes of states and ring buffers, and of the keys and values of the tokens held."""
        fixed = sum(x.nbytes for x in self.fixed() if x is not self.lengths)
        columns = (x[:, :, : self.longest] for pair in self.full.layers.values() for x in pair)
        return fixed + sum(x.nbytes for x in columns)

    def clear(self) -> None:
        """Empty the cache, keeping its memory."""
        torch._foreach_zero_(self.fixed())  # pyright: ignore[reportPrivateImportUsage]
        self.counts = [0] * self.batch_size

    def follow(self, source: BufferedCache) -> None:
        """Share the `full` keys and values of another cache, and copy its counts."""
        self.full, self.counts = source.full, list(source.counts)

    @torch.no_grad()
    def copy_fixed(self, source: BufferedCache) -> None:
        """Copy all device tensors but `full` from a cache with the same layers and batch."""
        pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for mine, theirs in zip(self.fixed(), source.fixed(), strict=True):
            # One kernel for each dtype, if the device supports it.
            mine_too, theirs_too = pairs.setdefault((mine.dtype, mine.device), ([], []))
            mine_too.append(mine)
            theirs_too.append(theirs)
        for mine, theirs in pairs.values():
            torch._foreach_copy_(mine, theirs)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def like(self, batch_size: int) -> BufferedCache:
        """An empty cache of the same model."""
        other = BufferedCache(self._config, batch_size, self._examples)
        with torch.inference_mode(False):
            for n in self.state_layers:
                parts = [x.new_zeros(batch_size, *x.shape[1:]) for x in read_state(self, n) or ()]
                write_state(other, n, MixerState(*parts))
        return other

    def copy(self) -> BufferedCache:
        """A cache with the same tokens, which shares the keys and values of `full`."""
        other = self.like(self.batch_size)
        other.copy_fixed(self)
        other.follow(self)
        return other

    @staticmethod
    @torch.no_grad()
    def cat(caches: Sequence[BufferedCache], rows: Sequence[int] | None = None) -> BufferedCache:
        """Join the sequences of caches, all or those at `rows`, in new memory."""
        counts = [n for cache in caches for n in cache.counts]
        rows = range(len(counts)) if rows is None else rows
        other = caches[0].like(len(rows))
        for mine, *theirs in zip(other.fixed(), *(x.fixed() for x in caches), strict=True):
            mine.copy_(torch.cat(theirs)[torch.as_tensor(rows, device=mine.device)])
        other.counts = [counts[n] for n in rows]
        parts = [cache.full for cache in caches]
        other.full = KeyValues.cat(parts, rounded(other.longest), rows)
        return other

    def begin(self, num_tokens: int, mask: Tensor | None) -> Tensor:
        """Positions (B, T) of the next T tokens; padding gets that of the next real token.

        Args:
            mask: (B, T), 0 at padding; None without padding.
        """
        if self.full.layers and self.longest + num_tokens > self.full.size:
            raise ValueError(
                f"the buffers have room for {self.full.size} tokens and hold {self.longest}; call "
                f"reserve({num_tokens}) before the model"
            )
        before, order = self.lengths, None
        if mask is None:
            positions = before[:, None] + torch.arange(num_tokens, device=before.device)
            after = before + num_tokens
        else:
            real = mask.to(before.device).ne(0).long()
            positions = before[:, None] + real.cumsum(1) - real
            after = before + real.sum(1)
            if num_tokens > 1:
                order = real.argsort(dim=1, descending=True, stable=True)[:, None, :, None]
        self._tokens = _Tokens(before, after, positions, order)
        return positions

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Store k, v (B, heads, T, channels) of a layer; return attention of q (B, H, T, ..)."""
        assert self._tokens is not None
        ring = self.rings.get(layer_idx)
        buffers = self.full.layers[layer_idx] if ring is None else ring
        # The device differs in a model on several devices, the dtype under autocast.
        tokens, dtype = self._tokens.to(k.device), buffers[0].dtype
        rows, new = q.to(dtype), (k.to(dtype), v.to(dtype))
        if tokens.order is not None:
            new = _at(new, tokens.order)
        if k.shape[2] == 1:
            y = self._attend_one(rows, new, buffers, tokens, scaling)
        elif ring is None:
            y = self._attend_all(rows, new, buffers, tokens, scaling)
        else:
            y = self._attend_window(rows, new, buffers, tokens, scaling)
        return y.to(q.dtype)

    def _attend_one(
        self, q: Tensor, new: Pair, buffers: Pair, tokens: _Tokens, scaling: float
    ) -> Tensor:
        size = buffers[0].shape[2]
        # In a ring buffer, the new column replaces the token that just left the window. Nothing
        # sees what padding writes, and the next token overwrites it.
        _write(buffers, tokens.positions % size, new)
        seen = min(self.room, size)
        k, v = (x[:, :, :seen] for x in buffers)
        return attend_one(q, k, v, tokens.positions, scaling)

    def _attend_all(
        self, q: Tensor, new: Pair, buffers: Pair, tokens: _Tokens, scaling: float
    ) -> Tensor:
        begin, end = self.longest, self.longest + q.shape[2]
        if self.fixed_room is not None:
            end = self.room
        k, v = (x[:, :, :end] for x in buffers)
        if self._all_alike(tokens):
            k[:, :, begin:], v[:, :, begin:] = new
            return attend_causally(q, k, v, scaling)
        columns = torch.arange(end, device=q.device)[None]
        # Padding goes after the real tokens, where nothing sees it.
        _write(buffers, tokens.before[:, None] + columns[:, : q.shape[2]], new)
        return attend_by_position(q, k, v, tokens.positions, columns, scaling)

    def _attend_window(
        self, q: Tensor, new: Pair, ring: Pair, tokens: _Tokens, scaling: float
    ) -> Tensor:
        window = ring[0].shape[2]
        columns = torch.arange(window, device=q.device)
        # Unroll the ring and append the new tokens: column c is position before - window + c.
        start = tokens.before[:, None]
        inside = _at(ring, _index((start + columns) % window))
        k, v = (torch.cat(pair, 2) for pair in zip(inside, new, strict=True))
        if self._all_alike(tokens):
            unused = window - min(self.longest, window - 1)
            y = attend_in_window(q, k[:, :, unused:], v[:, :, unused:], scaling, window)
        else:
            positions = start - window + torch.arange(k.shape[2], device=q.device)
            y = attend_by_position(q, k, v, tokens.positions, positions, scaling, window)
        last = tokens.after[:, None] - 1
        latest = last - (last - columns) % window
        for mine, found in zip(ring, _at((k, v), _index(latest - start + window)), strict=True):
            mine.copy_(found)
        return y

    def _all_alike(self, tokens: _Tokens) -> bool:
        """Whether all sequences have equal lengths, before and after, in every replay."""
        alike = tokens.order is None and min(self.counts) == self.longest
        return alike and self.fixed_room is None

    def count(self, num_tokens: int) -> None:
        """Count on the device, for the next pass."""
        if self._tokens is not None:
            self.lengths.copy_(self._tokens.after)
            self._tokens = None


def _index(columns: Tensor) -> Tensor:
    """Columns (B, S) as an index of buffers (B, heads, S, channels)."""
    return columns[:, None, :, None]


def _at(pair: Pair, index: Tensor) -> Pair:
    return pair[0].take_along_dim(index, 2), pair[1].take_along_dim(index, 2)


def _write(buffers: Pair, columns: Tensor, new: Pair) -> None:
    """Write new keys and values (B, heads, T, channels) to columns (B, T), all different."""
    for mine, x in zip(buffers, new, strict=True):
        mine.scatter_(2, _index(columns).expand_as(x), x)
