"""Kernels of linear layers on a few vectors; each vector reads all weights.

    gemv_kernel         y = residual + W (x norm_weight / rms(x)) + bias, of one or two layers, and
                        perhaps the convolution of its first outputs
    swiglu_gemv_kernel  y = silu(W_gate n) (W_up n),  n = x norm_weight / rms(x)

8-bit matrices have one scale per row, which multiplies the sum over the row. EARLY is explained in
`ops/decode/kernels.py`.
Letters: B batch, E inputs and O outputs of a layer, I inner width, K taps of the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.decode.kernels import await_inputs, convolve_token, load_window


class LinearStep(NamedTuple):
    """A linear layer on vectors; None if absent.

    x (B, E), norm (E,), weight (O, E), scale and bias (O,), residual and output y (B, O).
    """

    x: Tensor
    norm: Tensor | None
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    y: Tensor


@triton.jit
def load_weights(p_weight, o_o, o_e, O, E: tl.constexpr):  # noqa: E741
    """Block [BO, BE], float32, of p_weight (O, E), before the scales of quantised rows."""
    o_w = o_o.to(tl.int64)[:, None] * E + o_e[None, :]
    m_w = (o_o < O)[:, None] & (o_e < E)[None, :]
    return tl.load(p_weight + o_w, mask=m_w, other=0.0).to(tl.float32)


@triton.jit
def scale_rows(b_sum, p_scale, o_o, m_o):
    """Row sums [BO] times p_scale (O,); p_scale is None if weights are not quantised."""
    if p_scale is not None:
        b_sum *= tl.load(p_scale + o_o, mask=m_o, other=0.0).to(tl.float32)
    return b_sum


@triton.jit
def gemv_rows(
    p_layer, p_conv, i_b, i_o, O, E: tl.constexpr, stride_x, eps, num_channels,  # noqa: E741
    K: tl.constexpr, BO: tl.constexpr, BE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Block i_o of BO rows of W times vector i_b; the convolution of outputs < num_channels.

    Accumulates the sum of squares of x on the way, so the norm costs no extra pass. p_layer
    `LinearStep`; p_conv `ConvStep`, or None.
    """
    o_o = i_o * BO + tl.arange(0, BO)
    m_o = o_o < O
    # [BO, BE] and [BE]
    b_sum = tl.zeros([BO, BE], dtype=tl.float32)
    b_squares = tl.zeros([BE], dtype=tl.float32)
    for start in tl.static_range(0, E, BE):
        o_e = start + tl.arange(0, BE)
        m_e = o_e < E
        b_w = load_weights(p_layer.weight, o_o, o_e, O, E)
        if start == 0:
            await_inputs(EARLY)
            if p_conv is not None:
                o_row, m_i = i_b * num_channels + o_o, o_o < num_channels
                loaded = load_window(p_conv, o_row, m_i, o_o, m_i, K)
        b_x = tl.load(p_layer.x + i_b * stride_x + o_e, mask=m_e, other=0.0).to(tl.float32)
        if p_layer.norm is not None:
            b_squares += b_x * b_x
            b_x *= tl.load(p_layer.norm + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_sum += b_w * b_x[None, :]
    b_y = scale_rows(tl.sum(b_sum, 1), p_layer.scale, o_o, m_o)
    if p_layer.norm is not None:
        b_y *= tl.rsqrt(tl.sum(b_squares, 0) / E + eps)
    if p_layer.bias is not None:
        b_y += tl.load(p_layer.bias + o_o, mask=m_o, other=0.0).to(tl.float32)
    o_y = i_b * O + o_o
    if p_layer.residual is not None:
        b_y += tl.load(p_layer.residual + o_y, mask=m_o, other=0.0).to(tl.float32)
    b_y = b_y.to(p_layer.y.dtype.element_ty)
    tl.store(p_layer.y + o_y, b_y, mask=m_o)
    if p_conv is not None:
        m_write = m_i
        if p_conv.mask is not None:
            m_write &= tl.load(p_conv.mask + i_b) != 0
        convolve_token(p_conv, loaded, b_y, o_row, m_i, m_write, K)


@triton.jit
def gemv_kernel(
    p_first, p_second, p_conv, O, O2, E: tl.constexpr, stride_x, stride_x2, eps,  # noqa: E741
    num_channels, K: tl.constexpr, BO: tl.constexpr, BE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BO rows of one vector: those of the first layer's W, then those of the second's.

    p_first and p_second `LinearStep`, p_second perhaps None, with O and O2 outputs and rows of x
    stride_x and stride_x2 apart; p_conv `ConvStep` of the first's outputs < num_channels, or None.
    """
    # Vectors are the fast axis of the grid: neighbouring programs read the same weights.
    i_b, i_o = tl.program_id(0), tl.program_id(1)
    if p_second is None:
        gemv_rows(
            p_first, p_conv, i_b, i_o, O, E, stride_x, eps, num_channels, K, BO, BE, EARLY
        )  # fmt: skip
    else:
        num_first = tl.cdiv(O, BO)
        if i_o < num_first:
            gemv_rows(
                p_first, p_conv, i_b, i_o, O, E, stride_x, eps, num_channels, K, BO, BE, EARLY
            )  # fmt: skip
        else:
            gemv_rows(
                p_second, None, i_b, i_o - num_first, O2, E, stride_x2, eps, 0, K, BO, BE, EARLY
            )  # fmt: skip


@triton.jit
def swiglu_gemv_kernel(
    p_x, p_norm, p_gate, p_up, p_gate_scale, p_up_scale, p_y,
    O, E: tl.constexpr, stride_x, eps, BO: tl.constexpr, BE: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """y = silu(W_gate n) (W_up n) with n = x norm_weight / rms(x), for BO rows of both matrices.

    Like `gemv_rows`: p_x (B, E), rows stride_x apart; p_norm (E,); p_gate, p_up (O, E), the
    matrices, and p_gate_scale, p_up_scale (O,), or None; p_y (B, O).
    """
    i_b = tl.program_id(0)
    o_o = tl.program_id(1) * BO + tl.arange(0, BO)
    m_o = o_o < O
    # [BO, BE] and [BE]
    b_gates = tl.zeros([BO, BE], dtype=tl.float32)
    b_ups = tl.zeros([BO, BE], dtype=tl.float32)
    b_squares = tl.zeros([BE], dtype=tl.float32)
    for start in tl.static_range(0, E, BE):
        o_e = start + tl.arange(0, BE)
        m_e = o_e < E
        b_gate_w = load_weights(p_gate, o_o, o_e, O, E)
        b_up_w = load_weights(p_up, o_o, o_e, O, E)
        b_x = tl.load(p_x + i_b * stride_x + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_squares += b_x * b_x
        b_x *= tl.load(p_norm + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_gates += b_gate_w * b_x[None, :]
        b_ups += b_up_w * b_x[None, :]
    b_rms = tl.rsqrt(tl.sum(b_squares, 0) / E + eps)
    b_gate = scale_rows(tl.sum(b_gates, 1), p_gate_scale, o_o, m_o) * b_rms
    b_up = scale_rows(tl.sum(b_ups, 1), p_up_scale, o_o, m_o) * b_rms
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_y + i_b * O + o_o, b_y.to(p_y.dtype.element_ty), mask=m_o)
