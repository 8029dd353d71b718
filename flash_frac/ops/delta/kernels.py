"""Kernels of the delta rule that run one program per chunk and head.

With g = log_decay and, in a chunk of C tokens, gamma[i, j] = exp(sum of g over j < p <= i),
in[i] = exp(sum over p <= i), out[i] = exp(sum over p > i) and total = the sum over the chunk,

    A[i, j]  = beta[i] gamma[i, j] k[i].k[j]    i > j          T = (1 + A)^-1
    pairs    = gamma[i, j] q[i].k[j]            i >= j
    w        = T (beta in k)                                   u = T (beta v)

`delta_prepare_kernel` computes T, w and u, then the walk in `walk.py` U and S, and finally
`delta_output_kernel` y:

    U  = u - w S            S' = exp(total) S + (out k)^T U    y = in q S + pairs U

All exponents are sums of g between two tokens, <= 0, and never differences of larger sums, so g may
be -inf. `delta_gradient_kernel` computes the gradients from those of the states and of U. With
X = T^T dU, the inputs of the triangular system have gradients dv = beta X, dA = -X U^T (i > j), and
for the keys -X S^T.

An inf or NaN in k, v, beta or g is zeroed, because products would carry it to earlier tokens of its
chunk. Instead `in` is NaN from that token on, and so are the outputs; total is NaN, and so are all
later states and outputs. A bad q or dy stays in its own row.

Letters: N chunks of C tokens, H heads, K key channels in a block BK, D value channels in blocks BD.
i_ch numbers chunk and head together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import power
from flash_frac.ops.scan.plan import locate_chunk

# Integers that differ from call to call; specialising on them would recompile the kernel often.
VARIES = ("num_tokens", "chunks_each")
# log2 of the block size up to which substitution solves the triangular system: 16 tokens.
LEVEL_SUBSTITUTED = tl.constexpr(4)


class Inputs(NamedTuple):
    """q, k (B, T, H, K), v (B, T, H, D), beta and log_decay (B, T, H), or their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor


class Prepared(NamedTuple):
    """Results that need no state, see the module docstring; dtype of v, the last three float32.

    inverse (N, H, C, C), w (N, H, C, K); u (N, H, C, D); decay_in, decay_out (N, H, C);
    total (N, H). inverse is None in the forward pass.
    """

    inverse: Tensor | None
    w: Tensor
    u: Tensor
    decay_in: Tensor
    decay_out: Tensor
    total: Tensor


class Walked(NamedTuple):
    """Results of the walks, in the dtype of v: U and dU (N, H, C, D), S and dS' (N, H, D, K).

    S is the state before a chunk, and dS' the gradient of the state after it. `dcorrected` is
    initialised with pairs^T dy; gradients are None in the forward pass.
    """

    corrected: Tensor
    states: Tensor
    dcorrected: Tensor | None = None
    dstates: Tensor | None = None


@triton.jit
def is_bad(b_x):
    """Elementwise, whether values are inf or NaN."""
    return (tl.abs(b_x.to(tl.float32)) < float("inf")) == 0


@triton.jit
def finite(b_x):
    """x with zeros for inf and NaN."""
    return tl.where(is_bad(b_x), 0.0, b_x).to(b_x.dtype)


@triton.jit
def _load_decay(p_decay, o_row, m_t):
    """log_decay [C] without NaN and +inf, and a mask of where they were; -inf stays."""
    b_decay = tl.load(p_decay + o_row, mask=m_t, other=0.0)
    b_bad = (b_decay < float("inf")) == 0
    return tl.where(b_bad, 0.0, b_decay), b_bad


@triton.jit
def _decay_between(b_decay, o_t, PRECISION: tl.constexpr):
    """gamma [C, C], later token in rows; 1 where the row is not later."""
    b_steps = tl.where(o_t[:, None] > o_t[None, :], b_decay[:, None], 0.0)
    return power(tl.cumsum(b_steps, 0), PRECISION == "ieee")


