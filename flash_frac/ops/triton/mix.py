"""Mixing weights inside chunks: what depends on no channel, forward and backward.

For a chunk of C tokens, `mix_kernel` makes, in the dtype of u unless noted,

    gamma[t, k]     = sum_m read[t, m] write[k, m] exp(sum of log_decay over k < p <= t)     t >= k
    read_in[t, m]   = read[t, m] exp(sum over p <= t)           reads the state before the chunk
    write_out[k, m] = write[k, m] exp(sum over p > k)           writes the state after the chunk
    total[m]        = sum over the chunk, float32

A pair t > k is split at the boundary between the two halves of the smallest aligned block that
holds both: k has the sum up to the end of the earlier half, t the sum from the start of the later
one. Both are <= 0, each level (halves of 1, 2, 4, ... tokens) is one matrix product, and a token
needs one exponential a level and mode instead of one a pair. The sums are products with 0-1 masks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.triton.chunks import CHUNK, LEVELS, ChunkList, chunk_place


@triton.jit
def _to_boundary(b_decay, o_t, o_xor, level, PRECISION: tl.constexpr):
    """Which tokens are in later halves, and exp of the sums between tokens and the boundary."""
    later = ((o_t >> level) & 1) == 1
    same_half = (o_xor >> level) == 0
    m_sum = same_half & ((o_t[None, :] <= o_t[:, None]) == later[:, None])
    b_sum = tl.dot(tl.where(m_sum, 1.0, 0.0), b_decay, input_precision=PRECISION)
    return later, tl.exp(b_sum)


@triton.jit
def mix_kernel(
    read,
    write,
    log_decay,
    gamma,
    read_in,
    write_out,
    total,
    table,
    num_tokens,
    chunks_each,
    H,
    M: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_chunk, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, length, _, _ = chunk_place(i_chunk, table, num_tokens, chunks_each, C, PACKED)
    o_t, o_m = tl.arange(0, C), tl.arange(0, BM)
    o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * M + o_m
    m_m = (o_m < M)[None, :]
    m_x = (o_t < length)[:, None] & m_m
    # [C, BM]
    b_read = tl.load(read + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_write = tl.load(write + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_decay = tl.load(log_decay + o_x, mask=m_x, other=0.0)
    m_next = (o_t + 1 < length)[:, None] & m_m
    b_next = tl.load(log_decay + o_x + H * M, mask=m_next, other=0.0)

    i_place = i_chunk * H + i_h
    o_place = i_place * C * BM + o_t[:, None] * BM + o_m
    b_in = b_read * tl.exp(tl.cumsum(b_decay, 0))
    b_out = b_write * tl.exp(tl.cumsum(b_next, 0, reverse=True))
    tl.store(read_in + o_place, b_in.to(read_in.dtype.element_ty))
    tl.store(write_out + o_place, b_out.to(write_out.dtype.element_ty))
    tl.store(total + i_place * BM + o_m, tl.sum(b_decay, 0))

    # [C, C]
    b_same = tl.sum(b_read * b_write, 1)
    b_gamma = tl.where(o_t[:, None] == o_t[None, :], b_same[:, None], 0.0)
    # Bits in which two places differ: the highest says at which level the pair is split.
    o_xor = o_t[:, None] ^ o_t[None, :]
    for level in range(LEVELS):
        later, b_decayed = _to_boundary(b_decay, o_t, o_xor, level, PRECISION)
        b_q = tl.where(later[:, None], b_read * b_decayed, 0.0)
        b_k = tl.where(later[:, None], 0.0, b_write * b_decayed)
        b_pairs = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_gamma += tl.where((o_xor >> level) == 1, b_pairs, 0.0)
    o_gamma = i_place * C * C + o_t[:, None] * C + o_t[None, :]
    tl.store(gamma + o_gamma, b_gamma.to(gamma.dtype.element_ty))


@triton.jit
def mix_backward_kernel(
    read,
    write,
    log_decay,
    products,
    read_state,
    write_state,
    across,
    dread,
    dwrite,
    dlog_decay,
    table,
    num_tokens,
    chunks_each,
    num_places,
    H,
    M: tl.constexpr,
    BM: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_chunk, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, length, _, _ = chunk_place(i_chunk, table, num_tokens, chunks_each, C, PACKED)
    o_t, o_m = tl.arange(0, C), tl.arange(0, BM)
    o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * M + o_m
    m_m = (o_m < M)[None, :]
    m_x = (o_t < length)[:, None] & m_m
    # [C, BM]
    b_read = tl.load(read + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_write = tl.load(write + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_decay = tl.load(log_decay + o_x, mask=m_x, other=0.0)
    m_next = (o_t + 1 < length)[:, None] & m_m
    b_next = tl.load(log_decay + o_x + H * M, mask=m_next, other=0.0)

    # Sums over the blocks of channels.
    i_place = i_chunk * H + i_h
    o_place = o_t[:, None] * BM + o_m
    o_pair = o_t[:, None] * C + o_t[None, :]
    b_in, b_out = tl.zeros([C, BM], dtype=tl.float32), tl.zeros([C, BM], dtype=tl.float32)
    b_pair = tl.zeros([C, C], dtype=tl.float32)
    b_across = tl.zeros([BM], dtype=tl.float32)
    for p in tl.static_range(PARTS):
        part = i_place + p * num_places
        b_in += tl.load(read_state + part * C * BM + o_place)
        b_out += tl.load(write_state + part * C * BM + o_place)
        b_pair += tl.load(products + part * C * C + o_pair).to(tl.float32)
        b_across += tl.load(across + part * BM + o_m)

    # Reads of the state before the chunk, writes to the one after it, and what crosses it all. A
    # log_decay scales every path from a write before it to a read at it or after it.
    b_in *= tl.exp(tl.cumsum(b_decay, 0))
    b_out *= tl.exp(tl.cumsum(b_next, 0, reverse=True))
    b_across *= tl.exp(tl.sum(b_decay, 0))
    b_before = tl.where(o_t[:, None] > o_t[None, :], 1.0, 0.0)
    b_ddecay = tl.dot(1.0 - b_before, b_read * b_in, input_precision=PRECISION)
    b_ddecay += tl.dot(b_before, b_write * b_out, input_precision=PRECISION) + b_across[None, :]
    b_same = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_pair, 0.0), 1)[:, None]
    b_dread, b_dwrite = b_in + b_same * b_write, b_out + b_same * b_read
    # [C, C], pairs of a later read and an earlier write, both ways round.
    b_pair = tl.where(o_t[:, None] > o_t[None, :], b_pair, 0.0)
    b_turned = tl.trans(b_pair)
    o_xor = o_t[:, None] ^ o_t[None, :]
    for level in range(LEVELS):
        later, b_decayed = _to_boundary(b_decay, o_t, o_xor, level, PRECISION)
        b_q = tl.where(later[:, None], b_read * b_decayed, 0.0)
        b_k = tl.where(later[:, None], 0.0, b_write * b_decayed)
        m_split = (o_xor >> level) == 1
        b_some = tl.where(m_split, b_pair, 0.0)
        b_read_part = tl.dot(b_some, b_k, input_precision=PRECISION) * b_decayed
        b_some = tl.where(m_split, b_turned, 0.0)
        b_write_part = tl.dot(b_some, b_q, input_precision=PRECISION) * b_decayed
        b_dread += b_read_part
        b_dwrite += b_write_part
        # The mask of `_to_boundary`, turned.
        m_sum = ((o_xor >> level) == 0) & ((o_t[:, None] <= o_t[None, :]) == later[:, None])
        b_terms = b_read * b_read_part + b_write * b_write_part
        b_ddecay += tl.dot(tl.where(m_sum, 1.0, 0.0), b_terms, input_precision=PRECISION)
    tl.store(dread + o_x, b_dread.to(dread.dtype.element_ty), mask=m_x)
    tl.store(dwrite + o_x, b_dwrite.to(dwrite.dtype.element_ty), mask=m_x)
    tl.store(dlog_decay + o_x, b_ddecay, mask=m_x)


def mix(
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    chunks: ChunkList,
    *,
    dtype: torch.dtype,
    modes: int,
    warps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gamma (N, H, C, C), read_in and write_out (N, H, C, BM), total (N, H, BM), N chunks."""
    heads, num_modes = read.shape[-2:]
    places = (chunks.num_chunks, heads)
    gamma = read.new_empty(*places, CHUNK, CHUNK, dtype=dtype)
    read_in = read.new_empty(*places, CHUNK, modes, dtype=dtype)
    write_out, total = (
        torch.empty_like(read_in),
        read.new_empty(*places, modes, dtype=torch.float32),
    )
    mix_kernel[places](
        read,
        write,
        log_decay,
        gamma,
        read_in,
        write_out,
        total,
        *chunks.arguments,
        heads,
        M=num_modes,
        BM=modes,
        C=CHUNK,
        LEVELS=LEVELS,
        PACKED=chunks.table is not None,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=warps,
    )
    return gamma, read_in, write_out, total


def mix_backward(
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    products: Tensor,
    read_state: Tensor,
    write_state: Tensor,
    across: Tensor,
    chunks: ChunkList,
    *,
    warps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of read, write and log_decay, from partial results (P, N, H, ...) of the walk."""
    heads, num_modes = read.shape[-2:]
    dread, dwrite, dlog_decay = (torch.empty_like(x) for x in (read, write, log_decay))
    mix_backward_kernel[(chunks.num_chunks, heads)](
        read,
        write,
        log_decay,
        products,
        read_state,
        write_state,
        across,
        dread,
        dwrite,
        dlog_decay,
        *chunks.arguments,
        chunks.num_chunks * heads,
        heads,
        M=num_modes,
        BM=across.shape[-1],
        C=CHUNK,
        LEVELS=LEVELS,
        PARTS=products.shape[0],
        PACKED=chunks.table is not None,
        PRECISION="ieee" if products.dtype == torch.float32 else "tf32",
        num_warps=warps,
    )
    return dread, dwrite, dlog_decay
