"""A matrix times a few vectors, for decoding: each weight is read once, at the speed of memory.

    y = residual + W (x norm_weight / rms(x)) + bias          norm, bias and residual may be absent

A program takes a few rows of W and walks along them; the sum of squares of x is collected on the
way, so that a norm costs no pass of its own. Letters: B vectors, E inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.triton.launch import block_size, ceil_div

# Beyond so many vectors the matrix units win.
MOST_VECTORS = 4
# Elements of W that a program has in flight, and the most of them along a row.
_TILE, _LONGEST = 8192, 2048


@triton.jit
def gemv_kernel(
    p_x,
    p_norm,
    p_weight,
    p_bias,
    p_residual,
    p_y,
    O,  # noqa: E741
    E: tl.constexpr,
    stride_x,
    eps,
    BO: tl.constexpr,
    BE: tl.constexpr,
):
    # Vectors are the fast axis of the grid: programs side by side read the same weights.
    i_b = tl.program_id(0)
    o_o = tl.program_id(1) * BO + tl.arange(0, BO)
    m_o = o_o < O
    b_sum = tl.zeros([BO, BE], dtype=tl.float32)
    b_squares = tl.zeros([BE], dtype=tl.float32)
    for start in tl.static_range(0, E, BE):
        o_e = start + tl.arange(0, BE)
        m_e = o_e < E
        o_w = o_o.to(tl.int64)[:, None] * E + o_e[None, :]
        b_w = tl.load(p_weight + o_w, mask=m_o[:, None] & m_e[None, :], other=0.0)
        b_x = tl.load(p_x + i_b * stride_x + o_e, mask=m_e, other=0.0).to(tl.float32)
        if p_norm is not None:
            b_squares += b_x * b_x
            b_x *= tl.load(p_norm + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_sum += b_w.to(tl.float32) * b_x[None, :]
    b_y = tl.sum(b_sum, 1)
    if p_norm is not None:
        b_y *= tl.rsqrt(tl.sum(b_squares, 0) / E + eps)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_o, mask=m_o, other=0.0).to(tl.float32)
    o_y = i_b * O + o_o
    if p_residual is not None:
        b_y += tl.load(p_residual + o_y, mask=m_o, other=0.0).to(tl.float32)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_o)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    """y (B, O) in the dtype of x, whose rows may be apart; the rest is contiguous."""
    batch, (num_outputs, size) = x.shape[0], weight.shape
    y = x.new_empty(batch, num_outputs)
    length = min(block_size(size), _LONGEST)
    # Few outputs are spread over more programs, so that all processors read.
    rows = _TILE // length if num_outputs >= 2048 else 1
    with torch.cuda.device_of(x):
        gemv_kernel[(batch, ceil_div(num_outputs, rows))](
            x,
            norm_weight,
            weight,
            bias,
            residual,
            y,
            num_outputs,
            size,
            x.stride(0),
            eps,
            BO=rows,
            BE=length,
            num_warps=4,
        )
    return y