@triton.jit
def _inverse(b_a, o_t, C: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + A)^-1 of A [C, C], zero on and above the diagonal.

    Blocks of R tokens are solved by substitution. Two inverted blocks P and Q with X below P join
    into one of twice the size, with -Q X P below P.
    """
    R: tl.constexpr = 2**LEVEL_SUBSTITUTED
    N: tl.constexpr = C // R
    o_b, o_r = tl.arange(0, N), tl.arange(0, R)
    m_same = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    # [N, R, R]
    b_blocks = tl.sum(tl.where(m_same, tl.reshape(b_a, [N, R, N, R]), 0.0), 2)
    b_x = tl.where((o_r[:, None] == o_r[None, :])[None, :, :], 1.0, tl.zeros_like(b_blocks))
    for j in range(R - 1):
        # Row j is final; subtract its share from every later row.
        b_column = tl.sum(tl.where((o_r == j)[None, None, :], b_blocks, 0.0), 2)
        b_row = tl.sum(tl.where((o_r == j)[None, :, None], b_x, 0.0), 1)
        b_x -= b_column[:, :, None] * b_row[:, None, :]
    b_inverse = tl.reshape(tl.where(m_same, b_x[:, :, None, :], 0.0), [C, C])
    for level in tl.static_range(LEVEL_SUBSTITUTED, LEVEL_SUBSTITUTED + 3):
        if 2**level < C:
            b_inverse = _join(b_inverse, b_a, o_t, level, PRECISION)
    return b_inverse


@triton.jit
def _join(b_inverse, b_a, o_t, LEVEL: tl.constexpr, PRECISION: tl.constexpr):
    """From inverses of blocks of 2^LEVEL tokens to those of blocks twice as large, [C, C]."""
    m_below = ((o_t[:, None] >> LEVEL) ^ (o_t[None, :] >> LEVEL)) == 1
    b_right = tl.dot(tl.where(m_below, b_a, 0.0), b_inverse, input_precision=PRECISION)
    return b_inverse - tl.dot(b_inverse, b_right, input_precision=PRECISION)


@triton.jit
def _program(p_table, num_tokens, chunks_each, H, C: tl.constexpr, LAYOUT: tl.constexpr):
    """Index of this program's chunk and head; its first row of (B, T, H), tokens, mask, length."""
    i_chunk, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, row, length, _, _ = locate_chunk(i_chunk, p_table, num_tokens, chunks_each, C, LAYOUT)
    o_t = tl.arange(0, C)
    return i_chunk * H + i_h, row.to(tl.int64) * H + i_h, o_t, o_t < length, length


