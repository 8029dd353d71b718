"""Attention kernels for decoding: one token of each sequence over the columns of a KV cache.

    attend_kernel  y_n = sum_s softmax_s(scaling q k_s) v_s over a span n of columns, and its weight
    join_kernel    y = sum_n y_n exp(w_n) / sum_n exp(w_n),  w_n = log sum_s exp(scaling q k_s)

Letters: B sequences, h heads of keys and values, G query heads for each, D channels, S columns, N
spans of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_kernel(
    p_q, p_k, p_v, p_position, p_part, p_weight, num_columns, span, num_heads, G, D, stride_b,
    stride_h, scaling, BG: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The G queries of one key head over a span of columns; columns after the position are not
    read.

    p_q (B, h G, D); p_k, p_v (B, h, S, D), sequences stride_b and heads stride_h apart; p_position
    (B,), the last visible column; p_part (B h G, N, D) and p_weight (B h G, N), float32.
    """
    i_n, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h = i_row // num_heads, i_row % num_heads
    o_g, o_d = tl.arange(0, BG), tl.arange(0, BD)
    m_g, m_d = o_g < G, o_d < D
    o_q, m_q = (i_row * G + o_g)[:, None] * D + o_d[None, :], m_g[:, None] & m_d[None, :]
    b_q = tl.load(p_q + o_q, mask=m_q, other=0.0)
    i_last = tl.load(p_position + i_b)
    i_first = i_n * span
    i_end = tl.minimum(tl.minimum(i_last + 1, num_columns).to(tl.int32), i_first + span)
    o_row = i_b * stride_b + i_h * stride_h
    # [BG] and [BG, BD]
    b_most = tl.full([BG], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BG], dtype=tl.float32)
    b_y = tl.zeros([BG, BD], dtype=tl.float32)
    for start in range(i_first, i_end, BS):
        o_s = start + tl.arange(0, BS)
        m_s = o_s < i_end
        # [BD, BS], loaded as the product needs it, so that no block is transposed.
        o_k, m_k = o_row + o_s[None, :] * D + o_d[:, None], m_s[None, :] & m_d[:, None]
        b_k = tl.load(p_k + o_k, mask=m_k, other=0.0)
        o_v, m_v = o_row + o_s[:, None] * D + o_d[None, :], m_s[:, None] & m_d[None, :]
        b_v = tl.load(p_v + o_v, mask=m_v, other=0.0)
        # [BG, BS]
        b_scores = tl.dot(b_q, b_k, input_precision="ieee") * scaling
        b_scores = tl.where(m_s[None, :], b_scores, float("-inf"))
        b_new = tl.maximum(b_most, tl.max(b_scores, 1))
        b_exp = tl.exp(b_scores - b_new[:, None])
        b_scale = tl.exp(b_most - b_new)
        b_sum = b_sum * b_scale + tl.sum(b_exp, 1)
        b_y = b_y * b_scale[:, None] + tl.dot(b_exp.to(b_v.dtype), b_v, input_precision="ieee")
        b_most = b_new
    # A span that is not visible has sum 0, and its weight is the maximum, -inf.
    b_sum = tl.where(b_sum > 0, b_sum, 1.0)
    b_y = b_y / b_sum[:, None]
    o_part = (i_row * G + o_g) * tl.num_programs(0) + i_n
    tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_y, mask=m_q)
    tl.store(p_weight + o_part, b_most + tl.log(b_sum), mask=m_g)


@triton.jit
def join_kernel(
    p_part, p_weight, p_y, num_spans, D, BN: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Weighted mean of the spans of one query: p_y (B h G, D) from results of `attend_kernel`.

    p_part (B h G, N, D); p_weight (B h G, N).
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    # The first span is always visible, so the largest weight is finite.
    b_most = tl.load(p_weight + i_row * num_spans)
    for start in range(0, num_spans, BN):
        o_n = start + tl.arange(0, BN)
        b_weight = tl.load(
            p_weight + i_row * num_spans + o_n, mask=o_n < num_spans, other=float("-inf")
        )
        b_most = tl.maximum(b_most, tl.max(b_weight, 0))
    b_y, b_sum = tl.zeros([BD], dtype=tl.float32), b_most * 0.0
    for start in range(0, num_spans, BN):
        o_n = start + tl.arange(0, BN)
        m_n = o_n < num_spans
        b_weight = tl.load(p_weight + i_row * num_spans + o_n, mask=m_n, other=float("-inf"))
        b_exp = tl.exp(b_weight - b_most)
        b_sum += tl.sum(b_exp, 0)
        # [BN, BD]
        o_part = (i_row * num_spans + o_n)[:, None] * D + o_d[None, :]
        b_part = tl.load(p_part + o_part, mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_y += tl.sum(b_part * b_exp[:, None], 0)
    tl.store(p_y + i_row * D + o_d, (b_y / b_sum).to(p_y.dtype.element_ty), mask=m_d)
