"""Kernels of the RMS norms, plain or after a gate.

    y = z / sqrt(mean(z^2) + eps) weight,    z = x   or   (x + skip u) silu(gate + gate_bias)

Statistics are float32. As many programs are launched as the GPU runs at once; each takes BR rows of
a block BN at a time, so weights stay in registers. In the backward pass each writes its partial sum
of the gradients of weight and skip, and torch adds them: no atomics, hence deterministic.
Letters: R rows, E their width ("size"), G programs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# Differs from call to call; specialising on it would recompile the kernel often.
VARIES = ("num_rows",)


class GatedInputs(NamedTuple):
    """Inputs of the gated norm: x, u (R, E) contiguous, gate (R, E) with rows stride_gate apart.

    weight and skip (E,); u and skip are None if there is no direct term.
    """

    x: Tensor
    gate: Tensor
    weight: Tensor
    skip: Tensor | None
    u: Tensor | None


class GatedGradients(NamedTuple):
    """Gradients of x, u (R, E) contiguous, and gate, with rows stride_dgate apart; u may be None.

    Partial sums of the gradients of weight and skip (G, E).
    """

    x: Tensor
    gate: Tensor
    u: Tensor | None
    weight: Tensor
    skip: Tensor | None


@triton.jit
def load_vector(p_x, o_n, m_n):
    """[1, BN], float32."""
    return tl.load(p_x + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_block(p_x, o, m):
    """[BR, BN], float32."""
    return tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def block_rows(i_block, num_rows, m_n, BR: tl.constexpr):
    """Rows of a block, [BR, 1] in int64, and its mask, [BR, BN]."""
    o_r = (i_block * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    return o_r, (o_r < num_rows) & m_n[None, :]


@triton.jit
def reciprocal_rms(b_z, size, eps):
    """[BR, 1]."""
    return tl.rsqrt(tl.sum(b_z * b_z, 1, keep_dims=True) / size + eps)


@triton.jit
def norm_gradient(b_z, b_rms, b_dy, b_weight, size):
    """dz = rms (dy weight - z rms^2 mean(dy weight z)), where rms is the reciprocal."""
    b_dn = b_dy * b_weight
    b_mean = tl.sum(b_dn * b_z, 1, keep_dims=True) / size
    return b_rms * (b_dn - b_z * (b_rms * b_rms * b_mean))


@triton.jit(do_not_specialize=VARIES)
def norm_forward_kernel(
    p_x, p_weight, p_y, num_rows, size, eps, BR: tl.constexpr, BN: tl.constexpr
):
    """y = x / sqrt(mean(x^2) + eps) weight. p_x, p_y (R, E); p_weight (E,)."""
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_weight, o_n, m_n)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        # [BR, BN]
        b_x = load_block(p_x, o, m)
        b_y = b_x * reciprocal_rms(b_x, size, eps) * b_weight
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=VARIES)
def norm_backward_kernel(
    p_dy, p_x, p_weight, p_dx, p_dweight, num_rows, size, eps, BR: tl.constexpr, BN: tl.constexpr
):
    """dx by `norm_gradient`, and a partial sum of dweight = sum dy x / rms(x).

    p_dy, p_x, p_dx (R, E); p_weight (E,); p_dweight (G, E).
    """
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_weight, o_n, m_n)
    b_dweight = tl.zeros([BR, BN], tl.float32)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        # [BR, BN]
        b_x, b_dy = load_block(p_x, o, m), load_block(p_dy, o, m)
        b_rms = reciprocal_rms(b_x, size, eps)
        b_dweight += b_dy * b_x * b_rms
        b_dx = norm_gradient(b_x, b_rms, b_dy, b_weight, size)
        tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)
    tl.store(p_dweight + tl.program_id(0) * size + o_n, tl.sum(b_dweight, 0), mask=m_n)


@triton.jit(do_not_specialize=VARIES)
def gated_norm_forward_kernel(
    p_in, p_y, num_rows, size, stride_gate, eps, gate_bias, BR: tl.constexpr, BN: tl.constexpr
):
    """y = RMSNorm((x + skip u) silu(gate + gate_bias)). p_in `GatedInputs`; p_y (R, E)."""
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_in.weight, o_n, m_n)
    if p_in.skip is not None:
        b_skip = load_vector(p_in.skip, o_n, m_n)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        # [BR, BN]
        b_x = load_block(p_in.x, o, m)
        b_gate = load_block(p_in.gate, o_r * stride_gate + o_n[None, :], m) + gate_bias
        if p_in.skip is not None:
            b_x += b_skip * load_block(p_in.u, o, m)
        b_z = b_x * b_gate * tl.sigmoid(b_gate)
        b_y = b_z * reciprocal_rms(b_z, size, eps) * b_weight
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=VARIES)
def gated_norm_backward_kernel(
    p_in, p_dy, p_din, num_rows, size, stride_gate, stride_dgate, eps, gate_bias,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """With z = (x + skip u) silu(gate): dx = dz silu, dgate = dz (x + skip u) silu', du = dx skip.

    p_in `GatedInputs`; p_dy (R, E); p_din `GatedGradients`, with partial dweight and dskip.
    """
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_in.weight, o_n, m_n)
    b_dweight = tl.zeros([BR, BN], tl.float32)
    if p_in.skip is not None:
        b_skip = load_vector(p_in.skip, o_n, m_n)
        b_dskip = tl.zeros([BR, BN], tl.float32)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        # [BR, BN]
        b_x, b_dy = load_block(p_in.x, o, m), load_block(p_dy, o, m)
        b_gate = load_block(p_in.gate, o_r * stride_gate + o_n[None, :], m) + gate_bias
        if p_in.skip is not None:
            b_u = load_block(p_in.u, o, m)
            b_x += b_skip * b_u
        b_sigmoid = tl.sigmoid(b_gate)
        b_silu = b_gate * b_sigmoid
        b_z = b_x * b_silu
        b_rms = reciprocal_rms(b_z, size, eps)
        b_dweight += b_dy * b_z * b_rms
        b_dz = norm_gradient(b_z, b_rms, b_dy, b_weight, size)
        b_dgate = b_dz * b_x * (b_sigmoid + b_silu * (1 - b_sigmoid))
        p_dgate = p_din.gate + o_r * stride_dgate + o_n[None, :]
        tl.store(p_dgate, b_dgate.to(p_din.gate.dtype.element_ty), mask=m)
        b_dx = b_dz * b_silu
        tl.store(p_din.x + o, b_dx.to(p_din.x.dtype.element_ty), mask=m)
        if p_in.skip is not None:
            b_dskip += b_dx * b_u
        if p_din.u is not None:
            tl.store(p_din.u + o, (b_dx * b_skip).to(p_din.u.dtype.element_ty), mask=m)
    o_part = tl.program_id(0) * size + o_n
    tl.store(p_din.weight + o_part, tl.sum(b_dweight, 0), mask=m_n)
    if p_in.skip is not None:
        tl.store(p_din.skip + o_part, tl.sum(b_dskip, 0), mask=m_n)
