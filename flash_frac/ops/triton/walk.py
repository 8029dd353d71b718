"""Walks along the list of chunks with a state in registers: states, outputs and their gradients.

A segment is a run of chunks that one program walks for one head and one block of channels:

    states_kernel    S <- exp(total) S + weights^T x                   forward in time, or backward
    pass_kernel      the same from segment to segment
    output_kernel    y = gamma u + read_in S, walking forward
    gradient_kernel  du and all products with the states, walking backward

Walking backward, x is dy, weights are read_in, and the state is the gradient of the state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_frac.ops.triton.chunks import chunk_place
from flash_frac.ops.triton.exponential import decay_and_add, kept_parts


@triton.jit
def _places(D, M: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """Segment and head of this program; tokens, modes, channels and states it indexes; masks."""
    i_segment, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_t, o_m = tl.arange(0, C), tl.arange(0, BM)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    o_state = o_m[:, None] * D + o_d
    return i_segment, i_h, o_t, o_m, o_d, m_d, o_state, (o_m < M)[:, None] & m_d


@triton.jit
def _move(b_state, b_total, b_weights, b_x, PRECISION: tl.constexpr):
    """The state after a chunk: [BM, BD] from [BM], [BM, C] and [C, BD]."""
    b_added = tl.dot(b_weights, b_x, input_precision=PRECISION)
    return decay_and_add(b_state, b_total[:, None], b_added)


@triton.jit
def _begin(b_state, given, o_given, m_state, begins):
    """The state of a sequence where one begins: what is given, or zeros."""
    b_given = tl.zeros_like(b_state)
    if given is not None:
        b_given = tl.load(given + o_given, mask=m_state & begins, other=0.0)
    return tl.where(begins, b_given, b_state)


@triton.jit
def states_kernel(
    x,
    weights,
    total,
    initial,
    incoming,
    chunk_states,
    segment_state,
    segment_total,
    table,
    num_tokens,
    chunks_each,
    num_chunks,
    per_segment,
    H,
    D,
    M: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    BACKWARD: tl.constexpr,
    EVERY_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Without EVERY_CHUNK: what a segment adds to a state, and how that decays over it.

    With it: the state before every chunk, from the states before the segments.
    """
    i_segment, i_h, o_t, o_m, o_d, m_d, o_state, m_state = _places(D, M, BM, BD, C)
    i_out = (i_segment * H + i_h) * BM
    b_state = tl.zeros([BM, BD], dtype=tl.float32)
    b_decay = tl.zeros([BM], dtype=tl.float32)
    if EVERY_CHUNK:
        b_state = tl.load(incoming + i_out * D + o_state, mask=m_d, other=0.0)
    start = i_segment * per_segment
    for i in range(start, tl.minimum(start + per_segment, num_chunks)):
        i_chunk = num_chunks - 1 - i if BACKWARD else i
        sequence, row, length, first, last = chunk_place(
            i_chunk, table, num_tokens, chunks_each, C, PACKED
        )
        begins = last if BACKWARD else first
        o_initial = (sequence * H + i_h) * M * D + o_state
        b_state = _begin(b_state, initial, o_initial, m_state, begins)
        b_decay = tl.where(begins, -1e4, b_decay)
        i_place = i_chunk * H + i_h
        if EVERY_CHUNK:
            o_here = i_place * BM * D + o_state
            tl.store(chunk_states + o_here, b_state.to(chunk_states.dtype.element_ty), mask=m_d)
        b_total = tl.load(total + i_place * BM + o_m)
        b_weights = tl.load(weights + i_place * C * BM + o_t[None, :] * BM + o_m[:, None])
        o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * D + o_d
        b_x = tl.load(x + o_x, mask=(o_t < length)[:, None] & m_d, other=0.0)
        b_state = _move(b_state, b_total, b_weights, b_x, PRECISION)
        b_decay += b_total
    if not EVERY_CHUNK:
        tl.store(segment_state + i_out * D + o_state, b_state, mask=m_d)
        tl.store(segment_total + i_out + o_m, b_decay)


