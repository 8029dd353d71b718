"""Kernels that walk along the list of chunks with a state in registers.

    states_kernel    S <- exp(total) S + weights^T x                   forward in time, or backward
    pass_kernel      the same from segment to segment
    output_kernel    y = gamma u + read_in S, walking forward
    gradient_kernel  du and all products with the states, walking backward

A product with gamma carries an inf or NaN to earlier tokens of the chunk: zero times NaN is NaN.
Where a state has become bad, the last two kernels run again with CAREFUL, which zeroes bad tokens.

Walking backward, x is dy, weights are read_in, and the state is the gradient of the state. gamma,
read_in, write_out and total come from `mix.py`; a program owns one segment, head and block of
channels. Letters: N chunks of C tokens, S segments, H heads, M modes in blocks BM, D head channels
in blocks BD, Q sequences. i_ch numbers chunk and head together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import decay_and_add, kept_parts
from flash_frac.ops.scan.plan import locate_chunk

# Log of the share that a new sequence keeps of the previous one's state, even if that is NaN. A
# sequence that forgets all its past keeps at least FORGOTTEN, so a NaN stays visible at its end.
NOTHING_KEPT = tl.constexpr(float("-inf"))
FORGOTTEN = tl.constexpr(-1e30)
# Integers that differ from call to call; specialising on them would recompile the kernel often.
VARIES = ("num_tokens", "chunks_each", "num_chunks", "per_segment", "num_segments")


class Mix(NamedTuple):
    """gamma (N, H, C, C), read_in and write_out (N, H, C, BM), total (N, H, BM): see `mix.py`."""

    gamma: Tensor
    read_in: Tensor
    write_out: Tensor
    total: Tensor


class ChannelSums(NamedTuple):
    """Sums over the channels of each of P blocks, with S the state before a chunk.

    pairs (P, N, H, C, C):        sum_d dy[t, d] u[k, d]
    read_state (P, N, H, C, BM):  sum_d dy[t, d] S[m, d]
    write_state (P, N, H, C, BM): sum_d u[k, d] dS'[m, d], with S' the state after the chunk
    across (P, N, H, BM):         sum_d S[m, d] dS'[m, d]
    """

    pairs: Tensor
    read_state: Tensor
    write_state: Tensor
    across: Tensor


@triton.jit
def _program(D, M: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """Segment and head of this program; tokens, modes, channels and states it indexes; masks."""
    i_segment, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_t, o_m = tl.arange(0, C), tl.arange(0, BM)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    # [BM, BD]
    o_state = o_m[:, None] * D + o_d
    return i_segment, i_h, o_t, o_m, o_d, m_d, o_state, (o_m < M)[:, None] & m_d


@triton.jit
def _move(b_state, b_total, b_weights, b_x, PRECISION: tl.constexpr):
    """The state after a chunk: [BM, BD] from totals [BM], weights [BM, C] and inputs [C, BD]."""
    b_added = tl.dot(b_weights, b_x, input_precision=PRECISION)
    return decay_and_add(b_state, b_total[:, None], b_added)


@triton.jit
def _is_bad(b_x):
    """Elementwise, whether values are inf or NaN."""
    return (tl.abs(b_x) < float("inf")) == 0


@triton.jit
def _any_bad_state(
    p_state, i_h, i_start, i_end, o_state, m_state, p_table, num_tokens, chunks_each, H, D,
    M: tl.constexpr, C: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """Whether any sequence of chunks start to end has a bad state, of states (Q, H, M, D)."""
    first, _, _, _, _ = locate_chunk(i_start, p_table, num_tokens, chunks_each, C, LAYOUT)
    last, _, _, _, _ = locate_chunk(i_end - 1, p_table, num_tokens, chunks_each, C, LAYOUT)
    count = 0
    for i_sequence in range(first, last + 1):
        o_given = (i_sequence * H + i_h) * M * D + o_state
        b_bad = _is_bad(tl.load(p_state + o_given, mask=m_state, other=0.0)).to(tl.int32)
        count += tl.sum(tl.sum(b_bad, 1), 0)
    return count > 0


@triton.jit
def _careful_dot(b_gamma, b_x, b_added, REVERSE: tl.constexpr, PRECISION: tl.constexpr):
    """gamma x + added [C, BD]; NaN at and after a bad x, or with REVERSE at and before it."""
    b_bad = _is_bad(b_x)
    b_clean = tl.where(b_bad, 0.0, b_x)
    b_result = tl.dot(b_gamma, b_clean, b_added, input_precision=PRECISION)
    b_count = tl.cumsum(b_bad.to(tl.int32), 0, reverse=REVERSE)
    return tl.where(b_count > 0, float("nan"), b_result)


@triton.jit
def _begin(b_state, p_given, o_given, m_state, begins):
    """The state [BM, BD] at the start of a sequence: the given one, or zeros."""
    b_given = tl.zeros_like(b_state)
    if p_given is not None:
        b_given = tl.load(p_given + o_given, mask=m_state & begins, other=0.0)
    return tl.where(begins, b_given, b_state)


@triton.jit(do_not_specialize=VARIES)
def states_kernel(
    p_x, p_weights, p_total, p_initial, p_incoming, p_chunk_states,
    p_segment_state, p_segment_total,
    p_table, num_tokens, chunks_each, num_chunks, per_segment, H, D,
    M: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, BACKWARD: tl.constexpr, EVERY_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- exp(total) S + weights^T x, over the chunks of a segment.

    Without EVERY_CHUNK it starts from zeros and writes, for each segment, its contribution to the
    state (S, H, BM, D) and the log of the share it keeps (S, H, BM). With EVERY_CHUNK it starts
    from p_incoming (S, H, BM, D) and writes the state before each chunk (N, H, BM, D).
    p_x (B, T, H, D); p_weights (N, H, C, BM); p_total (N, H, BM); p_initial (Q, H, M, D) or None.
    """
    i_segment, i_h, o_t, o_m, o_d, m_d, o_state, m_state = _program(D, M, BM, BD, C)
    i_out = (i_segment * H + i_h) * BM
    b_state = tl.zeros([BM, BD], dtype=tl.float32)
    b_kept = tl.zeros([BM], dtype=tl.float32)
    if EVERY_CHUNK:
        b_state = tl.load(p_incoming + i_out * D + o_state, mask=m_d, other=0.0)
    i_start = i_segment * per_segment
    for i in range(i_start, tl.minimum(i_start + per_segment, num_chunks)):
        i_chunk = num_chunks - 1 - i if BACKWARD else i
        sequence, row, length, first, last = locate_chunk(
            i_chunk, p_table, num_tokens, chunks_each, C, LAYOUT
        )
        begins = last if BACKWARD else first
        o_initial = (sequence * H + i_h) * M * D + o_state
        b_state = _begin(b_state, p_initial, o_initial, m_state, begins)
        b_kept = tl.where(begins, NOTHING_KEPT, b_kept)
        i_ch = i_chunk * H + i_h
        if EVERY_CHUNK:
            p_here = p_chunk_states + i_ch * BM * D + o_state
            tl.store(p_here, b_state.to(p_chunk_states.dtype.element_ty), mask=m_d)
        # [BM], [BM, C], [C, BD]
        b_total = tl.load(p_total + i_ch * BM + o_m)
        b_weights = tl.load(p_weights + i_ch * C * BM + o_t[None, :] * BM + o_m[:, None])
        o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * D + o_d
        b_x = tl.load(p_x + o_x, mask=(o_t < length)[:, None] & m_d, other=0.0)
        b_state = _move(b_state, b_total, b_weights, b_x, PRECISION)
        b_kept += tl.maximum(b_total, FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)
    if not EVERY_CHUNK:
        tl.store(p_segment_state + i_out * D + o_state, b_state, mask=m_d)
        tl.store(p_segment_total + i_out + o_m, b_kept)


