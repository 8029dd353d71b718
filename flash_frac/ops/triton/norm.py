"""Kernels of the root-mean-square norms, plain, after a residual sum, or after a gate.

    y = z / sqrt(mean(z^2) + eps) weight,    z = x,   x + residual   or   (x + skip u) silu(gate)

Statistics are float32. Programs are as many as the machine runs at once and take BR rows of a
block BN at a time, so that weights stay in registers. Backward, each leaves its part of the
gradients of weight and skip, which torch sums: no atomics, hence deterministic.
"""

# Kernels are not the Python that pyright takes them for.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.triton.launch import block_size, ceil_div

MAX_SIZE = 8192
# Elements of a block of rows, at least, and elements of it that a thread holds: more in the forward
# kernels, which have registers to spare. Most warps for a block.
FORWARD, BACKWARD, MAX_WARPS = (4096, 32), (2048, 8), 16
# Warps on a multiprocessor; the gradient of the gated norm fills the registers with half.
WARPS, GATED_BACKWARD_WARPS = 32, 16
# Programs where there are no multiprocessors, in the interpreter.
INTERPRETED_PROGRAMS = 3


@triton.jit
def load_vector(p, o_n, m_n):
    """[1, BN], float32."""
    return tl.load(p + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_block(p, o, m):
    """[BR, BN], float32."""
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


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


@triton.jit(do_not_specialize=["num_rows"])
def norm_forward_kernel(
    p_x, p_residual, p_weight, p_y, p_z, num_rows, size, eps, BR: tl.constexpr, BN: tl.constexpr
):
    """y, and with a residual z = x + residual."""
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_weight, o_n, m_n)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        b_z = load_block(p_x, o, m)
        if p_residual is not None:
            b_sum = (b_z + load_block(p_residual, o, m)).to(p_z.dtype.element_ty)
            tl.store(p_z + o, b_sum, mask=m)
            # What backward and the next layer will read.
            b_z = b_sum.to(tl.float32)
        b_y = b_z * reciprocal_rms(b_z, size, eps) * b_weight
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    p_dy, p_dz, p_z, p_weight, p_dx, p_dweight, num_rows, size, eps,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx, with the gradient p_dz that z received elsewhere added, and a part of dweight."""
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_weight, o_n, m_n)
    b_dweight = tl.zeros([BR, BN], tl.float32)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        b_z, b_dy = load_block(p_z, o, m), load_block(p_dy, o, m)
        b_rms = reciprocal_rms(b_z, size, eps)
        b_dweight += b_dy * b_z * b_rms
        b_dx = norm_gradient(b_z, b_rms, b_dy, b_weight, size)
        if p_dz is not None:
            b_dx += load_block(p_dz, o, m)
        tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)
    p_part = p_dweight + tl.program_id(0) * size + o_n
    tl.store(p_part, tl.sum(b_dweight, 0), mask=m_n)


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_forward_kernel(
    p_x, p_gate, p_weight, p_skip, p_u, p_y, num_rows, size, stride_gate, eps, gate_bias,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_weight, o_n, m_n)
    if p_skip is not None:
        b_skip = load_vector(p_skip, o_n, m_n)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        b_x = load_block(p_x, o, m)
        b_gate = load_block(p_gate, o_r * stride_gate + o_n[None, :], m) + gate_bias
        if p_skip is not None:
            b_x += b_skip * load_block(p_u, o, m)
        b_z = b_x * b_gate * tl.sigmoid(b_gate)
        b_y = b_z * reciprocal_rms(b_z, size, eps) * b_weight
        tl.store(p_y + o, b_y.to(p_y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_backward_kernel(
    p_dy, p_x, p_gate, p_weight, p_skip, p_u, p_dx, p_dgate, p_du, p_dweight, p_dskip,
    num_rows, size, stride_gate, eps, gate_bias,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx, dgate and with a skip du; parts of dweight and dskip."""
    o_n = tl.arange(0, BN)
    m_n = o_n < size
    b_weight = load_vector(p_weight, o_n, m_n)
    b_dweight = tl.zeros([BR, BN], tl.float32)
    if p_skip is not None:
        b_skip = load_vector(p_skip, o_n, m_n)
        b_dskip = tl.zeros([BR, BN], tl.float32)
    for i_block in range(tl.program_id(0), tl.cdiv(num_rows, BR), tl.num_programs(0)):
        o_r, m = block_rows(i_block, num_rows, m_n, BR)
        o = o_r * size + o_n[None, :]
        b_x, b_dy = load_block(p_x, o, m), load_block(p_dy, o, m)
        b_gate = load_block(p_gate, o_r * stride_gate + o_n[None, :], m) + gate_bias
        if p_skip is not None:
            b_u = load_block(p_u, o, m)
            b_x += b_skip * b_u
        b_sigmoid = tl.sigmoid(b_gate)
        b_silu = b_gate * b_sigmoid
        b_z = b_x * b_silu
        b_rms = reciprocal_rms(b_z, size, eps)
        b_dweight += b_dy * b_z * b_rms
        b_dz = norm_gradient(b_z, b_rms, b_dy, b_weight, size)
        b_dgate = b_dz * b_x * (b_sigmoid + b_silu * (1 - b_sigmoid))
        tl.store(p_dgate + o, b_dgate.to(p_dgate.dtype.element_ty), mask=m)
        b_dx = b_dz * b_silu
        tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)
        if p_skip is not None:
            b_dskip += b_dx * b_u
            tl.store(p_du + o, (b_dx * b_skip).to(p_du.dtype.element_ty), mask=m)
    o_part = tl.program_id(0) * size + o_n
    tl.store(p_dweight + o_part, tl.sum(b_dweight, 0), mask=m_n)
    if p_skip is not None:
        tl.store(p_dskip + o_part, tl.sum(b_dskip, 0), mask=m_n)