@triton.jit
def pass_kernel(
    segment_state,
    segment_total,
    incoming,
    num_segments,
    H,
    D,
    BM: tl.constexpr,
    BD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The state before every segment. One program a head, mode and block of channels.

    Its sums are the longest there are, so what rounding takes is carried along.
    """
    i_h, i_m = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.program_id(2) * BD + tl.arange(0, BD)
    m_d = o_d < D
    b_state, b_lost = tl.zeros([BD], dtype=tl.float32), tl.zeros([BD], dtype=tl.float32)
    for i in range(0, num_segments, AHEAD):
        # Loads do not depend on the state: the compiler sends several before the first is needed.
        for j in tl.static_range(AHEAD):
            inside = i + j < num_segments
            o_row = ((i + j) * H + i_h) * BM + i_m
            b_added = tl.load(segment_state + o_row * D + o_d, mask=m_d & inside, other=0.0)
            b_total = tl.load(segment_total + o_row, mask=inside, other=0.0)
            tl.store(incoming + o_row * D + o_d, b_state, mask=m_d & inside)
            b_kept, b_change = kept_parts(b_state, b_total)
            b_change += b_added + decay_and_add(b_lost, b_total, 0.0)
            b_state = b_kept + b_change
            b_lost = (b_kept - b_state) + b_change


@triton.jit
def output_kernel(
    u,
    gamma,
    read_in,
    write_out,
    total,
    initial,
    incoming,
    y,
    final,
    table,
    num_tokens,
    chunks_each,
    num_chunks,
    per_segment,
    H,
    D,
    M: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_segment, i_h, o_t, o_m, o_d, m_d, o_state, m_state = _places(D, M, BM, BD, C)
    i_in = (i_segment * H + i_h) * BM
    b_state = tl.load(incoming + i_in * D + o_state, mask=m_d, other=0.0)
    start = i_segment * per_segment
    for i_chunk in range(start, tl.minimum(start + per_segment, num_chunks)):
        sequence, row, length, first, last = chunk_place(
            i_chunk, table, num_tokens, chunks_each, C, PACKED
        )
        o_sequence = (sequence * H + i_h) * M * D + o_state
        b_state = _begin(b_state, initial, o_sequence, m_state, first)
        i_place = i_chunk * H + i_h
        o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * D + o_d
        m_x = (o_t < length)[:, None] & m_d
        # [C, BD], [C, C], [C, BM]
        b_u = tl.load(u + o_x, mask=m_x, other=0.0)
        b_gamma = tl.load(gamma + i_place * C * C + o_t[:, None] * C + o_t[None, :])
        b_in = tl.load(read_in + i_place * C * BM + o_t[:, None] * BM + o_m)
        b_y = tl.dot(b_in, b_state.to(b_in.dtype), input_precision=PRECISION)
        b_y = tl.dot(b_gamma, b_u, b_y, input_precision=PRECISION)
        tl.store(y + o_x, b_y.to(y.dtype.element_ty), mask=m_x)
        b_total = tl.load(total + i_place * BM + o_m)
        b_out = tl.load(write_out + i_place * C * BM + o_t[None, :] * BM + o_m[:, None])
        b_state = _move(b_state, b_total, b_out, b_u, PRECISION)
        tl.store(final + o_sequence, b_state, mask=m_state & last)


@triton.jit
def gradient_kernel(
    u,
    dy,
    gamma,
    read_in,
    write_out,
    total,
    dfinal,
    incoming,
    chunk_states,
    du,
    dinitial,
    products,
    read_state,
    write_state,
    across,
    table,
    num_tokens,
    chunks_each,
    num_chunks,
    per_segment,
    H,
    D,
    M: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_segment, i_h, o_t, o_m, o_d, m_d, o_state, m_state = _places(D, M, BM, BD, C)
    i_in = (i_segment * H + i_h) * BM
    b_state = tl.load(incoming + i_in * D + o_state, mask=m_d, other=0.0)
    start = i_segment * per_segment
    for i in range(start, tl.minimum(start + per_segment, num_chunks)):
        i_chunk = num_chunks - 1 - i
        sequence, row, length, first, last = chunk_place(
            i_chunk, table, num_tokens, chunks_each, C, PACKED
        )
        o_sequence = (sequence * H + i_h) * M * D + o_state
        b_state = _begin(b_state, dfinal, o_sequence, m_state, last)
        i_place = i_chunk * H + i_h
        i_part = tl.program_id(2).to(tl.int64) * num_chunks * H + i_place
        o_x = ((row + o_t).to(tl.int64) * H + i_h)[:, None] * D + o_d
        m_x = (o_t < length)[:, None] & m_d
        o_weights = i_place * C * BM + o_t[:, None] * BM + o_m
        # [C, BD] and the transposed gamma [C, C]
        b_dy = tl.load(dy + o_x, mask=m_x, other=0.0)
        b_u = tl.load(u + o_x, mask=m_x, other=0.0)
        b_gamma = tl.load(gamma + i_place * C * C + o_t[None, :] * C + o_t[:, None])
        b_out = tl.load(write_out + o_weights)
        b_low = b_state.to(b_u.dtype)
        b_du = tl.dot(b_out, b_low, input_precision=PRECISION)
        b_du = tl.dot(b_gamma, b_dy, b_du, input_precision=PRECISION)
        tl.store(du + o_x, b_du.to(du.dtype.element_ty), mask=m_x)

        b_before = tl.load(chunk_states + i_place * BM * D + o_state, mask=m_d, other=0.0)
        b_pair = tl.dot(b_dy, tl.trans(b_u), input_precision=PRECISION)
        o_pair = i_part * C * C + o_t[:, None] * C + o_t[None, :]
        tl.store(products + o_pair, b_pair.to(products.dtype.element_ty))
        # [BM, C]
        o_modes = i_part * C * BM + o_t[None, :] * BM + o_m[:, None]
        b_read = tl.dot(b_before, tl.trans(b_dy), input_precision=PRECISION)
        tl.store(read_state + o_modes, b_read)
        b_write = tl.dot(b_low, tl.trans(b_u), input_precision=PRECISION)
        tl.store(write_state + o_modes, b_write)
        tl.store(across + i_part * BM + o_m, tl.sum(b_before.to(tl.float32) * b_state, 1))

        b_total = tl.load(total + i_place * BM + o_m)
        b_in = tl.load(read_in + i_place * C * BM + o_t[None, :] * BM + o_m[:, None])
        b_state = _move(b_state, b_total, b_in, b_dy, PRECISION)
        if dinitial is not None:
            tl.store(dinitial + o_sequence, b_state, mask=m_state & first)
