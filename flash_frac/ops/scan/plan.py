"""The list of chunks that the scan's kernels walk along, and the grids of a call.

All sequences of a call, packed or batched, are cut into chunks of C tokens, in one list. A chunk
that begins a sequence takes that sequence's initial state, so a walk along the list may cross from
one sequence into the next. A segment is a run of chunks that one program walks for one head and one
block of channels.

Letters: B batch, T time, H heads, M modes, BM their block, D head channels, N chunks, S segments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.scan.tuning import Tuning, Walk, tuning_for

# Tokens of a chunk, and how often it can be halved.
CHUNK = 32
LEVELS = 5


@triton.jit
def locate_chunk(i_chunk, p_table, num_tokens, chunks_each, C: tl.constexpr, LAYOUT: tl.constexpr):
    """Sequence, first row, number of tokens, and whether the chunk is the first and the last.

    LAYOUT is "packed" if a table has them, "whole" if all chunks have C tokens, else "ragged".
    """
    if LAYOUT == "packed":
        p_entry = p_table + i_chunk * 5
        sequence, row, length = tl.load(p_entry), tl.load(p_entry + 1), tl.load(p_entry + 2)
        first, last = tl.load(p_entry + 3) != 0, tl.load(p_entry + 4) != 0
    else:
        sequence, index = i_chunk // chunks_each, i_chunk % chunks_each
        if LAYOUT == "whole":
            # A compile-time constant that needs no division: loads start early, unmasked.
            row, length = i_chunk * C, C
        else:
            row = sequence * num_tokens + index * C
            length = tl.minimum(num_tokens - index * C, C)
        first, last = index == 0, index == chunks_each - 1
    return sequence, row, length, first, last


class ChunkList(NamedTuple):
    """Number and positions of the chunks: by arithmetic, or by a table for packed sequences.

    table: (num_chunks, 5) int64 of sequence, row, length, first, last; None without packing.
    starts: (N,) int64, the first chunk of every packed sequence; size: tokens of a chunk.
    """

    num_chunks: int
    chunks_each: int
    num_tokens: int
    table: Tensor | None
    starts: Tensor | None
    size: int

    @property
    def layout(self) -> str:
        """The LAYOUT of `locate_chunk`."""
        if self.table is not None:
            return "packed"
        return "ragged" if self.num_tokens % self.size else "whole"

    @property
    def arguments(self) -> tuple:
        """Arguments of `locate_chunk` after the index, without its constants."""
        return self.table, self.num_tokens, self.chunks_each


def count_chunks(batch: int, num_tokens: int, cu_seqlens: Tensor | None, size: int = CHUNK) -> int:
    """Maximum number of chunks of a call; packed sequences may leave some empty."""
    if cu_seqlens is None:
        return batch * ceil_div(num_tokens, size)
    return num_tokens // size + cu_seqlens.shape[0] - 1


def chunk_list(
    batch: int, num_tokens: int, cu_seqlens: Tensor | None, size: int = CHUNK
) -> ChunkList:
    """The chunks of a call, of `size` tokens; nothing is read back from the device."""
    num_chunks = count_chunks(batch, num_tokens, cu_seqlens, size)
    if cu_seqlens is None:
        return ChunkList(num_chunks, num_chunks // batch, num_tokens, None, None, size)
    bounds = cu_seqlens.long()
    length = bounds.diff()
    chunks = ((length + size - 1) // size).clamp_min(1)
    after = chunks.cumsum(0)
    before = after - chunks
    chunk = torch.arange(num_chunks, device=bounds.device)
    sequence = torch.searchsorted(before, chunk, right=True) - 1
    index = chunk - before[sequence]
    row = bounds[sequence] + index * size
    tokens = (length[sequence] - index * size).clamp(0, size)
    # Chunks left over at the end carry no token and belong to the last sequence.
    last = chunk == torch.where(sequence == len(length) - 1, num_chunks, after[sequence]) - 1
    table = torch.stack([sequence, row, tokens, (index == 0).long(), last.long()], 1)
    return ChunkList(num_chunks, 0, num_tokens, table, before, size)


class Launch(NamedTuple):
    """The grid of a walk, and its constants and launch options by name."""

    grid: tuple[int, int, int]
    options: dict[str, Any]


class Plan(NamedTuple):
    """Kernel parameters that follow from the sizes of a call.

    per_segment: chunks of a segment; modes: BM; mix: constants of both kernels in `mix.py`;
    states, output, gradient: the three walks.
    """

    per_segment: int
    num_segments: int
    modes: int
    tuning: Tuning
    mix: dict[str, Any]
    states: Launch
    output: Launch
    gradient: Launch


def _segments(num_chunks: int, heads: int, channels: int, tuning: Tuning) -> tuple[int, int]:
    """Chunks of a segment, and the number of segments."""
    walks = num_chunks * heads * ceil_div(channels, tuning.output.channels)
    per_segment = ceil_div(walks, tuning.programs)
    return per_segment, ceil_div(num_chunks, per_segment)


@lru_cache(maxsize=1024)
def _plan(
    num_chunks: int,
    heads: int,
    channels: int,
    num_modes: int,
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """Cached, because computing it in Python takes as long as a launch."""
    tuning = tuning_for(dtype, device)
    per_segment, num_segments = _segments(num_chunks, heads, channels, tuning)
    modes = block_size(num_modes)
    shared = {"M": num_modes, "BM": modes, "C": CHUNK, "LAYOUT": layout}
    shared["PRECISION"] = precision(dtype)

    def launch(walk: Walk) -> Launch:
        width = min(block_size(channels), walk.channels)
        options = {"BD": width, "num_warps": walk.warps, "num_stages": walk.stages}
        return Launch((num_segments, heads, ceil_div(channels, width)), shared | options)

    walks = (tuning.states, tuning.output, tuning.gradient)
    mix = shared | {"LEVELS": LEVELS}
    return Plan(per_segment, num_segments, modes, tuning, mix, *map(launch, walks))


def plan_for(u: Tensor, num_modes: int, chunks: ChunkList) -> Plan:
    """The plan for inputs like u (B, T, H, D)."""
    sizes = (chunks.num_chunks, *u.shape[2:], num_modes)
    return _plan(*sizes, chunks.layout, u.dtype, u.device)


def forget_plans() -> None:
    """Clear cached plans, after a change of tuning."""
    _plan.cache_clear()


def precision(dtype: torch.dtype) -> str:
    """Precision of matrix products: full for float32 inputs, lower for 16-bit inputs."""
    return "ieee" if dtype == torch.float32 else "tf32"


def state_shape(u: Tensor, num_modes: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """(N, H, M, D), for N sequences."""
    num = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return num, u.shape[2], num_modes, u.shape[3]


def kept_shapes(u: Tensor, num_modes: int, cu_seqlens: Tensor | None) -> list[tuple[int, ...]]:
    """Shapes of the tensors saved for the backward pass; sizes may be symbolic."""
    heads, channels = u.shape[2:]
    num_chunks, modes = count_chunks(u.shape[0], u.shape[1], cu_seqlens), block_size(num_modes)
    _, num_segments = _segments(num_chunks, heads, channels, tuning_for(u.dtype, u.device))
    weights = (num_chunks, heads, CHUNK, modes)
    return [
        (num_segments, heads, modes, channels),
        (num_chunks, heads, CHUNK, CHUNK),
        weights,
        weights,
        (num_chunks, heads, modes),
    ]
