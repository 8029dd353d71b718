"""Kernels of linear layers on 2 to 64 vectors: matrix units, each weight read once.

    product_kernel  y = residual + W x / rms + bias, of one or two layers, and perhaps the
                    convolution of its first outputs; or sums over parts of the inputs
    join_kernel     the same y, from those sums

A program computes BB vectors times BO outputs, from one of SPLITS parts of the inputs. With EARLY
(`ops/decode/kernels.py`) FETCH threads fetch its weights into the L2 cache before it waits for x.
Letters: B batch, E inputs and O outputs of a layer, I inner width, K taps of the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.decode.kernels import await_inputs, convolve_token, load_window


class ProductInputs(NamedTuple):
    """A linear layer on vectors; None if absent.

    x (B, E), norm (E,), weight (O, E), bias (O,), residual and output y (B, O), and sums (SPLITS,
    B, O) float32. squares (B, S), if x is already multiplied by the weight of its norm: their sum
    over S is that of the squares of x before.
    """

    x: Tensor
    norm: Tensor | None
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    squares: Tensor | None
    sums: Tensor | None
    y: Tensor


@triton.jit
def prefetch(p_parts, NUM: tl.constexpr):
    """Fetch NUM elements from each of p_parts on into the L2 cache.

    Addresses must be multiples of 16 bytes; so must be the sizes, or nothing is fetched.
    """
    BYTES: tl.constexpr = NUM * p_parts.dtype.element_ty.primitive_bitwidth // 8
    if BYTES > 0 and BYTES % 16 == 0:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [p_parts.to(tl.int64), tl.full(p_parts.shape, BYTES, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_weights(
    p_weight, i_o, i_e, O, E: tl.constexpr, LENGTH: tl.constexpr,  # noqa: E741
    BO: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Fetch LENGTH inputs from i_e on, of BO rows from i_o on, into the L2 cache."""
    PARTS: tl.constexpr = FETCH // BO
    # Elements of each thread, in multiples of 16 bytes.
    NUM: tl.constexpr = LENGTH // PARTS // 8 * 8
    o_n = tl.arange(0, FETCH)
    o_o, o_e = i_o + o_n // PARTS, i_e + o_n % PARTS * NUM
    # Threads without a row fetch the first one.
    prefetch(tl.where(o_o < O, p_weight + (o_o.to(tl.int64) * E + o_e), p_weight), NUM)


@triton.jit
def prefetch_windows(p_window, i_o, o_b, m_b, num_channels, NUM: tl.constexpr, K: tl.constexpr):
    """Fetch the windows of vectors o_b and of NUM channels from i_o on into the L2 cache."""
    p_rows = p_window + (o_b * num_channels + i_o) * (K - 1)
    # Others are not convolved, or not aligned.
    m_rows = m_b & (i_o + NUM <= num_channels) & (num_channels % 8 == 0)
    prefetch(tl.where(m_rows, p_rows, p_window), NUM * (K - 1))


@triton.jit
def finish_outputs(b_y, p_layer, o_b, o_o, m_b, m_o, O, E, eps, S, BS: tl.constexpr):  # noqa: E741
    """Outputs [BB, BO] from sums: divided by rms, plus bias and residual, in the dtype of y."""
    m_y = m_b[:, None] & m_o[None, :]
    o_y = o_b[:, None] * O + o_o[None, :]
    if p_layer.squares is not None:
        o_s = tl.arange(0, BS)
        m_s = m_b[:, None] & (o_s < S)[None, :]
        b_squares = tl.load(p_layer.squares + o_b[:, None] * S + o_s[None, :], mask=m_s, other=0.0)
        b_y *= tl.rsqrt(tl.sum(b_squares, 1) / E + eps)[:, None]
    if p_layer.bias is not None:
        b_y += tl.load(p_layer.bias + o_o, mask=m_o, other=0.0).to(tl.float32)[None, :]
    if p_layer.residual is not None:
        b_y += tl.load(p_layer.residual + o_y, mask=m_y, other=0.0).to(tl.float32)
    b_y = b_y.to(p_layer.y.dtype.element_ty)
    tl.store(p_layer.y + o_y, b_y, mask=m_y)
    return b_y


