"""Kernels of the delta rule that walk along the chunks of a sequence with a state in registers.

    delta_walk_kernel            U = u - w S,  S <- exp(total) S + (out k)^T U
    delta_walk_backward_kernel   dU = pairs^T dy + out k dS,
                                 dS <- exp(total) dS + (in q)^T dy - w^T dU, backward in time

A program owns one sequence, head and block of value channels. The state is transposed, [BD, BK]: as
the left factor of its products it stays in registers between them. `kernels.py` defines w, u,
pairs^T dy, in, out and total.

Letters: Q sequences, N chunks of C tokens, H heads, K key channels in a block BK, D value channels
in blocks BD. i_ch numbers chunk and head together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_frac.ops.arithmetic import decay_and_add
from flash_frac.ops.delta.kernels import finite, is_bad

# Integers that differ from call to call; specialising on them would recompile the kernel often.
VARIES = ("num_tokens", "chunks_each")


@triton.jit
def _sequence(
    i_sequence, p_bounds, p_starts, num_tokens, chunks_each, C: tl.constexpr, LAYOUT: tl.constexpr
):
    """First chunk, number of chunks, first row and number of tokens of a sequence."""
    if LAYOUT == "packed":
        row = tl.load(p_bounds + i_sequence).to(tl.int64)
        length = tl.load(p_bounds + i_sequence + 1).to(tl.int64) - row
        first, count = tl.load(p_starts + i_sequence), (length + C - 1) // C
    else:
        row, length = i_sequence * num_tokens, num_tokens
        first, count = i_sequence * chunks_each, chunks_each
    return first, count, row, length


@triton.jit
def _tokens_left(length, i, C: tl.constexpr, LAYOUT: tl.constexpr):
    """Number of tokens in chunk i of a sequence; a compile-time constant if all are full."""
    return C if LAYOUT == "whole" else tl.minimum(length - i * C, C)


@triton.jit
def _program(D, H, K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """Sequence, head, tokens, keys and channels; offsets [BD, BK] of a (Q, H, K, D) state; masks.

    Channels are the fast axis of the grid: neighbouring programs read the same keys.
    """
    num_blocks = tl.cdiv(D, BD)
    i_sequence, i_h = (tl.program_id(0) // num_blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_t, o_k = tl.arange(0, C), tl.arange(0, BK)
    o_d = tl.program_id(0) % num_blocks * BD + tl.arange(0, BD)
    m_k, m_d = o_k < K, o_d < D
    o_state = ((i_sequence * H + i_h) * K + o_k)[None, :] * D + o_d[:, None]
    return i_sequence, i_h, o_t, o_k, o_d, m_k, m_d, o_state, m_d[:, None] & m_k[None, :]


@triton.jit
def _begin_sum(b_state, total, PRECISION: tl.constexpr):
    """Initial accumulator [BD, BK]: the decayed state, or zeros in full precision."""
    return tl.zeros_like(b_state) if PRECISION == "ieee" else b_state * tl.exp(total)


@triton.jit
def _end_sum(b_state, total, b_sum, PRECISION: tl.constexpr):
    """The new state [BD, BK]; full precision rounds once at the state's magnitude."""
    return decay_and_add(b_state, total, b_sum) if PRECISION == "ieee" else b_sum


