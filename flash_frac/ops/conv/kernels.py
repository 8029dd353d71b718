"""Kernels of the depthwise causal convolution with SiLU, and of its gradient.

    u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k])

A program walks a segment of L tokens of BI channels, U rows at a time, with the last K - 1 rows in
registers: a row is read once. Backward, it leaves its part of the gradients of weight and bias,
which torch sums: no atomics, hence deterministic.

Sequences are the batch, or, packed in one row, those that cu_seqlens delimits; then `sequence` (T,)
names the sequence of each token. What came before the first token of a sequence is its window.

Letters: B batch, T time, I channels, K taps, N sequences.
"""

# Triton compiles no (*a, b).
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# Integers that differ from call to call: a kernel compiled for each value would be compiled often.
VARIES = ("num_tokens", "num_segments", "num_rows")


class ConvInputs(NamedTuple):
    """What the kernels read: x (B, T, I), whose last axis is contiguous, and the rest contiguous.

    weight (I, 1, K), bias (I,) or None, window (N, I, K - 1) or None for zeros; of packed sequences
    cu_seqlens (N + 1,) and sequence (T,), the number of each token's sequence, else None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    window: Tensor | None
    cu_seqlens: Tensor | None
    sequence: Tensor | None


@triton.jit
def sequence_bounds(i_n, p_in, num_tokens):
    """First token of sequence i_n, and the one after its last, int64 like i_n."""
    if p_in.cu_seqlens is None:
        i_start, i_end = i_n * 0, i_n * 0 + num_tokens
    else:
        i_start = tl.load(p_in.cu_seqlens + i_n).to(tl.int64)
        i_end = tl.load(p_in.cu_seqlens + i_n + 1).to(tl.int64)
    return i_start, i_end


@triton.jit
def sequence_of(i_t, i_b, p_in, num_tokens):
    """The sequence of token i_t, and the position there."""
    if p_in.cu_seqlens is None:
        i_n, i_position = i_b, i_t
    else:
        valid = (i_t >= 0) & (i_t < num_tokens)
        i_n = tl.load(p_in.sequence + i_t, mask=valid, other=0).to(tl.int64)
        i_position = i_t - tl.load(p_in.cu_seqlens + i_n).to(tl.int32)
    return i_n, i_position


@triton.jit
def program_channels(num_channels, BI: tl.constexpr):
    """Which row of programs this is (channels are fastest), and its channels [BI] with mask."""
    num_blocks = tl.cdiv(num_channels, BI)
    o_i = (tl.program_id(0) % num_blocks) * BI + tl.arange(0, BI)
    return tl.program_id(0) // num_blocks, o_i, o_i < num_channels


@triton.jit
def load_parameters(p_weight, p_bias, o_i, m_i, K: tl.constexpr):
    """K taps and the bias, each [BI]."""
    taps = ()
    for k in tl.static_range(K):
        taps = taps + (tl.load(p_weight + o_i * K + k, mask=m_i, other=0.0).to(tl.float32),)
    b_bias = tl.zeros([o_i.shape[0]], tl.float32)
    if p_bias is not None:
        b_bias += tl.load(p_bias + o_i, mask=m_i, other=0.0).to(tl.float32)
    return taps, b_bias


@triton.jit
def load_history(
    i_t, i_b, o_i, m_i, p_rows, p_in, num_tokens, num_channels, stride_t, K: tl.constexpr
):
    """The K - 1 inputs [BI] before token i_t, at p_rows; from the window where they lie there."""
    i_n, i_position = sequence_of(i_t, i_b, p_in, num_tokens)
    inputs = ()
    for k in tl.static_range(K - 1):
        inside = i_position >= K - 1 - k
        b_x = tl.load(p_rows - (K - 1 - k) * stride_t, mask=m_i & inside, other=0.0).to(tl.float32)
        if p_in.window is not None:
            p_old = p_in.window + (i_n * num_channels + o_i) * (K - 1) + i_position + k
            b_x += tl.load(p_old, mask=m_i & (i_position < K - 1 - k), other=0.0).to(tl.float32)
        inputs = inputs + (b_x,)
    return inputs


@triton.jit
def renew_history(inputs, i_n, i_position, o_i, m_i, p_in, num_channels, K: tl.constexpr):
    """The window of sequence i_n in place of the inputs, if its first token is at hand."""
    renewed = ()
    for k in tl.static_range(K - 1):
        b_x = tl.zeros([o_i.shape[0]], tl.float32)
        if p_in.window is not None:
            p_old = p_in.window + (i_n * num_channels + o_i) * (K - 1) + k
            b_x += tl.load(p_old, mask=m_i & (i_position == 0), other=0.0).to(tl.float32)
        renewed = renewed + (tl.where(i_position == 0, b_x, inputs[k]),)
    return renewed


@triton.jit
def weighted_sum(inputs, taps, b_bias, K: tl.constexpr):
    """bias + sum_k taps[k] inputs[k], [BI]."""
    b_sum = inputs[0] * taps[0]
    for k in tl.static_range(1, K):
        b_sum += inputs[k] * taps[k]
    return b_sum + b_bias


@triton.jit
def silu_gradient(b_sum):
    """The derivative of silu, [BI]."""
    b_sigmoid = tl.sigmoid(b_sum)
    return b_sigmoid * (1 + b_sum * (1 - b_sigmoid))


@triton.jit
def convolve_segment(
    i_b, i_first, o_i, m_i, p_in, p_u, num_tokens, num_channels, stride_b, stride_t,
    K: tl.constexpr, L: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """u of the L tokens from i_first on, U rows [BI] at a time."""
    taps, b_bias = load_parameters(p_in.weight, p_in.bias, o_i, m_i, K)
    p_rows = p_in.x + (i_b * stride_b + i_first.to(tl.int64) * stride_t) + o_i
    p_out = p_u + (i_b * num_tokens + i_first) * num_channels + o_i
    inputs = load_history(
        i_first, i_b, o_i, m_i, p_rows, p_in, num_tokens, num_channels, stride_t, K
    )
    for i_group in range(0, tl.minimum(L, num_tokens - i_first), U):
        rows = ()
        for r in tl.static_range(U):
            m_r = m_i & (i_first + i_group + r < num_tokens)
            rows = rows + (tl.load(p_rows + (i_group + r) * stride_t, mask=m_r, other=0.0),)
        for r in tl.static_range(U):
            i_t = i_first + i_group + r
            if p_in.cu_seqlens is not None:
                i_n, i_position = sequence_of(i_t, i_b, p_in, num_tokens)
                inputs = renew_history(inputs, i_n, i_position, o_i, m_i, p_in, num_channels, K)
            inputs = inputs + (rows[r].to(tl.float32),)
            b_sum = weighted_sum(inputs, taps, b_bias, K)
            b_u = (b_sum * tl.sigmoid(b_sum)).to(p_u.dtype.element_ty)
            tl.store(p_out + (i_group + r) * num_channels, b_u, mask=m_i & (i_t < num_tokens))
            inputs = inputs[1:]


@triton.jit
def keep_window(
    i_n, o_i, m_i, p_in, p_new, num_tokens, num_channels, stride_b, stride_t, K: tl.constexpr
):
    """The last K - 1 inputs of sequence i_n, from its old window where it is shorter."""
    i_start, i_end = sequence_bounds(i_n, p_in, num_tokens)
    p_x = p_in.x
    if p_in.cu_seqlens is None:
        p_x += i_n * stride_b
    o_w = (i_n * num_channels + o_i) * (K - 1)
    for j in tl.static_range(K - 1):
        i_t = i_end - (K - 1) + j
        b_x = tl.load(p_x + i_t * stride_t + o_i, mask=m_i & (i_t >= i_start), other=0.0)
        if p_in.window is not None:
            p_old = p_in.window + o_w + (i_end - i_start + j)
            b_x = tl.where(i_t >= i_start, b_x, tl.load(p_old, mask=m_i & (i_t < i_start)))
        tl.store(p_new + o_w + j, b_x, mask=m_i)


@triton.jit(do_not_specialize=VARIES)
def conv_forward_kernel(
    p_in, p_u, p_new, num_tokens, num_channels, num_segments, num_rows, stride_b, stride_t,
    K: tl.constexpr, L: tl.constexpr, U: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k]), and the new windows.

    Programs of all segments of all rows come first, then those of all windows. p_in `ConvInputs`;
    p_u (B, T, I); p_new (N, I, K - 1).
    """
    i_part, o_i, m_i = program_channels(num_channels, BI)
    if i_part < num_rows * num_segments:
        convolve_segment(
            (i_part // num_segments).to(tl.int64), (i_part % num_segments) * L, o_i, m_i,
            p_in, p_u, num_tokens, num_channels, stride_b, stride_t, K, L, U,
        )  # fmt: skip
    else:
        keep_window(
            (i_part - num_rows * num_segments).to(tl.int64), o_i, m_i,
            p_in, p_new, num_tokens, num_channels, stride_b, stride_t, K,
        )  # fmt: skip


@triton.jit
def step_back(
    i_t, i_b, o_i, m_i, inputs, b_du, dinputs, dtaps, taps, b_bias,
    p_in, num_tokens, num_channels, K: tl.constexpr,
):  # fmt: skip
    """Take in token i_t: its share in the gradients of the K taps and of the K last inputs, [BI].

    Returns the inputs it saw, the gradient at the argument of its SiLU, and both sums.
    """
    i_position = i_t
    if p_in.cu_seqlens is not None:
        i_n, i_position = sequence_of(i_t, i_b, p_in, num_tokens)
        past = renew_history(inputs, i_n, i_position, o_i, m_i, p_in, num_channels, K)
        inputs = past + (inputs[K - 1],)
    b_g = b_du * silu_gradient(weighted_sum(inputs, taps, b_bias, K))
    new_dinputs, new_dtaps = (), ()
    for k in tl.static_range(K):
        new_dtaps = new_dtaps + (dtaps[k] + b_g * inputs[k],)
        b_part = b_g * taps[k]
        if p_in.cu_seqlens is not None:
            # Not a tap of zero, which would carry a NaN into the sequence before.
            b_part = tl.where(i_position >= K - 1 - k, b_part, 0.0)
        new_dinputs = new_dinputs + (dinputs[k] + b_part,)
    return inputs, b_g, new_dinputs, new_dtaps


@triton.jit
def store_gradient(
    b_dx, i_row, i_first, i_b, o_i, m_i, p_out, p_dnew, p_in,
    num_tokens, num_channels, K: tl.constexpr,
):  # fmt: skip
    """Write dx [BI] of row i_row of the segment, with its share of the new window's gradient."""
    i_t = i_first + i_row
    m_out = m_i & (i_row >= 0) & (i_t < num_tokens)
    if p_dnew is not None:
        i_n, _ = sequence_of(i_t, i_b, p_in, num_tokens)
        _, i_end = sequence_bounds(i_n, p_in, num_tokens)
        j = i_t - i_end + (K - 1)
        p_d = p_dnew + (i_n * num_channels + o_i) * (K - 1) + j
        b_dx += tl.load(p_d, mask=m_out & (j >= 0), other=0.0).to(tl.float32)
    tl.store(p_out + i_row * num_channels, b_dx.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=VARIES)
def conv_backward_kernel(
    p_in, p_du, p_dnew, p_dx, p_partial,
    num_tokens, num_channels, num_segments, stride_b, stride_t,
    K: tl.constexpr, L: tl.constexpr, U: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """dx of a segment, and its part of the gradients of weight (K rows) and bias (the last row).

    dx[t] = sum_k weight[k] g[t + K - 1 - k] with g = du silu'(...). An input is used by K - 1
    tokens after its own, so a segment is read as far past its end. p_in `ConvInputs`; p_du, p_dx
    (B, T, I); p_dnew (N, I, K - 1) or None; p_partial (B segments, K + 1, I).
    """
    i_part, o_i, m_i = program_channels(num_channels, BI)
    i_b, i_first = (i_part // num_segments).to(tl.int64), (i_part % num_segments) * L
    taps, b_bias = load_parameters(p_in.weight, p_in.bias, o_i, m_i, K)
    p_rows = p_in.x + (i_b * stride_b + i_first.to(tl.int64) * stride_t) + o_i
    o_first = (i_b * num_tokens + i_first) * num_channels
    p_drows, p_out = p_du + o_first + o_i, p_dx + o_first + o_i
    inputs = load_history(
        i_first, i_b, o_i, m_i, p_rows, p_in, num_tokens, num_channels, stride_t, K
    )
    b_zero = tl.zeros([BI], tl.float32)
    dinputs, dtaps, b_dbias = (), (b_zero,), b_zero
    for _ in tl.static_range(K - 1):
        dinputs, dtaps = dinputs + (b_zero,), dtaps + (b_zero,)
    num_owned = tl.minimum(L, num_tokens - i_first)
    for i_group in range(0, num_owned, U):
        rows, drows = (), ()
        for r in tl.static_range(U):
            m_r = m_i & (i_first + i_group + r < num_tokens)
            rows = rows + (tl.load(p_rows + (i_group + r) * stride_t, mask=m_r, other=0.0),)
            drows = drows + (tl.load(p_drows + (i_group + r) * num_channels, mask=m_r, other=0.0),)
        for r in tl.static_range(U):
            inputs, b_g, dinputs, dtaps = step_back(
                i_first + i_group + r, i_b, o_i, m_i, inputs + (rows[r].to(tl.float32),),
                drows[r].to(tl.float32), dinputs + (b_zero,), dtaps, taps, b_bias,
                p_in, num_tokens, num_channels, K,
            )  # fmt: skip
            b_dbias += b_g
            store_gradient(
                dinputs[0], i_group + r - (K - 1), i_first, i_b, o_i, m_i, p_out,
                p_dnew, p_in, num_tokens, num_channels, K,
            )  # fmt: skip
            inputs, dinputs = inputs[1:], dinputs[1:]
    p_sum = p_partial + i_part.to(tl.int64) * (K + 1) * num_channels + o_i
    for k in tl.static_range(K):
        tl.store(p_sum + k * num_channels, dtaps[k], mask=m_i)
    tl.store(p_sum + K * num_channels, b_dbias, mask=m_i)
    i_tail = tl.cdiv(num_owned, U) * U
    for r in tl.static_range(K - 1):
        m_r = m_i & (i_first + i_tail + r < num_tokens)
        b_x = tl.load(p_rows + (i_tail + r) * stride_t, mask=m_r, other=0.0).to(tl.float32)
        b_du = tl.load(p_drows + (i_tail + r) * num_channels, mask=m_r, other=0.0).to(tl.float32)
        inputs, _, dinputs, dtaps = step_back(
            i_first + i_tail + r, i_b, o_i, m_i, inputs + (b_x,),
            b_du, dinputs + (b_zero,), dtaps, taps, b_bias,
            p_in, num_tokens, num_channels, K,
        )  # fmt: skip
        store_gradient(
            dinputs[0], i_tail + r - (K - 1), i_first, i_b, o_i, m_i, p_out,
            p_dnew, p_in, num_tokens, num_channels, K,
        )  # fmt: skip
        inputs, dinputs = inputs[1:], dinputs[1:]


@triton.jit(do_not_specialize=VARIES)
def conv_window_backward_kernel(
    p_in, p_du, p_dnew, p_dwindow, num_tokens, num_channels, stride_b, stride_t,
    K: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Gradient of the old window of a sequence: from its first K - 1 tokens, and what it kept.

    p_in `ConvInputs` with a window; p_du (B, T, I); p_dnew (or None) and p_dwindow (N, I, K - 1).
    """
    i_part, o_i, m_i = program_channels(num_channels, BI)
    i_n = i_part.to(tl.int64)
    i_start, i_end = sequence_bounds(i_n, p_in, num_tokens)
    p_x = p_in.x
    if p_in.cu_seqlens is None:
        p_x += i_n * stride_b
        p_du += i_n * num_tokens * num_channels
    o_w = (i_n * num_channels + o_i) * (K - 1)
    taps, b_bias = load_parameters(p_in.weight, p_in.bias, o_i, m_i, K)
    inputs, gradients = (), ()
    for j in tl.static_range(K - 1):
        inputs = inputs + (tl.load(p_in.window + o_w + j, mask=m_i, other=0.0).to(tl.float32),)
    for i in tl.static_range(K - 1):
        i_t = i_start + i
        m_t = m_i & (i_t < i_end)
        b_x = tl.load(p_x + i_t * stride_t + o_i, mask=m_t, other=0.0).to(tl.float32)
        b_du = tl.load(p_du + i_t * num_channels + o_i, mask=m_t, other=0.0).to(tl.float32)
        inputs = inputs + (b_x,)
        b_g = b_du * silu_gradient(weighted_sum(inputs[i:], taps, b_bias, K))
        gradients = gradients + (tl.where(m_t, b_g, 0.0),)
    for j in tl.static_range(K - 1):
        b_sum = tl.zeros([BI], tl.float32)
        for i in tl.static_range(j + 1):
            b_sum += gradients[i] * taps[j - i]
        if p_dnew is not None:
            i_kept = j - (i_end - i_start)
            m_kept = m_i & (i_kept >= 0)
            b_sum += tl.load(p_dnew + o_w + i_kept, mask=m_kept, other=0.0).to(tl.float32)
        tl.store(p_dwindow + o_w + j, b_sum.to(p_dwindow.dtype.element_ty), mask=m_i)
