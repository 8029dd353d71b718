"""Kernels of the delta rule that have one program for every chunk and head.

With g = log_decay and, of a chunk of C tokens, gamma[i, j] = exp(sum of g over j < p <= i),
in[i] = exp(sum over p <= i), out[i] = exp(sum over p > i) and total = the sum over the chunk,

    A[i, j]  = beta[i] gamma[i, j] k[i].k[j]    i > j          T = (1 + A)^-1
    pairs    = gamma[i, j] q[i].k[j]            i >= j
    w        = T (beta in k)                                   u = T (beta v)

`delta_prepare_kernel` makes T, pairs, w and u; the walks in `walk.py` go on with

    U  = u - w S            y = in q S + pairs U               S' = exp(total) S + (out k)^T U

All exponents are sums of g between two tokens, <= 0, and never differences of larger sums, so that
g may be -inf. `delta_gradient_kernel` makes the gradients from those of the states and of U: with
X = T^T dU, whatever went into the triangular system has the gradients dv = beta X and
dA = -X U^T (i > j), and keys have -X S^T there.

An inf or NaN of k, v, beta or g is taken out, as products would carry it to earlier tokens of its
chunk. `in` is NaN from that token on, and so are its outputs; total is NaN, and so are all states
and outputs that follow. A bad q or dy stays in its own row.

Letters: N chunks of C tokens, H heads, K key channels in a block BK, D value channels in blocks BD.
i_ch numbers chunk and head together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import exp
from flash_frac.ops.scan.plan import locate_chunk

# Integers that differ from call to call: a kernel compiled for each value would be compiled often.
VARIES = ("num_tokens", "chunks_each")


class Inputs(NamedTuple):
    """q, k (B, T, H, K), v (B, T, H, D), beta and log_decay (B, T, H), or their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor


class Prepared(NamedTuple):
    """What needs no state: see the top of this file. In the dtype of v, or float32 (last three).

    inverse, pairs (N, H, C, C); w (N, H, C, K); u (N, H, C, D); decay_in, decay_out (N, H, C);
    total (N, H). inverse is None in the forward pass.
    """

    inverse: Tensor | None
    pairs: Tensor
    w: Tensor
    u: Tensor
    decay_in: Tensor
    decay_out: Tensor
    total: Tensor


class Walked(NamedTuple):
    """What the walks leave, in the dtype of v: U and dU (N, H, C, D), S and dS' (N, H, D, K).

    S is the state before a chunk, and dS' the gradient of the state after it.
    """

    corrected: Tensor
    states: Tensor
    dcorrected: Tensor
    dstates: Tensor


@triton.jit
def power(b_x, PRECISION: tl.constexpr):
    """exp(x): to the last digit for float32, else approximately."""
    return exp(b_x) if PRECISION == "ieee" else tl.exp(b_x)