@triton.jit(do_not_specialize=VARIES)
def pass_kernel(
    p_segment_state, p_segment_total, p_incoming, num_segments, H, D,
    BM: tl.constexpr, BD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """incoming[i + 1] = exp(total[i]) incoming[i] + state[i], from segment to segment.

    One program per head, mode and block of channels [BD]. Its sums are the longest of all, so it
    compensates for rounding errors. p_segment_state, p_incoming (S, H, BM, D); p_segment_total
    (S, H, BM).
    """
    i_h, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_state, b_lost = tl.zeros([BD], dtype=tl.float32), tl.zeros([BD], dtype=tl.float32)
    for i in range(0, num_segments, AHEAD):
        # Loads do not depend on the state, so the compiler issues several ahead of time.
        for j in tl.static_range(AHEAD):
            inside = i + j < num_segments
            o_row = ((i + j) * H + i_h) * BM + i_m
            b_added = tl.load(p_segment_state + o_row * D + o_d, mask=m_d & inside, other=0.0)
            b_total = tl.load(p_segment_total + o_row, mask=inside, other=0.0)
            tl.store(p_incoming + o_row * D + o_d, b_state, mask=m_d & inside)
            begins = b_total == NOTHING_KEPT
            b_state, b_lost = tl.where(begins, 0.0, b_state), tl.where(begins, 0.0, b_lost)
            b_kept, b_change = kept_parts(b_state, b_total)
            b_change += b_added + decay_and_add(b_lost, b_total, 0.0)
            b_state = b_kept + b_change
            b_lost = (b_kept - b_state) + b_change


@triton.jit(do_not_specialize=VARIES)
def output_kernel(
    p_u, p_mix, p_initial, p_incoming, p_y, p_final,
    p_table, num_tokens, chunks_each, num_chunks, per_segment, H, D,
    M: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """y = gamma u + read_in S, and S <- exp(total) S + write_out^T u, forward in time.

    p_u, p_y (B, T, H, D); p_mix a `Mix`; p_incoming (S, H, BM, D), the states before segments;
    p_initial (or None) and p_final (Q, H, M, D). With CAREFUL it reads p_final and corrects y.
    """
    i_segment, i_h, o_t, o_m, o_d, m_d, o_state, m_state = _program(D, M, BM, BD, C)
    i_in = (i_segment * H + i_h) * BM
    i_start = i_segment * per_segment
    i_end = tl.minimum(i_start + per_segment, num_chunks)
    if CAREFUL:  # noqa: SIM102, as `and` would have the call compiled always
        if not _any_bad_state(
            p_final, i_h, i_start, i_end, o_state, m_state, p_table, num_tokens, chunks_each, H, D,
            M, C, LAYOUT,
        ):  # fmt: skip
            return
    b_state = tl.load(p_incoming + i_in * D + o_state, mask=m_d, other=0.0)
    for i_chunk in range(i_start, i_end):
        sequence, row, length, first, last = locate_chunk(
            i_chunk, p_table, num_tokens, chunks_each, C, LAYOUT
        )
        o_sequence = (sequence * H + i_h) * M * D + o_state
        b_state = _begin(b_state, p_initial, o_sequence, m_state, first)
        i_ch = i_chunk * H + i_h
        o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * D + o_d
        m_x = (o_t < length)[:, None] & m_d
        # [C, BD], [C, C], [C, BM]
        b_u = tl.load(p_u + o_x, mask=m_x, other=0.0)
        b_gamma = tl.load(p_mix.gamma + i_ch * C * C + o_t[:, None] * C + o_t[None, :])
        b_in = tl.load(p_mix.read_in + i_ch * C * BM + o_t[:, None] * BM + o_m)
        b_y = tl.dot(b_in, b_state.to(b_in.dtype), input_precision=PRECISION)
        if CAREFUL:
            b_y = _careful_dot(b_gamma, b_u, b_y, False, PRECISION)
        else:
            b_y = tl.dot(b_gamma, b_u, b_y, input_precision=PRECISION)
        tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty), mask=m_x)
        # [BM], [BM, C]
        b_total = tl.load(p_mix.total + i_ch * BM + o_m)
        b_out = tl.load(p_mix.write_out + i_ch * C * BM + o_t[None, :] * BM + o_m[:, None])
        b_state = _move(b_state, b_total, b_out, b_u, PRECISION)
        if not CAREFUL:
            tl.store(p_final + o_sequence, b_state, mask=m_state & last)


