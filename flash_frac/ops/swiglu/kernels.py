"""Kernels of silu(gate) up and of its gradient, in float32; the gradient recomputes silu.

A program takes a block of BR rows and BN columns. Letters: R rows, E their width ("size").
"""

from __future__ import annotations

import triton
import triton.language as tl

# Differs from call to call; specialising on it would recompile the kernel often.
VARIES = ("num_rows",)


@triton.jit
def block_position(num_rows, size, BR: tl.constexpr, BN: tl.constexpr):
    """Rows [BR, 1] in int64 and columns [1, BN] of this program's block, and its mask."""
    num_columns = tl.cdiv(size, BN)
    i_r, i_n = tl.program_id(0) // num_columns, tl.program_id(0) % num_columns
    o_r = i_r.to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    o_n = i_n * BN + tl.arange(0, BN)[None, :]
    return o_r, o_n, (o_r < num_rows) & (o_n < size)


@triton.jit(do_not_specialize=VARIES)
def swiglu_forward_kernel(
    p_gate, p_up, p_y, num_rows, size, stride_gate, stride_up, BR: tl.constexpr, BN: tl.constexpr
):
    """y = silu(gate) up. p_gate, p_up (R, E), rows stride_gate and stride_up apart; p_y (R, E)."""
    o_r, o_n, m = block_position(num_rows, size, BR, BN)
    # [BR, BN]
    b_gate = tl.load(p_gate + o_r * stride_gate + o_n, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + o_r * stride_up + o_n, mask=m, other=0.0).to(tl.float32)
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_y + o_r * size + o_n, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=VARIES)
def swiglu_backward_kernel(
    p_dy, p_gate, p_up, p_dgate, p_dup,
    num_rows, size, stride_gate, stride_up, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dgate = dy up silu'(gate), dup = dy silu(gate).

    p_gate, p_up (R, E), rows stride_gate and stride_up apart; p_dy, p_dgate, p_dup (R, E).
    """
    o_r, o_n, m = block_position(num_rows, size, BR, BN)
    o = o_r * size + o_n
    # [BR, BN]
    b_gate = tl.load(p_gate + o_r * stride_gate + o_n, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + o_r * stride_up + o_n, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(tl.float32)
    b_sigmoid = tl.sigmoid(b_gate)
    b_silu = b_gate * b_sigmoid
    b_dgate = b_dy * b_up * (b_sigmoid + b_silu * (1 - b_sigmoid))
    tl.store(p_dgate + o, b_dgate.to(p_dgate.dtype.element_ty), mask=m)
    tl.store(p_dup + o, (b_dy * b_silu).to(p_dup.dtype.element_ty), mask=m)
