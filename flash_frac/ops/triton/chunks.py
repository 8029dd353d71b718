"""The list of chunks that the scan kernels walk over, and device functions they share.

All sequences of a call, packed or in a batch, are cut into chunks of C tokens, which lie one after
the other in one list. A chunk that begins a sequence takes the initial state of it, so that a walk
along the list may cross from one sequence into the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.triton.launch import ceil_div

# Tokens of a chunk, and how often it can be halved.
CHUNK = 32
LEVELS = 5


@triton.jit
def chunk_place(i_chunk, table, num_tokens, chunks_each, C: tl.constexpr, PACKED: tl.constexpr):
    """Sequence, first row, number of tokens, and whether the chunk is the first, and the last."""
    if PACKED:
        entry = table + i_chunk * 5
        sequence, row, length = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        first, last = tl.load(entry + 3) != 0, tl.load(entry + 4) != 0
    else:
        sequence, index = i_chunk // chunks_each, i_chunk % chunks_each
        row = sequence * num_tokens + index * C
        length = tl.minimum(num_tokens - index * C, C)
        first, last = index == 0, index == chunks_each - 1
    return sequence, row, length, first, last


class ChunkList(NamedTuple):
    """How many chunks there are, and where: by arithmetic, or by a table for packed sequences.

    table: (num_chunks, 5) int64 of sequence, row, length, first, last; None without packing.
    """

    num_chunks: int
    chunks_each: int
    num_tokens: int
    table: Tensor | None

    @property
    def arguments(self) -> tuple:
        """What `chunk_place` takes after the index, without its constants."""
        return self.table, self.num_tokens, self.chunks_each


def count_chunks(batch: int, num_tokens: int, cu_seqlens: Tensor | None) -> int:
    """How many chunks a call has at most; packed sequences may leave some empty."""
    if cu_seqlens is None:
        return batch * ceil_div(num_tokens, CHUNK)
    return num_tokens // CHUNK + cu_seqlens.shape[0] - 1


def chunk_list(batch: int, num_tokens: int, cu_seqlens: Tensor | None) -> ChunkList:
    """The chunks of a call; nothing is read back from the device."""
    num_chunks = count_chunks(batch, num_tokens, cu_seqlens)
    if cu_seqlens is None:
        return ChunkList(num_chunks, num_chunks // batch, num_tokens, None)
    bounds = cu_seqlens.long()
    length = bounds.diff()
    chunks = ((length + CHUNK - 1) // CHUNK).clamp_min(1)
    after = chunks.cumsum(0)
    before = after - chunks
    chunk = torch.arange(num_chunks, device=bounds.device)
    sequence = torch.searchsorted(before, chunk, right=True) - 1
    index = chunk - before[sequence]
    row = bounds[sequence] + index * CHUNK
    tokens = (length[sequence] - index * CHUNK).clamp(0, CHUNK)
    # Chunks left over at the end carry no token and belong to the last sequence.
    last = chunk == torch.where(sequence == len(length) - 1, num_chunks, after[sequence]) - 1
    table = torch.stack([sequence, row, tokens, (index == 0).long(), last.long()], 1)
    return ChunkList(num_chunks, 0, num_tokens, table)