@triton.jit
def product_rows(
    p_layer, p_conv, i_o, i_b, i_s, B, O, E: tl.constexpr, stride_x, eps, num_channels,  # noqa: E741
    S, BS: tl.constexpr, K: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr, BE: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, FETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Vectors from i_b on times outputs from i_o on; the convolution of outputs < num_channels.

    p_layer `ProductInputs`, with S squares per vector; p_conv `ConvStep`, or None.
    """
    LENGTH: tl.constexpr = (E + SPLITS * BE - 1) // (SPLITS * BE) * BE
    WHOLE: tl.constexpr = E % (SPLITS * BE) == 0
    o_o, o_b = i_o + tl.arange(0, BO), i_b + tl.arange(0, BB)
    m_o, m_b = o_o < O, o_b < B
    i_e = i_s * LENGTH
    if FETCH and WHOLE:
        prefetch_weights(p_layer.weight, i_o, i_e, O, E, LENGTH, BO, FETCH)
        if p_conv is not None:
            prefetch_windows(p_conv.window, i_o, o_b, m_b, num_channels, BO, K)
    await_inputs(EARLY)
    # [BB, BO] and [BB, BE]
    b_y = tl.zeros([BB, BO], dtype=tl.float32)
    b_squares = tl.zeros([BB, BE], dtype=tl.float32)
    for start in tl.range(0, LENGTH, BE, num_stages=STAGES):
        o_e = i_e + start + tl.arange(0, BE)
        o_w = o_o.to(tl.int64)[:, None] * E + o_e[None, :]
        o_x = o_b.to(tl.int64)[:, None] * stride_x + o_e[None, :]
        m_w, m_x = m_o[:, None], m_b[:, None]
        if not WHOLE:
            m_w, m_x = m_w & (o_e < E)[None, :], m_x & (o_e < E)[None, :]
        b_w = tl.load(p_layer.weight + o_w, mask=m_w, other=0.0)
        b_x = tl.load(p_layer.x + o_x, mask=m_x, other=0.0)
        if p_layer.norm is not None:
            b_norm = tl.load(p_layer.norm + o_e, mask=o_e < E, other=0.0).to(tl.float32)
            b_wide = b_x.to(tl.float32)
            b_squares += b_wide * b_wide
            b_x = (b_wide * b_norm[None, :]).to(b_w.dtype)
        b_y = tl.dot(b_x, tl.trans(b_w), b_y, input_precision=PRECISION)
    if SPLITS > 1:
        p_sums = p_layer.sums + i_s.to(tl.int64) * B * O
        tl.store(p_sums + o_b[:, None] * O + o_o[None, :], b_y, mask=m_b[:, None] & m_o[None, :])
    else:
        if p_layer.norm is not None:
            b_y *= tl.rsqrt(tl.sum(b_squares, 1) / E + eps)[:, None]
        b_y = finish_outputs(b_y, p_layer, o_b, o_o, m_b, m_o, O, E, eps, S, BS)
        if p_conv is not None:
            o_row, m_i = o_b[:, None] * num_channels + o_o[None, :], o_o < num_channels
            m_row = m_b[:, None] & m_i[None, :]
            # Not before the loop, where the window would take many registers.
            loaded = load_window(p_conv, o_row, m_row, o_o, m_i, K)
            m_write = m_row
            if p_conv.mask is not None:
                m_write &= (tl.load(p_conv.mask + o_b, mask=m_b, other=0) != 0)[:, None]
            convolve_token(p_conv, loaded, b_y, o_row, m_row, m_write, K)


@triton.jit
def product_kernel(
    p_first, p_second, p_conv, B, O, O2, E: tl.constexpr, stride_x, stride_x2, eps,  # noqa: E741
    num_channels, S, BS: tl.constexpr, K: tl.constexpr, BB: tl.constexpr, BO: tl.constexpr,
    BE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    FETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BB vectors times BO outputs: those of the first layer, then those of the second.

    p_first and p_second `ProductInputs`, p_second perhaps None, with O and O2 outputs and rows of x
    stride_x and stride_x2 apart; p_conv `ConvStep` of the first's outputs < num_channels, or None.
    """
    i_o, i_b, i_s = tl.program_id(0), tl.program_id(1) * BB, tl.program_id(2)
    num_first = tl.cdiv(O, BO)
    if p_second is None or i_o < num_first:
        product_rows(
            p_first, p_conv, i_o * BO, i_b, i_s, B, O, E, stride_x, eps, num_channels,
            S, BS, K, BB, BO, BE, SPLITS, STAGES, PRECISION, FETCH, EARLY,
        )  # fmt: skip
    else:
        product_rows(
            p_second, None, (i_o - num_first) * BO, i_b, i_s, B, O2, E, stride_x2, eps, 0,
            S, BS, K, BB, BO, BE, SPLITS, STAGES, PRECISION, FETCH, EARLY,
        )  # fmt: skip


@triton.jit
def join_kernel(
    p_layer, B, O, E, eps, S, BS: tl.constexpr, SPLITS: tl.constexpr, BO: tl.constexpr,  # noqa: E741
    EARLY: tl.constexpr,
):  # fmt: skip
    """BO outputs of one vector from the sums over parts of the inputs. p_layer `ProductInputs`."""
    o_o, o_b = tl.program_id(0) * BO + tl.arange(0, BO), tl.program_id(1) + tl.arange(0, 1)
    m_o, m_b = o_o < O, o_b < B
    o_s = tl.arange(0, SPLITS)
    await_inputs(EARLY)
    p_sums = p_layer.sums + (o_s.to(tl.int64)[:, None] * B + o_b) * O + o_o[None, :]
    b_sums = tl.load(p_sums, mask=m_o[None, :], other=0.0)
    finish_outputs(tl.sum(b_sums, 0)[None, :], p_layer, o_b, o_o, m_b, m_o, O, E, eps, S, BS)