@triton.jit
def is_bad(b_x):
    """Whether numbers are inf or NaN."""
    return (tl.abs(b_x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def finite(b_x):
    """x with zeros for inf and NaN."""
    return tl.where(is_bad(b_x), 0.0, b_x).to(b_x.dtype)


@triton.jit
def _load_decay(p_decay, o_row, m_t):
    """log_decay [C] without NaN and inf, and where they were; -inf stays."""
    b_decay = tl.load(p_decay + o_row, mask=m_t, other=0.0)
    b_bad = (b_decay < float("inf")) == 0
    return tl.where(b_bad, 0.0, b_decay), b_bad


@triton.jit
def _decay_between(b_decay, o_t, LATER: tl.constexpr, PRECISION: tl.constexpr):
    """gamma [C, C], of which axis LATER is the later token; 1 where that is not later."""
    o_i, o_j = tl.expand_dims(o_t, 1 - LATER), tl.expand_dims(o_t, LATER)
    b_steps = tl.where(o_i > o_j, tl.expand_dims(b_decay, 1 - LATER), 0.0)
    return power(tl.cumsum(b_steps, LATER), PRECISION)


@triton.jit
def _inverse(b_a, o_t, C: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + A)^-1 of A [C, C], zero on and above the diagonal.

    Blocks of 16 by substitution; two blocks P and Q with X below P make one of twice their size,
    with -Q X P there.
    """
    N: tl.constexpr = C // 16
    o_b, o_r = tl.arange(0, N), tl.arange(0, 16)
    m_same = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    # [N, 16, 16]
    b_blocks = tl.sum(tl.where(m_same, tl.reshape(b_a, [N, 16, N, 16]), 0.0), 2)
    b_x = tl.where((o_r[:, None] == o_r[None, :])[None, :, :], 1.0, tl.zeros_like(b_blocks))
    for j in range(15):
        # Row j is done; every later row gives up its share of it.
        b_column = tl.sum(tl.where((o_r == j)[None, None, :], b_blocks, 0.0), 2)
        b_row = tl.sum(tl.where((o_r == j)[None, :, None], b_x, 0.0), 1)
        b_x -= b_column[:, :, None] * b_row[:, None, :]
    b_inverse = tl.reshape(tl.where(m_same, b_x[:, :, None, :], 0.0), [C, C])
    if N >= 2:
        b_inverse = _join(b_inverse, b_a, o_t, 4, PRECISION)
    if N >= 4:
        b_inverse = _join(b_inverse, b_a, o_t, 5, PRECISION)
    return b_inverse


@triton.jit
def _join(b_inverse, b_a, o_t, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of 2^LEVEL to those of blocks twice as large, [C, C]."""
    m_below = ((o_t[:, None] >> LEVEL) ^ (o_t[None, :] >> LEVEL)) == 1
    b_right = tl.dot(tl.where(m_below, b_a, 0.0), b_inverse, input_precision=PRECISION)
    return b_inverse - tl.dot(b_inverse, b_right, input_precision=PRECISION)


@triton.jit
def _program(p_table, num_tokens, chunks_each, H, C: tl.constexpr, LAYOUT: tl.constexpr):
    """Tokens of this program's chunk, its number with the head, rows of (B, T, H), and a mask."""
    i_chunk, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, length, _, _ = locate_chunk(i_chunk, p_table, num_tokens, chunks_each, C, LAYOUT)
    o_t = tl.arange(0, C)
    return o_t, i_chunk * H + i_h, (row + o_t).to(tl.int64) * H + i_h, length


@triton.jit(do_not_specialize=VARIES)
def delta_prepare_kernel(
    p_in, p_out, p_table, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A `Prepared` p_out from `Inputs` p_in, of one chunk and head."""
    o_t, i_ch, o_row, length = _program(p_table, num_tokens, chunks_each, H, C, LAYOUT)
    o_k, m_t = tl.arange(0, BK), o_t < length
    dtype = p_in.k.dtype.element_ty
    # [C] and [C, BK]
    b_decay, b_bad = _load_decay(p_in.log_decay, o_row, m_t)
    b_next, _ = _load_decay(p_in.log_decay, o_row + H, o_t + 1 < length)
    b_beta = tl.load(p_in.beta + o_row, mask=m_t, other=0.0).to(tl.float32)
    o_key, m_key = o_row[:, None] * K + o_k, m_t[:, None] & (o_k < K)[None, :]
    b_q = tl.load(p_in.q + o_key, mask=m_key, other=0.0)
    b_k = tl.load(p_in.k + o_key, mask=m_key, other=0.0)
    b_bad_tokens = (b_bad | is_bad(b_beta)).to(tl.int32)
    b_bad_tokens = tl.maximum(b_bad_tokens, tl.max(is_bad(b_k).to(tl.int32), 1))
    b_beta, b_k = finite(b_beta), finite(b_k)
    b_in = power(tl.cumsum(b_decay, 0), PRECISION)
    b_out = power(tl.cumsum(b_next, 0, reverse=True), PRECISION)

    # [C, C]
    b_gamma = _decay_between(b_decay, o_t, 0, PRECISION)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    o_pair = i_ch * C * C + o_t[:, None] * C + o_t[None, :]
    b_pairs = tl.where(o_t[:, None] >= o_t[None, :], b_gamma * b_qk, 0.0)
    tl.store(p_out.pairs + o_pair, b_pairs.to(dtype))
    b_a = tl.where(o_t[:, None] > o_t[None, :], b_beta[:, None] * b_gamma * b_kk, 0.0)
    b_inverse = _inverse(b_a, o_t, C, PRECISION).to(dtype)
    if p_out.inverse is not None:
        tl.store(p_out.inverse + o_pair, b_inverse)

    # [C, BK]
    b_scaled = (b_k * (b_beta * b_in)[:, None]).to(dtype)
    b_w = tl.dot(b_inverse, b_scaled, input_precision=PRECISION)
    o_w = (i_ch * C + o_t)[:, None] * K + o_k
    tl.store(p_out.w + o_w, b_w.to(dtype), mask=(o_k < K)[None, :])
    for start in range(0, D, BD):
        # [C, BD]
        o_d = start + tl.arange(0, BD)
        m_d = (o_d < D)[None, :]
        b_v = tl.load(p_in.v + o_row[:, None] * D + o_d, mask=m_t[:, None] & m_d, other=0.0)
        b_bad_tokens = tl.maximum(b_bad_tokens, tl.max(is_bad(b_v).to(tl.int32), 1))
        b_scaled = (finite(b_v) * b_beta[:, None]).to(dtype)
        b_u = tl.dot(b_inverse, b_scaled, input_precision=PRECISION)
        tl.store(p_out.u + (i_ch * C + o_t)[:, None] * D + o_d, b_u.to(dtype), mask=m_d)

    b_spoilt = tl.cumsum(b_bad_tokens, 0) > 0
    tl.store(p_out.decay_in + i_ch * C + o_t, tl.where(b_spoilt, float("nan"), b_in))
    tl.store(p_out.decay_out + i_ch * C + o_t, b_out)
    total = tl.where(tl.sum(b_bad_tokens, 0) > 0, float("nan"), tl.sum(b_decay, 0))
    tl.store(p_out.total + i_ch, total)


@triton.jit
def _channel_sums(
    p_in, p_prepared, p_walked, p_dy, p_dv, i_ch, o_row, o_t, o_k, m_t, b_beta, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv, and sums over all value channels.

    dy S^T, U dS'^T and -X S^T [C, BK]; dy U^T and -X U^T [C, C], and both turned; X.v [C] and
    S.dS'. What is turned is multiplied so, because Triton 3.4 to 3.7.0 multiply wrongly by an
    accumulator that is turned (on Hopper).
    """
    dtype = p_in.k.dtype.element_ty
    o_pair = i_ch * C * C + o_t[:, None] * C + o_t[None, :]
    b_inverse = tl.load(p_prepared.inverse + o_pair)
    b_read, b_write = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    b_solved = tl.zeros([C, BK], dtype=tl.float32)
    b_pairs, b_turned_pairs = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_a, b_turned_a = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_across = tl.zeros([BD], dtype=tl.float32)
    b_dbeta = tl.zeros([C], dtype=tl.float32)
    for start in range(0, D, BD):
        o_d = start + tl.arange(0, BD)
        m_d = o_d < D
        # [C, BD] four times
        o_value, m_value = o_row[:, None] * D + o_d, m_t[:, None] & m_d[None, :]
        o_chunk = (i_ch * C + o_t)[:, None] * D + o_d
        b_dy = tl.load(p_dy + o_value, mask=m_value, other=0.0)
        b_v = tl.load(p_in.v + o_value, mask=m_value, other=0.0)
        b_u = tl.load(p_walked.corrected + o_chunk, mask=m_d[None, :], other=0.0)
        b_du = tl.load(p_walked.dcorrected + o_chunk, mask=m_d[None, :], other=0.0)
        # [BD, BK] twice
        o_state = (i_ch * D + o_d)[:, None] * K + o_k
        m_state = m_d[:, None] & (o_k < K)[None, :]
        b_state = tl.load(p_walked.states + o_state, mask=m_state, other=0.0)
        b_dstate = tl.load(p_walked.dstates + o_state, mask=m_state, other=0.0)

        b_x = tl.dot(tl.trans(b_inverse), b_du, input_precision=PRECISION)
        b_turned_x = tl.dot(tl.trans(b_du), b_inverse, input_precision=PRECISION)
        b_minus_x, b_turned_x = (-b_x).to(dtype), (-b_turned_x).to(dtype)
        b_read = tl.dot(b_dy, b_state, b_read, input_precision=PRECISION)
        b_write = tl.dot(b_u, b_dstate, b_write, input_precision=PRECISION)
        b_solved = tl.dot(b_minus_x, b_state, b_solved, input_precision=PRECISION)
        b_pairs = tl.dot(b_dy, tl.trans(b_u), b_pairs, input_precision=PRECISION)
        b_turned_pairs = tl.dot(b_u, tl.trans(b_dy), b_turned_pairs, input_precision=PRECISION)
        b_a = tl.dot(b_minus_x, tl.trans(b_u), b_a, input_precision=PRECISION)
        b_turned_a = tl.dot(b_u, b_turned_x, b_turned_a, input_precision=PRECISION)
        b_across += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
        # dU has no trace of a bad dy, so that X has none in later tokens.
        b_bad = tl.max(is_bad(b_dy).to(tl.int32), 1)
        b_spoilt = tl.cumsum(b_bad, 0, reverse=True) > 0
        b_x = tl.where(b_spoilt[:, None], float("nan"), b_x)
        b_dbeta += tl.sum(b_x * b_v.to(tl.float32), 1)
        b_dv = b_x * b_beta[:, None]
        tl.store(p_dv + o_value, b_dv.to(p_dv.dtype.element_ty), mask=m_value)
    return (
        b_read, b_write, b_solved, b_pairs, b_turned_pairs, b_a, b_turned_a,
        b_dbeta, tl.sum(b_across, 0),
    )  # fmt: skip


@triton.jit(do_not_specialize=VARIES)
def delta_gradient_kernel(
    p_in, p_prepared, p_walked, p_dy, p_gradients, p_table, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs of one chunk and head.

    That of log_decay at s is the sum over all paths from a token before s, or the state, to a token
    at or after s, or the next state, of what each adds to the loss. p_in and p_gradients are
    `Inputs`; p_prepared is `Prepared`, p_walked `Walked`; p_dy (B, T, H, D).
    """
    o_t, i_ch, o_row, length = _program(p_table, num_tokens, chunks_each, H, C, LAYOUT)
    o_k, m_t = tl.arange(0, BK), o_t < length
    dtype = p_in.k.dtype.element_ty
    # [C]
    b_decay, _ = _load_decay(p_in.log_decay, o_row, m_t)
    b_beta = tl.load(p_in.beta + o_row, mask=m_t, other=0.0).to(tl.float32)
    b_in = tl.load(p_prepared.decay_in + i_ch * C + o_t)
    b_out = tl.load(p_prepared.decay_out + i_ch * C + o_t)
    total = tl.load(p_prepared.total + i_ch)
    (
        b_read, b_write, b_solved, b_dpairs, b_turned_pairs, b_da, b_turned_a, b_dbeta, across,
    ) = _channel_sums(
        p_in, p_prepared, p_walked, p_dy, p_gradients.v, i_ch, o_row, o_t, o_k, m_t, b_beta, D,
        K, BK, BD, C, PRECISION,
    )  # fmt: skip
    # [C, BK]
    o_key, m_key = o_row[:, None] * K + o_k, m_t[:, None] & (o_k < K)[None, :]
    b_q = tl.load(p_in.q + o_key, mask=m_key, other=0.0)
    b_k = tl.load(p_in.k + o_key, mask=m_key, other=0.0)

    # Pairs of tokens [C, C]: the later one is the row, then the column.
    m_later, m_same = o_t[:, None] > o_t[None, :], o_t[:, None] == o_t[None, :]
    b_gamma = _decay_between(b_decay, o_t, 0, PRECISION)
    b_dpairs = tl.where(m_later | m_same, b_dpairs * b_gamma, 0.0)
    b_da = tl.where(m_later, b_da * b_gamma, 0.0)
    b_kk = b_da * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_qk = b_dpairs * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_paths = tl.where(m_later, b_qk + b_beta[:, None] * b_kk, 0.0)
    b_dq = tl.dot(b_dpairs.to(dtype), b_k, input_precision=PRECISION)
    b_dk = tl.dot(b_da.to(dtype), b_k, input_precision=PRECISION) * b_beta[:, None]
    m_later = o_t[None, :] > o_t[:, None]
    b_gamma = _decay_between(b_decay, o_t, 1, PRECISION)
    b_turned_pairs = tl.where(m_later | m_same, b_turned_pairs * b_gamma, 0.0)
    b_turned_a = tl.where(m_later, b_turned_a * b_gamma * b_beta[None, :], 0.0)
    b_dk = tl.dot(b_turned_pairs.to(dtype), b_q, b_dk, input_precision=PRECISION)
    b_dk = tl.dot(b_turned_a.to(dtype), b_k, b_dk, input_precision=PRECISION)

    # What reads the state before the chunk, and what writes the one after it.
    b_read *= b_in[:, None]
    b_solved *= b_in[:, None]
    b_write *= b_out[:, None]
    b_read_state = tl.sum(b_q.to(tl.float32) * b_read, 1)
    b_solved_state = tl.sum(b_k.to(tl.float32) * b_solved, 1)
    b_write_state = tl.sum(b_k.to(tl.float32) * b_write, 1)
    b_dq += b_read
    b_dk += b_write + b_beta[:, None] * b_solved
    b_dbeta += b_solved_state + tl.sum(b_kk, 1)
    # Paths that pass s: they begin in column j < s and end in row i >= s.
    b_paths = tl.cumsum(b_paths, 0, reverse=True) + b_write_state[None, :]
    b_ddecay = tl.sum(tl.where(o_t[:, None] > o_t[None, :], b_paths, 0.0), 1)
    b_ddecay += tl.cumsum(b_read_state + b_beta * b_solved_state, 0, reverse=True)
    b_ddecay += power(total, PRECISION) * across
    tl.store(p_gradients.q + o_key, b_dq.to(dtype), mask=m_key)
    tl.store(p_gradients.k + o_key, b_dk.to(dtype), mask=m_key)
    tl.store(p_gradients.beta + o_row, b_dbeta.to(p_gradients.beta.dtype.element_ty), mask=m_t)
    tl.store(p_gradients.log_decay + o_row, b_ddecay, mask=m_t)
