"""Mixing weights inside chunks, which depend on no channel, forward and backward.

For a chunk of C tokens, `mix_kernel` computes, in the dtype of u unless noted,

    gamma[t, k]     = sum_m read[t, m] write[k, m] exp(sum of log_decay over k < p <= t)     t >= k
    read_in[t, m]   = read[t, m] exp(sum over p <= t)           reads the state before the chunk
    write_out[k, m] = write[k, m] exp(sum over p > k)           writes the state after the chunk
    total[m]        = sum over the chunk, float32

A pair t > k is split at the boundary between the two halves of the smallest aligned block that
holds both: k has the sum up to the end of the earlier half, t the sum from the start of the later
one. Both are <= 0, each level (halves of 1, 2, 4, ... tokens) is one matrix product, and a token
needs one exponential per level and mode instead of one per pair. The sums of a level are those of
the level below plus the total of the other half: no differences of larger sums.

Letters: N chunks of C tokens, H heads, M modes in blocks BM, P blocks of channels. i_ch numbers
chunk and head together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import exp
from flash_frac.ops.scan.plan import locate_chunk

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _unit(PRECISION: tl.constexpr):
    """Factor that turns log_decay into an exponent of e, or of 2 as the hardware computes it."""
    return 1.0 if PRECISION == "ieee" else LOG2_E


@triton.jit
def _power(b_x, PRECISION: tl.constexpr):
    """exp of x in that unit: approximate for tf32, else accurate to the last digit."""
    return exp(b_x) if PRECISION == "ieee" else tl.exp2(b_x)


@triton.jit
def _double(b_total, b_prefix, b_suffix, LEVEL: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """From blocks of 2^LEVEL tokens to blocks twice as long.

    b_total [C >> LEVEL, BM]: sum of a block; b_prefix, b_suffix [C, BM]: sums from the start of the
    block up to a token, and from after the token to the end.
    """
    N: tl.constexpr = C >> (LEVEL + 1)
    later = tl.arange(0, 2) == 1
    b_halves = tl.reshape(b_total, [N, 2, BM])
    b_first = tl.sum(tl.where(later[None, :, None], 0.0, b_halves), 1)
    b_second = tl.sum(tl.where(later[None, :, None], b_halves, 0.0), 1)
    b_prefix = tl.reshape(b_prefix, [N, 2, 1 << LEVEL, BM])
    b_suffix = tl.reshape(b_suffix, [N, 2, 1 << LEVEL, BM])
    b_prefix += tl.where(later[None, :, None, None], b_first[:, None, None, :], 0.0)
    b_suffix += tl.where(later[None, :, None, None], 0.0, b_second[:, None, None, :])
    return b_first + b_second, tl.reshape(b_prefix, [C, BM]), tl.reshape(b_suffix, [C, BM])


@triton.jit
def _halve(b_total, b_prefix, b_suffix, LEVEL: tl.constexpr, C: tl.constexpr, BM: tl.constexpr):
    """Gradients of the inputs of `_double`, from those of its outputs."""
    N: tl.constexpr = C >> (LEVEL + 1)
    later = (tl.arange(0, 2) == 1)[None, :, None]
    b_prefixes = tl.sum(tl.reshape(b_prefix, [N, 2, 1 << LEVEL, BM]), 2)
    b_suffixes = tl.sum(tl.reshape(b_suffix, [N, 2, 1 << LEVEL, BM]), 2)
    b_first = b_total + tl.sum(tl.where(later, b_prefixes, 0.0), 1)
    b_second = b_total + tl.sum(tl.where(later, 0.0, b_suffixes), 1)
    b_halves = tl.where(later, b_second[:, None, :], b_first[:, None, :])
    return tl.reshape(b_halves, [2 * N, BM]), b_prefix, b_suffix


@triton.jit
def _split(b_read, b_write, b_prefix, b_suffix, o_t, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """Reads of later halves and writes of earlier ones, decayed to the boundary; 0 elsewhere."""
    later = (((o_t >> LEVEL) & 1) == 1)[:, None]
    b_decayed = _power(tl.where(later, b_prefix, b_suffix), PRECISION)
    b_q = tl.where(later, b_read * b_decayed, 0.0)
    b_k = tl.where(later, 0.0, b_write * b_decayed)
    return later, b_decayed, b_q, b_k


class Weights(NamedTuple):
    """read, write (B, T, H, M) and log_decay, float32: inputs of the scan, or their gradients."""

    read: Tensor
    write: Tensor
    log_decay: Tensor


@triton.jit
def _program(
    p_table, num_tokens, chunks_each, H,
    M: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Tokens and modes of this program's chunk and head, its index, offsets [C, BM] and mask."""
    i_chunk, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, length, _, _ = locate_chunk(i_chunk, p_table, num_tokens, chunks_each, C, LAYOUT)
    o_t, o_m = tl.arange(0, C), tl.arange(0, BM)
    o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * M + o_m
    m_x = (o_t < length)[:, None] & (o_m < M)[None, :]
    return o_t, o_m, i_chunk * H + i_h, o_x, m_x


