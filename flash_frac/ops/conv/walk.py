"""Kernel helpers of the convolution: bounds of sequences, and the inputs before a token.

Letters: B batch, T time, I channels, K taps, N sequences (B, or those packed in a row).
"""

# Triton cannot compile (*a, b).
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ConvInputs(NamedTuple):
    """Inputs of the kernels: x (B, T, I), contiguous in its last axis; all others contiguous.

    weight (I, 1, K), bias (I,) or None, window (N, I, K - 1) or None for zeros. Packed sequences
    have cu_seqlens (N + 1,) and sequence (T,), the index of each token's sequence, else None.
    Padded ones have mask (B, T) as bytes, else None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    window: Tensor | None
    cu_seqlens: Tensor | None
    sequence: Tensor | None
    mask: Tensor | None = None


@triton.jit
def sequence_bounds(i_n, p_in, num_tokens):
    """First token of sequence i_n and its end (exclusive), int64 like i_n."""
    if p_in.cu_seqlens is None:
        i_start, i_end = i_n * 0, i_n * 0 + num_tokens
    else:
        i_start = tl.load(p_in.cu_seqlens + i_n).to(tl.int64)
        i_end = tl.load(p_in.cu_seqlens + i_n + 1).to(tl.int64)
    return i_start, i_end


@triton.jit
def sequence_of(i_t, i_b, p_in, num_tokens):
    """The sequence of token i_t, and its position there."""
    if p_in.cu_seqlens is None:
        i_n, i_position = i_b, i_t
    else:
        valid = (i_t >= 0) & (i_t < num_tokens)
        i_n = tl.load(p_in.sequence + i_t, mask=valid, other=0).to(tl.int64)
        i_position = i_t - tl.load(p_in.cu_seqlens + i_n).to(tl.int32)
    return i_n, i_position


@triton.jit
def load_history(
    i_t, i_b, o_i, m_i, p_rows, p_in, num_tokens, num_channels, stride_t, K: tl.constexpr
):
    """The K - 1 inputs [BI] before token i_t, from p_rows, or from the window where needed."""
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
    """The inputs, or the window of sequence i_n if its first token comes next."""
    renewed = ()
    for k in tl.static_range(K - 1):
        b_x = tl.zeros([o_i.shape[0]], tl.float32)
        if p_in.window is not None:
            p_old = p_in.window + (i_n * num_channels + o_i) * (K - 1) + k
            b_x += tl.load(p_old, mask=m_i & (i_position == 0), other=0.0).to(tl.float32)
        renewed = renewed + (tl.where(i_position == 0, b_x, inputs[k]),)
    return renewed


@triton.jit
def last_real(i_end, p_mask, BT: tl.constexpr = 128):
    """The last real token before i_end in the row of the mask at p_mask, or -1."""
    i_found = i_end * 0 - 1
    while (i_found < 0) & (i_end > 0):
        o_t = i_end - BT + tl.arange(0, BT)
        b_real = tl.load(p_mask + o_t, mask=o_t >= 0, other=0)
        i_found = tl.max(tl.where(b_real != 0, o_t, -1))
        i_end -= BT
    return i_found


@triton.jit
def load_real_history(
    i_t, i_b, o_i, m_i, p_in, num_tokens, num_channels, stride_b, stride_t, K: tl.constexpr
):
    """The inputs [BI] of the K - 1 real tokens before i_t; from the window if there are fewer."""
    inputs = ()
    i_back, num_found = i_t, 0
    for j in tl.static_range(K - 1):
        i_back = last_real(i_back, p_in.mask + i_b * num_tokens)
        p_x = p_in.x + i_b * stride_b + i_back.to(tl.int64) * stride_t + o_i
        b_x = tl.load(p_x, mask=m_i & (i_back >= 0), other=0.0).to(tl.float32)
        if p_in.window is not None:
            p_old = p_in.window + (i_b * num_channels + o_i) * (K - 1) + (K - 2 - j + num_found)
            b_x += tl.load(p_old, mask=m_i & (i_back < 0), other=0.0).to(tl.float32)
        num_found += (i_back >= 0).to(tl.int32)
        i_back = tl.maximum(i_back, 0)
        inputs = (b_x,) + inputs
    return inputs


@triton.jit
def select_inputs(condition, one, other, K: tl.constexpr):
    """Select between two histories of K - 1 inputs [BI]: the first where the condition holds."""
    selected = ()
    for k in tl.static_range(K - 1):
        selected = selected + (tl.where(condition, one[k], other[k]),)
    return selected