def tile(
    x: Tensor, shape: tuple[int, int], warps_on_a_processor: int = WARPS
) -> tuple[int, int, int, int]:
    """Rows of a block, its width, warps, and number of programs, for the rows of x."""
    width = block_size(x.shape[-1], smallest=1)
    block, per_thread = shape
    rows = max(1, block // width)
    num_warps = min(max(1, rows * width // (32 * per_thread)), MAX_WARPS)
    num_blocks = ceil_div(x.numel() // x.shape[-1], rows)
    if not x.is_cuda:
        return rows, width, num_warps, min(num_blocks, INTERPRETED_PROGRAMS)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    at_once = processors * max(1, warps_on_a_processor // num_warps)
    return rows, width, num_warps, min(num_blocks, at_once)


def launch_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """y in the dtype of z, and z = x + residual if there is one. All contiguous."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y = torch.empty_like(x, dtype=dtype)
    z = None if residual is None else torch.empty_like(y)
    rows, width, num_warps, num_programs = tile(x, FORWARD)
    size = x.shape[-1]
    with torch.cuda.device_of(x):
        norm_forward_kernel[(num_programs,)](
            x, residual, weight, y, z, x.numel() // size, size, eps,
            BR=rows, BN=width, num_warps=num_warps,
        )  # fmt: skip
    return y, z


def launch_norm_backward(
    dy: Tensor, dz: Tensor | None, z: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """dx (also of the residual) like z, and dweight."""
    dx = torch.empty_like(z)
    rows, width, num_warps, num_programs = tile(z, BACKWARD)
    size = z.shape[-1]
    partial = z.new_empty(num_programs, size, dtype=torch.float32)
    with torch.cuda.device_of(z):
        norm_backward_kernel[(num_programs,)](
            dy, dz, z, weight, dx, partial, z.numel() // size, size, eps,
            BR=rows, BN=width, num_warps=num_warps,
        )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def launch_gated_norm_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    u: Tensor | None,
    eps: float,
    gate_bias: float,
    stride_gate: int,
) -> Tensor:
    """y in the dtype of gate, whose rows are stride_gate apart; the rest is contiguous."""
    y = torch.empty_like(x, dtype=gate.dtype)
    rows, width, num_warps, num_programs = tile(x, FORWARD)
    size = x.shape[-1]
    with torch.cuda.device_of(x):
        gated_norm_forward_kernel[(num_programs,)](
            x, gate, weight, skip, u, y,
            x.numel() // size, size, stride_gate, eps, gate_bias,
            BR=rows, BN=width, num_warps=num_warps,
        )  # fmt: skip
    return y


def launch_gated_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    u: Tensor | None,
    eps: float,
    gate_bias: float,
    stride_gate: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dx, dgate (contiguous), dweight, and if there is a skip its gradient and du."""
    dx, dgate = torch.empty_like(x), torch.empty_like(x, dtype=gate.dtype)
    du = None if u is None else torch.empty_like(u)
    rows, width, num_warps, num_programs = tile(x, BACKWARD, GATED_BACKWARD_WARPS)
    size = x.shape[-1]
    dweight = x.new_empty(num_programs, size, dtype=torch.float32)
    dskip = None if skip is None else torch.empty_like(dweight)
    with torch.cuda.device_of(x):
        gated_norm_backward_kernel[(num_programs,)](
            dy, x, gate, weight, skip, u, dx, dgate, du, dweight, dskip,
            x.numel() // size, size, stride_gate, eps, gate_bias,
            BR=rows, BN=width, num_warps=num_warps,
        )  # fmt: skip
    if skip is not None and dskip is not None:
        dskip = dskip.sum(0).view(skip.shape).to(skip.dtype)
    return dx, dgate, dweight.sum(0).to(weight.dtype), dskip, du
