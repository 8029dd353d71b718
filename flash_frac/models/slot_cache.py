"""A cache of many sequences that come and go: each is a row, and rows are copied one by one.

Tensors of one shape are stacked (L, B, ...), so a few kernels copy a row of all layers, and the
first n rows of a layer are contiguous.
Letters: B rows, L tensors of one shape, S columns of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_frac.layers import MixerState
from flash_frac.models.buffers import BufferedCache, KeyValues
from flash_frac.models.cache import hold_state, read_state, write_state


class SlotCache(BufferedCache):
    """A `BufferedCache` that is allocated once and whose rows are independent sequences.

    Args:
        example: a cache of the same model, with the shapes of one sequence.
        batch_size: B.
        size: columns of the buffers of full-attention layers.

    Attributes:
        stacks: (L, B, ...), the tensors of fixed size, except lengths.
        column_stacks: (L, B, heads, S, channels), keys and values of full-attention layers.

    Example:
        >>> cache = SlotCache(empty_cache(model, 1), batch_size=64, size=4096)
        >>> model(tokens, past_key_values=cache.rows(8))  # the first 8 rows
    """

    def __init__(self, example: BufferedCache, batch_size: int, size: int) -> None:
        super().__init__(example._config, 0, example._examples)
        self._example = example
        self.counts = [0] * batch_size
        with torch.inference_mode(False):
            self.lengths = self.lengths.new_zeros(batch_size)
            fixed = [x for x in example.fixed() if x is not example.lengths]
            self.stacks, layers = _stacks([x.shape[1:] for x in fixed], fixed, batch_size)
            columns = [x for pair in example.full.layers.values() for x in pair]
            shapes = [torch.Size((x.shape[1], size, x.shape[3])) for x in columns]
            self.column_stacks, buffers = _stacks(shapes, columns, batch_size)
        self._hold(layers, buffers)

    def _hold(self, fixed: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
        """Use these tensors for the layers, in the order of `fixed` and `full`."""
        num = 2 * len(self.state_layers)
        pairs = zip(fixed[:num:2], fixed[1:num:2], strict=True)
        for n, (recurrent, conv) in zip(self.state_layers, pairs, strict=True):
            if read_state(self, n) is None:
                # Mark the layer as one that has a state.
                write_state(self, n, MixerState(recurrent[:0], conv[:0]))
            hold_state(self, n, MixerState(recurrent, conv))
        self.rings = _by_layer(self.sliding_layers, fixed[num:])
        others = [n for n in self.attention_layers if n not in self.rings]
        self.full = KeyValues(_by_layer(others, columns))

    def rows(self, num: int) -> SlotCache:
        """The first rows, in the same memory; `counts` is a separate list."""
        view = SlotCache(self._example, 0, 0)
        view.counts, view.lengths = [0] * num, self.lengths[:num]
        view.stacks = [x[:, :num] for x in self.stacks]
        view.column_stacks = [x[:, :num] for x in self.column_stacks]
        fixed = [x[:num] for x in self.fixed() if x is not self.lengths]
        view._hold(fixed, [x[:num] for pair in self.full.layers.values() for x in pair])
        return view

    @torch.no_grad()
    def clear(self) -> None:
        """Empty all rows and fill them with zeros."""
        for x in (*self.stacks, *self.column_stacks, self.lengths):
            x.zero_()
        self.counts = [0] * self.batch_size

    @torch.no_grad()
    def clear_row(self, row: int, num_tokens: int | None = None) -> None:
        """Empty a row and fill it with zeros.

        Args:
            num_tokens: number of tokens in the row; None clears all columns.
        """
        for x in self.stacks:
            x[:, row].zero_()
        for x in self.column_stacks:
            x[:, row, :, :num_tokens].zero_()
        self.lengths[row] = 0

    @torch.no_grad()
    def copy_row(
        self, row: int, source: SlotCache, source_row: int, num_tokens: int | None = None
    ) -> None:
        """Copy a row of another cache.

        Args:
            num_tokens: number of tokens in the source row; None copies all columns.
        """
        for mine, theirs in zip(self.stacks, source.stacks, strict=True):
            mine[:, row].copy_(theirs[:, source_row])
        for mine, theirs in zip(self.column_stacks, source.column_stacks, strict=True):
            mine[:, row, :, :num_tokens].copy_(theirs[:, source_row, :, :num_tokens])
        self.lengths[row].copy_(source.lengths[source_row])

    @property
    def claimed(self) -> int:
        """Bytes of all rows, used or unused."""
        return sum(x.nbytes for x in (*self.stacks, *self.column_stacks))


def _stacks(
    shapes: Sequence[torch.Size], like: Sequence[Tensor], batch_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Stacks (L, B, ...) of zeros, and the part (B, ...) of each tensor in them."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, (shape, x) in enumerate(zip(shapes, like, strict=True)):
        groups.setdefault((shape, x.dtype, x.device), []).append(index)
    stacks, parts = [], [torch.empty(0)] * len(like)
    for found in groups.values():
        stack = like[found[0]].new_zeros(len(found), batch_size, *shapes[found[0]])
        stacks.append(stack)
        for index, part in zip(found, stack, strict=True):
            parts[index] = part
    return stacks, parts


def _by_layer(layers: Sequence[int], parts: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values, which alternate in `parts`, by layer index."""
    return dict(zip(layers, zip(parts[::2], parts[1::2], strict=True), strict=True))