@triton.jit(do_not_specialize=VARIES)
def delta_prepare_kernel(
    p_in, p_out, p_dy, p_local, p_table, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill `Prepared` p_out from `Inputs` p_in, for one chunk and head.

    The backward pass also computes p_local (N, H, C, D), pairs^T dy, from p_dy (B, T, H, D).
    """
    i_ch, i_token, o_t, m_t, length = _program(p_table, num_tokens, chunks_each, H, C, LAYOUT)
    o_k, o_row = tl.arange(0, BK), i_token + o_t * H
    dtype = p_in.k.dtype.element_ty
    # [C] and [C, BK]
    b_decay, b_bad = _load_decay(p_in.log_decay, o_row, m_t)
    b_next, _ = _load_decay(p_in.log_decay, o_row + H, o_t + 1 < length)
    b_beta = tl.load(p_in.beta + o_row, mask=m_t, other=0.0).to(tl.float32)
    o_key, m_key = o_t[:, None] * (H * K) + o_k[None, :], m_t[:, None] & (o_k < K)[None, :]
    b_k = tl.load(p_in.k + i_token * K + o_key, mask=m_key, other=0.0)
    b_bad_tokens = (b_bad | is_bad(b_beta)).to(tl.int32)
    b_bad_tokens = tl.maximum(b_bad_tokens, tl.max(is_bad(b_k).to(tl.int32), 1))
    b_beta, b_k = finite(b_beta), finite(b_k)
    b_in = power(tl.cumsum(b_decay, 0), PRECISION == "ieee")
    b_out = power(tl.cumsum(b_next, 0, reverse=True), PRECISION == "ieee")

    # [C, C]
    b_gamma = _decay_between(b_decay, o_t, PRECISION)
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_a = tl.where(o_t[:, None] > o_t[None, :], b_beta[:, None] * b_gamma * b_kk, 0.0)
    b_inverse = _inverse(b_a, o_t, C, PRECISION).to(dtype)
    if p_out.inverse is not None:
        o_pair = o_t[:, None] * C + o_t[None, :]
        tl.store(p_out.inverse + i_ch * C * C + o_pair, b_inverse)

    # [C, BK]
    b_keys = (b_k * (b_beta * b_in)[:, None]).to(dtype)
    b_w = tl.dot(b_inverse, b_keys, input_precision=PRECISION)
    o_w = o_t[:, None] * K + o_k[None, :]
    tl.store(p_out.w + i_ch * C * K + o_w, b_w.to(dtype), mask=(o_k < K)[None, :])
    for start in range(0, D, BD):
        # [C, BD]
        o_d = start + tl.arange(0, BD)
        m_d = (o_d < D)[None, :]
        o_value = o_t[:, None] * (H * D) + o_d[None, :]
        b_v = tl.load(p_in.v + i_token * D + o_value, mask=m_t[:, None] & m_d, other=0.0)
        b_bad_tokens = tl.maximum(b_bad_tokens, tl.max(is_bad(b_v).to(tl.int32), 1))
        b_values = (finite(b_v) * b_beta[:, None]).to(dtype)
        b_u = tl.dot(b_inverse, b_values, input_precision=PRECISION)
        o_u = o_t[:, None] * D + o_d[None, :]
        tl.store(p_out.u + i_ch * C * D + o_u, b_u.to(dtype), mask=m_d)

    if p_local is not None:
        # [C, C], earlier token in rows; the decays are sums along the other axis.
        b_q = tl.load(p_in.q + i_token * K + o_key, mask=m_key, other=0.0)
        b_steps = tl.where(o_t[None, :] > o_t[:, None], b_decay[None, :], 0.0)
        b_turned = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_turned *= power(tl.cumsum(b_steps, 1), PRECISION == "ieee")
        b_turned = tl.where(o_t[None, :] >= o_t[:, None], b_turned, 0.0).to(dtype)
        for start in range(0, D, BD):
            o_d = start + tl.arange(0, BD)
            m_d = (o_d < D)[None, :]
            o_value = o_t[:, None] * (H * D) + o_d[None, :]
            b_dy = tl.load(p_dy + i_token * D + o_value, mask=m_t[:, None] & m_d, other=0.0)
            b_local = tl.dot(b_turned, finite(b_dy), input_precision=PRECISION)
            o_u = o_t[:, None] * D + o_d[None, :]
            tl.store(p_local + i_ch * C * D + o_u, b_local.to(dtype), mask=m_d)

    b_spoilt = tl.cumsum(b_bad_tokens, 0) > 0
    tl.store(p_out.decay_in + i_ch * C + o_t, tl.where(b_spoilt, float("nan"), b_in))
    tl.store(p_out.decay_out + i_ch * C + o_t, b_out)
    total = tl.where(tl.sum(b_bad_tokens, 0) > 0, float("nan"), tl.sum(b_decay, 0))
    tl.store(p_out.total + i_ch, total)


@triton.jit(do_not_specialize=VARIES)
def delta_output_kernel(
    p_in, p_prepared, p_walked, p_y, p_table, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Outputs p_y (B, T, H, D) of one chunk and head."""
    i_ch, i_token, o_t, m_t, _ = _program(p_table, num_tokens, chunks_each, H, C, LAYOUT)
    o_k, o_row = tl.arange(0, BK), i_token + o_t * H
    dtype = p_in.k.dtype.element_ty
    # [C, BK]
    o_key, m_key = o_t[:, None] * (H * K) + o_k[None, :], m_t[:, None] & (o_k < K)[None, :]
    b_q = tl.load(p_in.q + i_token * K + o_key, mask=m_key, other=0.0)
    b_k = finite(tl.load(p_in.k + i_token * K + o_key, mask=m_key, other=0.0))
    b_decay, _ = _load_decay(p_in.log_decay, o_row, m_t)
    b_in = tl.load(p_prepared.decay_in + i_ch * C + o_t)
    # [C, C]
    b_pairs = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_pairs *= _decay_between(b_decay, o_t, PRECISION)
    b_pairs = tl.where(o_t[:, None] >= o_t[None, :], b_pairs, 0.0).to(dtype)
    for start in range(0, D, BD):
        # [BD, BK], [C, BD] twice
        o_d = start + tl.arange(0, BD)
        m_d = o_d < D
        o_state, m_state = o_d[:, None] * K + o_k[None, :], m_d[:, None] & (o_k < K)[None, :]
        b_state = tl.load(p_walked.states + i_ch * D * K + o_state, mask=m_state, other=0.0)
        p_u, o_u = p_walked.corrected + i_ch * C * D, o_t[:, None] * D + o_d[None, :]
        b_u = tl.load(p_u + o_u, mask=m_d[None, :], other=0.0)
        b_y = tl.dot(b_q, tl.trans(b_state), input_precision=PRECISION) * b_in[:, None]
        b_y = tl.dot(b_pairs, b_u, b_y, input_precision=PRECISION)
        o_value, m_value = o_t[:, None] * (H * D) + o_d[None, :], m_t[:, None] & m_d[None, :]
        tl.store(p_y + i_token * D + o_value, b_y.to(p_y.dtype.element_ty), mask=m_value)


@triton.jit
def _channel_sums(
    p_in, p_prepared, p_walked, p_dy, p_dv, i_ch, i_token, o_t, o_k, m_t, b_beta, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv, and sums over all value channels.

    dy S^T, U dS'^T and -X S^T [C, BK]; dy U^T and -X U^T [C, C]; X.v [C] and S.dS'.
    """
    dtype = p_in.k.dtype.element_ty
    # T^T [C, C]
    b_inverse = tl.load(p_prepared.inverse + i_ch * C * C + o_t[None, :] * C + o_t[:, None])
    b_read, b_write = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
    b_solved = tl.zeros([C, BK], dtype=tl.float32)
    b_pairs, b_a = tl.zeros([C, C], dtype=tl.float32), tl.zeros([C, C], dtype=tl.float32)
    b_across, b_dbeta = tl.zeros([BD], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    for start in range(0, D, BD):
        o_d = start + tl.arange(0, BD)
        m_d = o_d < D
        # [C, BD] four times
        o_value, m_value = o_t[:, None] * (H * D) + o_d[None, :], m_t[:, None] & m_d[None, :]
        b_dy = tl.load(p_dy + i_token * D + o_value, mask=m_value, other=0.0)
        b_v = tl.load(p_in.v + i_token * D + o_value, mask=m_value, other=0.0)
        o_chunk = o_t[:, None] * D + o_d[None, :]
        p_u, p_du = p_walked.corrected + i_ch * C * D, p_walked.dcorrected + i_ch * C * D
        b_u = tl.load(p_u + o_chunk, mask=m_d[None, :], other=0.0)
        b_du = tl.load(p_du + o_chunk, mask=m_d[None, :], other=0.0)
        # [BD, BK] twice
        o_state, m_state = o_d[:, None] * K + o_k[None, :], m_d[:, None] & (o_k < K)[None, :]
        b_state = tl.load(p_walked.states + i_ch * D * K + o_state, mask=m_state, other=0.0)
        b_dstate = tl.load(p_walked.dstates + i_ch * D * K + o_state, mask=m_state, other=0.0)

        b_x = tl.dot(b_inverse, b_du, input_precision=PRECISION)
        b_minus_x = (-b_x).to(dtype)
        b_read = tl.dot(b_dy, b_state, b_read, input_precision=PRECISION)
        b_write = tl.dot(b_u, b_dstate, b_write, input_precision=PRECISION)
        b_solved = tl.dot(b_minus_x, b_state, b_solved, input_precision=PRECISION)
        b_pairs = tl.dot(b_dy, tl.trans(b_u), b_pairs, input_precision=PRECISION)
        b_a = tl.dot(b_minus_x, tl.trans(b_u), b_a, input_precision=PRECISION)
        b_across += tl.sum(b_state.to(tl.float32) * b_dstate.to(tl.float32), 1)
        # dU excludes a bad dy, so X carries none to later tokens.
        b_bad = tl.max(is_bad(b_dy).to(tl.int32), 1)
        b_spoilt = tl.cumsum(b_bad, 0, reverse=True) > 0
        b_x = tl.where(b_spoilt[:, None], float("nan"), b_x)
        b_dbeta += tl.sum(b_x * b_v.to(tl.float32), 1)
        b_dv = (b_x * b_beta[:, None]).to(dtype)
        tl.store(p_dv + i_token * D + o_value, b_dv, mask=m_value)
    return b_read, b_write, b_solved, b_pairs, b_a, b_dbeta, tl.sum(b_across, 0)


@triton.jit(do_not_specialize=VARIES)
def delta_gradient_kernel(
    p_in, p_prepared, p_walked, p_dy, p_gradients, p_scratch,
    p_table, num_tokens, chunks_each, H, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs of one chunk and head.

    The gradient of log_decay at s sums the contributions to the loss of all paths from a token
    before s, or the state, to a token at or after s, or the next state. p_in and p_gradients are
    `Inputs`; p_prepared is `Prepared`, p_walked `Walked`; p_dy (B, T, H, D); p_scratch (N, H, C, C)
    is scratch memory to transpose a matrix.
    """
    i_ch, i_token, o_t, m_t, _ = _program(p_table, num_tokens, chunks_each, H, C, LAYOUT)
    o_k, o_row = tl.arange(0, BK), i_token + o_t * H
    dtype = p_in.k.dtype.element_ty
    # [C]
    b_decay, _ = _load_decay(p_in.log_decay, o_row, m_t)
    b_beta = tl.load(p_in.beta + o_row, mask=m_t, other=0.0).to(tl.float32)
    b_in = tl.load(p_prepared.decay_in + i_ch * C + o_t)
    b_out = tl.load(p_prepared.decay_out + i_ch * C + o_t)
    total = tl.load(p_prepared.total + i_ch)
    b_read, b_write, b_solved, b_dpairs, b_da, b_dbeta, across = _channel_sums(
        p_in, p_prepared, p_walked, p_dy, p_gradients.v, i_ch, i_token, o_t, o_k, m_t, b_beta,
        H, D, K, BK, BD, C, PRECISION,
    )  # fmt: skip
    # [C, BK]
    o_key, m_key = o_t[:, None] * (H * K) + o_k[None, :], m_t[:, None] & (o_k < K)[None, :]
    b_q = tl.load(p_in.q + i_token * K + o_key, mask=m_key, other=0.0)
    b_k = tl.load(p_in.k + i_token * K + o_key, mask=m_key, other=0.0)

    # Reads of the state before the chunk, and writes to the state after it.
    b_dk = b_write * b_out[:, None]
    b_write_state = tl.sum(b_k.to(tl.float32) * b_dk, 1)
    b_solved *= b_in[:, None]
    b_solved_state = tl.sum(b_k.to(tl.float32) * b_solved, 1)
    b_dk += b_beta[:, None] * b_solved
    b_dq = b_read * b_in[:, None]
    b_read_state = tl.sum(b_q.to(tl.float32) * b_dq, 1) + b_beta * b_solved_state

    # Pairs of a later token, the row, and an earlier one, [C, C].
    m_later, m_same = o_t[:, None] > o_t[None, :], o_t[:, None] == o_t[None, :]
    b_gamma = _decay_between(b_decay, o_t, PRECISION)
    b_dpairs = tl.where(m_later | m_same, b_dpairs * b_gamma, 0.0)
    b_da = tl.where(m_later, b_da * b_gamma, 0.0)
    b_kk = b_da * tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    b_qk = b_dpairs * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_paths = tl.where(m_later, b_qk + b_beta[:, None] * b_kk, 0.0)
    b_dbeta += b_solved_state + tl.sum(b_kk, 1)
    b_low_pairs, b_low_a = b_dpairs.to(dtype), (b_da * b_beta[:, None]).to(dtype)
    b_dq = tl.dot(b_low_pairs, b_k, b_dq, input_precision=PRECISION)
    b_dk = tl.dot(b_low_a, b_k, b_dk, input_precision=PRECISION)
    # Both are transposed through scratch memory: on Hopper, Triton 3.4 to 3.7.0 multiply wrongly by
    # a sum of products that is transposed in registers.
    p_pairs, p_a = p_scratch + i_ch * C * C, p_prepared.inverse + i_ch * C * C
    tl.debug_barrier()
    tl.store(p_pairs + o_t[:, None] * C + o_t[None, :], b_low_pairs)
    tl.store(p_a + o_t[:, None] * C + o_t[None, :], b_low_a)
    tl.debug_barrier()
    b_turned = tl.load(p_pairs + o_t[None, :] * C + o_t[:, None])
    b_dk = tl.dot(b_turned, b_q, b_dk, input_precision=PRECISION)
    b_turned = tl.load(p_a + o_t[None, :] * C + o_t[:, None])
    b_dk = tl.dot(b_turned, b_k, b_dk, input_precision=PRECISION)

    # Paths across s begin in column j < s and end in row i >= s.
    b_paths = tl.cumsum(b_paths, 0, reverse=True) + b_write_state[None, :]
    b_ddecay = tl.sum(tl.where(m_later, b_paths, 0.0), 1)
    b_ddecay += tl.cumsum(b_read_state, 0, reverse=True)
    b_ddecay += power(total, PRECISION == "ieee") * across
    tl.store(p_gradients.q + i_token * K + o_key, b_dq.to(dtype), mask=m_key)
    tl.store(p_gradients.k + i_token * K + o_key, b_dk.to(dtype), mask=m_key)
    tl.store(p_gradients.beta + o_row, b_dbeta.to(p_gradients.beta.dtype.element_ty), mask=m_t)
    tl.store(p_gradients.log_decay + o_row, b_ddecay, mask=m_t)