@triton.jit(do_not_specialize=VARIES)
def delta_walk_kernel(
    p_in, p_prepared, p_walked, p_initial, p_final,
    p_bounds, p_starts, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U and the states before chunks of `Walked` p_walked, and the final state.

    p_in `Inputs`; p_prepared `Prepared`; p_initial, p_final (Q, H, K, D) or None; p_bounds
    (Q + 1,), p_starts (Q,) of packed sequences. Another kernel computes outputs, for all chunks in
    parallel: here every product prolongs the walk.
    """
    i_sequence, i_h, o_t, o_k, o_d, m_k, m_d, o_state, m_state = _program(D, H, K, BK, BD, C)
    first, count, row, length = _sequence(
        i_sequence, p_bounds, p_starts, num_tokens, chunks_each, C, LAYOUT
    )
    dtype = p_in.k.dtype.element_ty
    # [BD, BK]
    b_state = tl.zeros([BD, BK], dtype=tl.float32)
    if p_initial is not None:
        b_state = tl.load(p_initial + o_state, mask=m_state, other=0.0)
    for i in range(count):
        i_ch, m_t = (first + i) * H + i_h, o_t < _tokens_left(length, i, C, LAYOUT)
        # The first number of the chunk in (B, T, H, ...) and in (N, H, C, ...).
        i_token, i_chunk = (row + i * C) * H + i_h, i_ch * C
        # [BK, C], [BD, C], [C, BK], [C]
        p_w = p_prepared.w + i_chunk * K
        b_w = tl.load(p_w + o_t[None, :] * K + o_k[:, None], mask=m_k[:, None], other=0.0)
        p_u = p_prepared.u + i_chunk * D
        b_u = tl.load(p_u + o_t[None, :] * D + o_d[:, None], mask=m_d[:, None], other=0.0)
        m_key = m_t[:, None] & m_k[None, :]
        p_k = p_in.k + i_token * K
        b_k = tl.load(p_k + o_t[:, None] * (H * K) + o_k[None, :], mask=m_key, other=0.0)
        b_out = tl.load(p_prepared.decay_out + i_chunk + o_t)
        total = tl.load(p_prepared.total + i_ch)
        b_low = b_state.to(dtype)
        p_out = p_walked.states + i_ch * D * K
        tl.store(p_out + o_d[:, None] * K + o_k[None, :], b_low, mask=m_state)
        b_u = b_u.to(tl.float32) - tl.dot(b_low, b_w, input_precision=PRECISION)
        p_out = p_walked.corrected + i_chunk * D
        tl.store(p_out + o_t[None, :] * D + o_d[:, None], b_u.to(dtype), mask=m_d[:, None])
        b_written = (b_u * b_out[None, :]).to(dtype)
        b_sum = _begin_sum(b_state, total, PRECISION)
        b_sum = tl.dot(b_written, b_k, b_sum, input_precision=PRECISION)
        b_state = _end_sum(b_state, total, b_sum, PRECISION)
    if p_final is not None:
        tl.store(p_final + o_state, b_state, mask=m_state)


@triton.jit(do_not_specialize=VARIES)
def delta_walk_backward_kernel(
    p_in, p_prepared, p_walked, p_dy, p_dfinal, p_dinitial,
    p_bounds, p_starts, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dU, which replaces pairs^T dy, the gradients of the states after chunks, and dinitial.

    p_in `Inputs`; p_prepared `Prepared`; p_walked `Walked`; p_dy (B, T, H, D); p_dfinal (or None),
    p_dinitial (Q, H, K, D); p_bounds (Q + 1,), p_starts (Q,) of packed sequences. A bad dy is
    excluded from dU, and makes the states of its channel NaN.
    """
    i_sequence, i_h, o_t, o_k, o_d, m_k, m_d, o_state, m_state = _program(D, H, K, BK, BD, C)
    first, count, row, length = _sequence(
        i_sequence, p_bounds, p_starts, num_tokens, chunks_each, C, LAYOUT
    )
    dtype = p_in.k.dtype.element_ty
    # [BD, BK]
    b_state = tl.zeros([BD, BK], dtype=tl.float32)
    if p_dfinal is not None:
        b_state = tl.load(p_dfinal + o_state, mask=m_state, other=0.0)
    for step in range(count):
        i = count - 1 - step
        i_ch, m_t = (first + i) * H + i_h, o_t < _tokens_left(length, i, C, LAYOUT)
        # The first number of the chunk in (B, T, H, ...) and in (N, H, C, ...).
        i_token, i_chunk = (row + i * C) * H + i_h, i_ch * C
        # [BK, C], [C, BK], [C, BK], [BD, C], [BD, C], [C]
        p_k, m_key = p_in.k + i_token * K, m_k[:, None] & m_t[None, :]
        b_k = tl.load(p_k + o_t[None, :] * (H * K) + o_k[:, None], mask=m_key, other=0.0)
        p_q, m_key = p_in.q + i_token * K, m_t[:, None] & m_k[None, :]
        b_q = tl.load(p_q + o_t[:, None] * (H * K) + o_k[None, :], mask=m_key, other=0.0)
        p_w = p_prepared.w + i_chunk * K
        b_w = tl.load(p_w + o_t[:, None] * K + o_k[None, :], mask=m_k[None, :], other=0.0)
        p_gradient, m_y = p_dy + i_token * D, m_d[:, None] & m_t[None, :]
        o_y = o_t[None, :] * (H * D) + o_d[:, None]
        b_dy = tl.load(p_gradient + o_y, mask=m_y, other=0.0)
        p_du = p_walked.dcorrected + i_chunk * D
        o_du = o_t[None, :] * D + o_d[:, None]
        b_du = tl.load(p_du + o_du, mask=m_d[:, None], other=0.0).to(tl.float32)
        b_in = tl.load(p_prepared.decay_in + i_chunk + o_t)
        b_out = tl.load(p_prepared.decay_out + i_chunk + o_t)
        total = tl.load(p_prepared.total + i_ch)
        b_low = b_state.to(dtype)
        p_out = p_walked.dstates + i_ch * D * K
        tl.store(p_out + o_d[:, None] * K + o_k[None, :], b_low, mask=m_state)
        b_spoilt = tl.sum(tl.where(is_bad(b_dy), float("nan"), 0.0), 1)
        b_dy = finite(b_dy)
        b_du += tl.dot(b_low, b_k, input_precision=PRECISION) * b_out[None, :]
        b_minus_du = (-b_du).to(dtype)
        tl.store(p_du + o_du, -b_minus_du, mask=m_d[:, None])
        b_read = (b_dy * b_in[None, :]).to(dtype)
        b_sum = _begin_sum(b_state, total, PRECISION)
        b_sum = tl.dot(b_read, b_q, b_sum, input_precision=PRECISION)
        b_sum = tl.dot(b_minus_du, b_w, b_sum, input_precision=PRECISION)
        b_state = _end_sum(b_state, total, b_sum + b_spoilt[:, None], PRECISION)
    tl.store(p_dinitial + o_state, b_state, mask=m_state)