@triton.jit(do_not_specialize=VARIES)
def gradient_kernel(
    p_u, p_dy, p_mix, p_dfinal, p_incoming, p_chunk_states, p_skip, p_du, p_dinitial, p_sums,
    p_table, num_tokens, chunks_each, num_chunks, per_segment, H, D,
    M: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """du = gamma^T dy + write_out dS', and dS <- exp(total) dS' + read_in^T dy, backward in time.

    It also writes `ChannelSums` p_sums, from which `mix_backward_kernel` computes the gradients of
    the weights. p_u, p_dy, p_du (B, T, H, D); p_mix a `Mix`; p_chunk_states (N, H, BM, D), the
    states before chunks; p_incoming (S, H, BM, D), the gradients of the states after segments;
    p_dfinal (or None) and p_dinitial (Q, H, M, D). With CAREFUL it reads p_dinitial and fixes du.
    p_skip (H, D), or None, is the weight of a direct term skip u in y.
    """
    i_segment, i_h, o_t, o_m, o_d, m_d, o_state, m_state = _program(D, M, BM, BD, C)
    i_in = (i_segment * H + i_h) * BM
    i_start = i_segment * per_segment
    i_end = tl.minimum(i_start + per_segment, num_chunks)
    if CAREFUL:  # noqa: SIM102
        if not _any_bad_state(
            p_dinitial, i_h, num_chunks - i_end, num_chunks - i_start, o_state, m_state,
            p_table, num_tokens, chunks_each, H, D, M, C, LAYOUT,
        ):  # fmt: skip
            return
    # dS' [BM, BD]
    b_state = tl.load(p_incoming + i_in * D + o_state, mask=m_d, other=0.0)
    for i in range(i_start, i_end):
        i_chunk = num_chunks - 1 - i
        sequence, row, length, first, last = locate_chunk(
            i_chunk, p_table, num_tokens, chunks_each, C, LAYOUT
        )
        o_sequence = (sequence * H + i_h) * M * D + o_state
        b_state = _begin(b_state, p_dfinal, o_sequence, m_state, last)
        i_ch = i_chunk * H + i_h
        i_part = tl.program_id(2).to(tl.int64) * num_chunks * H + i_ch
        o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * D + o_d
        m_x = (o_t < length)[:, None] & m_d
        o_weights = i_ch * C * BM + o_t[:, None] * BM + o_m
        # [C, BD] twice, the transposed gamma [C, C], and [C, BM]
        b_dy = tl.load(p_dy + o_x, mask=m_x, other=0.0)
        b_u = tl.load(p_u + o_x, mask=m_x, other=0.0)
        b_gamma = tl.load(p_mix.gamma + i_ch * C * C + o_t[None, :] * C + o_t[:, None])
        b_out = tl.load(p_mix.write_out + o_weights)
        b_low = b_state.to(b_u.dtype)
        b_du = tl.dot(b_out, b_low, input_precision=PRECISION)
        if CAREFUL:
            b_du = _careful_dot(b_gamma, b_dy, b_du, True, PRECISION)
        else:
            b_du = tl.dot(b_gamma, b_dy, b_du, input_precision=PRECISION)
        if p_skip is not None:
            # Loaded for each chunk, because registers are full.
            b_skip = tl.load(p_skip + i_h * D + o_d[None, :], mask=m_d, other=0.0)
            b_du += b_skip.to(tl.float32) * b_dy.to(tl.float32)
        tl.store(p_du + o_x, b_du.to(p_du.dtype.element_ty), mask=m_x)

        if not CAREFUL:
            # [BM, BD] and [C, C]
            b_before = tl.load(p_chunk_states + i_ch * BM * D + o_state, mask=m_d, other=0.0)
            b_pair = tl.dot(b_dy, tl.trans(b_u), input_precision=PRECISION)
            o_pair = i_part * C * C + o_t[:, None] * C + o_t[None, :]
            tl.store(p_sums.pairs + o_pair, b_pair.to(p_sums.pairs.dtype.element_ty))
            # [BM, C]
            o_modes = i_part * C * BM + o_t[None, :] * BM + o_m[:, None]
            b_read = tl.dot(b_before, tl.trans(b_dy), input_precision=PRECISION)
            tl.store(p_sums.read_state + o_modes, b_read)
            b_write = tl.dot(b_low, tl.trans(b_u), input_precision=PRECISION)
            tl.store(p_sums.write_state + o_modes, b_write)
            b_across = tl.sum(b_before.to(tl.float32) * b_state, 1)
            tl.store(p_sums.across + i_part * BM + o_m, b_across)

        # [BM], [BM, C]
        b_total = tl.load(p_mix.total + i_ch * BM + o_m)
        b_in = tl.load(p_mix.read_in + i_ch * C * BM + o_t[None, :] * BM + o_m[:, None])
        b_state = _move(b_state, b_total, b_in, b_dy, PRECISION)
        if not CAREFUL:
            tl.store(p_dinitial + o_sequence, b_state, mask=m_state & first)
