"""Kernels of the depthwise causal convolution with SiLU, and of its gradient.

    u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k])

A program walks a segment of L tokens of BI channels, U rows at a time, with the last K - 1 rows in
registers, so it reads each row once. In the backward pass it writes its partial sum of the
gradients of weight and bias, and torch adds them: no atomics, hence deterministic.

Sequences are the rows of the batch, or those that cu_seqlens delimits in one packed row; then
`sequence` (T,) holds the sequence of each token. The window of a sequence holds the inputs before
its first token. The forward kernel also skips padding, where a mask (B, T) is 0.

Letters: B batch, T time, I channels, K taps, N sequences.
"""

# Triton cannot compile (*a, b).
# ruff: noqa: RUF005

from __future__ import annotations

import triton
import triton.language as tl

from flash_frac.ops.conv.walk import (
    load_history,
    load_real_history,
    renew_history,
    select_inputs,
    sequence_bounds,
    sequence_of,
)

# Integers that differ from call to call; specialising on them would recompile the kernel often.
VARIES = ("num_tokens", "num_segments", "num_rows")


@triton.jit
def program_channels(num_channels, BI: tl.constexpr):
    """Row of this program in the grid (channels are fastest), its channels [BI] and their mask."""
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
    if p_in.mask is None:
        inputs = load_history(
            i_first, i_b, o_i, m_i, p_rows, p_in, num_tokens, num_channels, stride_t, K
        )
    else:
        inputs = load_real_history(
            i_first, i_b, o_i, m_i, p_in, num_tokens, num_channels, stride_b, stride_t, K
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
            past, inputs = inputs, inputs + (rows[r].to(tl.float32),)
            b_sum = weighted_sum(inputs, taps, b_bias, K)
            inputs = inputs[1:]
            if p_in.mask is not None:
                p_real = p_in.mask + i_b * num_tokens + i_t
                is_real = tl.load(p_real, mask=i_t < num_tokens, other=0) != 0
                # As in the published code, padding outputs what zero inputs would.
                b_sum = tl.where(is_real, b_sum, b_bias)
                inputs = select_inputs(is_real, inputs, past, K)
            b_u = (b_sum * tl.sigmoid(b_sum)).to(p_u.dtype.element_ty)
            tl.store(p_out + (i_group + r) * num_channels, b_u, mask=m_i & (i_t < num_tokens))


@triton.jit
def keep_window(
    i_n, o_i, m_i, p_in, p_new, num_tokens, num_channels, stride_b, stride_t, K: tl.constexpr
):
    """The last K - 1 inputs of sequence i_n; a shorter one takes some from its old window."""
    if p_in.mask is not None:
        inputs = load_real_history(
            num_tokens, i_n, o_i, m_i, p_in, num_tokens, num_channels, stride_b, stride_t, K
        )
        for j in tl.static_range(K - 1):
            p_out = p_new + (i_n * num_channels + o_i) * (K - 1) + j
            tl.store(p_out, inputs[j].to(p_new.dtype.element_ty), mask=m_i)
        return
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

    Programs for all segments of all rows come first, then those for all windows. p_in `ConvInputs`;
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
    """Add token i_t's share to the gradients of the K taps and of the last K inputs, [BI].

    Returns the inputs of the token, the gradient of its SiLU's argument, and both sums.
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
            # Not a zero tap, which would carry a NaN into the previous sequence.
            b_part = tl.where(i_position >= K - 1 - k, b_part, 0.0)
        new_dinputs = new_dinputs + (dinputs[k] + b_part,)
    return inputs, b_g, new_dinputs, new_dtaps


@triton.jit
def store_gradient(
    b_dx, i_row, i_first, i_b, o_i, m_i, p_out, p_dnew, p_in,
    num_tokens, num_channels, stride_t, K: tl.constexpr,
):  # fmt: skip
    """Store dx [BI] of row i_row of the segment, including the new window's gradient."""
    i_t = i_first + i_row
    m_out = m_i & (i_row >= 0) & (i_t < num_tokens)
    if p_dnew is not None:
        i_n, _ = sequence_of(i_t, i_b, p_in, num_tokens)
        _, i_end = sequence_bounds(i_n, p_in, num_tokens)
        j = i_t - i_end + (K - 1)
        p_d = p_dnew + (i_n * num_channels + o_i) * (K - 1) + j
        b_dx += tl.load(p_d, mask=m_out & (j >= 0), other=0.0).to(tl.float32)
    tl.store(p_out + i_row * stride_t, b_dx.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=VARIES)
def conv_backward_kernel(
    p_in, p_du, p_dnew, p_dx, p_partial,
    num_tokens, num_channels, num_segments, stride_b, stride_t, stride_db, stride_dt,
    K: tl.constexpr, L: tl.constexpr, U: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """dx of a segment, and its share of the gradients of weight (K rows) and bias (the last row).

    dx[t] = sum_k weight[k] g[t + K - 1 - k] with g = du silu'(...). An input reaches the K - 1
    tokens after it, so a program reads that far past its segment. p_in `ConvInputs`; p_du and p_dx
    (B, T, I), the rows of p_dx stride_db and stride_dt apart; p_dnew (N, I, K - 1) or None;
    p_partial (B segments, K + 1, I).
    """
    i_part, o_i, m_i = program_channels(num_channels, BI)
    i_b, i_first = (i_part // num_segments).to(tl.int64), (i_part % num_segments) * L
    taps, b_bias = load_parameters(p_in.weight, p_in.bias, o_i, m_i, K)
    p_rows = p_in.x + (i_b * stride_b + i_first.to(tl.int64) * stride_t) + o_i
    p_drows = p_du + (i_b * num_tokens + i_first) * num_channels + o_i
    p_out = p_dx + (i_b * stride_db + i_first.to(tl.int64) * stride_dt) + o_i
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
                p_dnew, p_in, num_tokens, num_channels, stride_dt, K,
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
            p_dnew, p_in, num_tokens, num_channels, stride_dt, K,
        )  # fmt: skip
        inputs, dinputs = inputs[1:], dinputs[1:]


@triton.jit(do_not_specialize=VARIES)
def conv_window_backward_kernel(
    p_in, p_du, p_dnew, p_dwindow, num_tokens, num_channels, stride_b, stride_t,
    K: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Gradient of a sequence's old window: from its first K - 1 tokens and the new window.

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