@triton.jit
def _load_weights(p_weights, o_x, m_x, PRECISION: tl.constexpr):
    """read, write and log_decay [C, BM], float32, the last times `_unit`."""
    b_read = tl.load(p_weights.read + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_write = tl.load(p_weights.write + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_decay = tl.load(p_weights.log_decay + o_x, mask=m_x, other=0.0) * _unit(PRECISION)
    return b_read, b_write, b_decay


@triton.jit(do_not_specialize=["num_tokens", "chunks_each"])
def mix_kernel(
    p_weights, p_mix, p_table, num_tokens, chunks_each, H,
    M: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gamma, read_in, write_out and total of one chunk and head, by the formulas above.

    p_weights a `Weights` of inputs; p_mix a `walk.Mix`.
    """
    o_t, o_m, i_ch, o_x, m_x = _program(p_table, num_tokens, chunks_each, H, M, BM, C, LAYOUT)
    b_read, b_write, b_decay = _load_weights(p_weights, o_x, m_x, PRECISION)

    # [C, C]
    b_same = tl.sum(b_read * b_write, 1)
    b_gamma = tl.where(o_t[:, None] == o_t[None, :], b_same[:, None], 0.0)
    # Bits in which two positions differ: the highest gives the level at which the pair is split.
    o_xor = o_t[:, None] ^ o_t[None, :]
    b_total, b_prefix, b_suffix = b_decay, b_decay, tl.zeros_like(b_decay)
    for level in tl.static_range(LEVELS):
        later, _, b_q, b_k = _split(b_read, b_write, b_prefix, b_suffix, o_t, level, PRECISION)
        b_pairs = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        # The last product has no other pairs. Its earlier rows are 0, but NaN if a token is NaN;
        # masking rows is cheaper than masking pairs.
        m_pairs = (o_xor >> level) == 1 if level < LEVELS - 1 else later
        b_gamma += tl.where(m_pairs, b_pairs, 0.0)
        b_total, b_prefix, b_suffix = _double(b_total, b_prefix, b_suffix, level, C, BM)

    o_weights = i_ch * C * BM + o_t[:, None] * BM + o_m
    b_in = b_read * _power(b_prefix, PRECISION)
    b_out = b_write * _power(b_suffix, PRECISION)
    tl.store(p_mix.read_in + o_weights, b_in.to(p_mix.read_in.dtype.element_ty))
    tl.store(p_mix.write_out + o_weights, b_out.to(p_mix.write_out.dtype.element_ty))
    tl.store(p_mix.total + i_ch * BM + o_m, tl.reshape(b_total, [BM]) / _unit(PRECISION))
    o_gamma = i_ch * C * C + o_t[:, None] * C + o_t[None, :]
    tl.store(p_mix.gamma + o_gamma, b_gamma.to(p_mix.gamma.dtype.element_ty))


@triton.jit(do_not_specialize=["num_tokens", "chunks_each", "num_ch"])
def mix_backward_kernel(
    p_weights, p_sums, p_gradients, p_table, num_tokens, chunks_each, num_ch, H,
    M: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    PARTS: tl.constexpr, LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of read, write and log_decay of one chunk and head.

    dread[t, m]  = sum_k<=t pairs[t, k] write[k, m] exp(decay from k to t) + read_in's part
    dwrite[k, m] = sum_t>=k pairs[t, k] read[t, m] exp(decay from k to t) + write_out's part

    and dlog_decay[s] sums the contributions to the loss of all paths from a write before s to a
    read at or after s. p_weights and p_gradients are `Weights`; p_sums is `ChannelSums` of
    PARTS = P parts; num_ch = N H.
    """
    o_t, o_m, i_ch, o_x, m_x = _program(p_table, num_tokens, chunks_each, H, M, BM, C, LAYOUT)
    b_read, b_write, b_decay = _load_weights(p_weights, o_x, m_x, PRECISION)

    # Sums over the blocks of channels.
    o_weights = o_t[:, None] * BM + o_m
    o_pair = o_t[:, None] * C + o_t[None, :]
    b_in, b_out = tl.zeros([C, BM], dtype=tl.float32), tl.zeros([C, BM], dtype=tl.float32)
    b_pair = tl.zeros([C, C], dtype=tl.float32)
    b_across = tl.zeros([BM], dtype=tl.float32)
    for p in tl.static_range(PARTS):
        i_part = i_ch + p * num_ch
        b_in += tl.load(p_sums.read_state + i_part * C * BM + o_weights)
        b_out += tl.load(p_sums.write_state + i_part * C * BM + o_weights)
        b_pair += tl.load(p_sums.pairs + i_part * C * C + o_pair).to(tl.float32)
        b_across += tl.load(p_sums.across + i_part * BM + o_m)

    # Pairs of a later read and an earlier write, level by level; a token's own pair comes last.
    b_same = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_pair, 0.0), 1)[:, None]
    b_turned = tl.trans(b_pair)
    b_dread, b_dwrite = tl.zeros_like(b_in), tl.zeros_like(b_out)
    o_xor = o_t[:, None] ^ o_t[None, :]
    terms = ()
    b_total, b_prefix, b_suffix = b_decay, b_decay, tl.zeros_like(b_decay)
    for level in tl.static_range(LEVELS):
        later, b_decayed, b_q, b_k = _split(
            b_read, b_write, b_prefix, b_suffix, o_t, level, PRECISION
        )
        m_split = (o_xor >> level) == 1
        b_read_part = tl.dot(tl.where(m_split, b_pair, 0.0), b_k, input_precision=PRECISION)
        b_write_part = tl.dot(tl.where(m_split, b_turned, 0.0), b_q, input_precision=PRECISION)
        b_read_part = tl.where(later, b_read_part * b_decayed, 0.0)
        b_write_part = tl.where(later, 0.0, b_write_part * b_decayed)
        terms = terms + (b_read * b_read_part + b_write * b_write_part,)  # noqa: RUF005
        b_dread += b_read_part
        b_dwrite += b_write_part
        b_total, b_prefix, b_suffix = _double(b_total, b_prefix, b_suffix, level, C, BM)

    # Reads of the state before the chunk, writes to the one after it, and paths across the chunk.
    b_in *= _power(b_prefix, PRECISION)
    b_out *= _power(b_suffix, PRECISION)
    b_across *= _power(tl.reshape(b_total, [BM]), PRECISION)
    # Propagate gradients of the sums to their terms, the longest blocks first.
    b_dtotal, b_dprefix, b_dsuffix = b_across[None, :], b_read * b_in, b_write * b_out
    for level in tl.static_range(LEVELS - 1, -1, -1):
        b_dtotal, b_dprefix, b_dsuffix = _halve(b_dtotal, b_dprefix, b_dsuffix, level, C, BM)
        later = (((o_t >> level) & 1) == 1)[:, None]
        b_dprefix += tl.where(later, terms[level], 0.0)
        b_dsuffix += tl.where(later, 0.0, terms[level])
    b_ddecay = b_dprefix + b_dtotal
    b_dread += b_in + b_same * b_write
    b_dwrite += b_out + b_same * b_read
    tl.store(p_gradients.read + o_x, b_dread.to(p_gradients.read.dtype.element_ty), mask=m_x)
    tl.store(p_gradients.write + o_x, b_dwrite.to(p_gradients.write.dtype.element_ty), mask=m_x)
    tl.store(p_gradients.log_decay + o_x, b_ddecay, mask=m_x)
