"""Linear layers on a few vectors, in Triton only and without gradients.

Weights may be quantised: int8 or float8_e4m3fn, with one scale per row.

Letters: B batch, E inputs and O outputs of a layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator
from flash_frac.ops.decode.gemv import LinearStep, gemv_kernel, swiglu_gemv_kernel
from flash_frac.ops.decode.kernels import ConvStep
from flash_frac.ops.decode.plan import MOST_VECTORS, QUANTISED
from flash_frac.ops.decode.triton import check_step, early_options
from flash_frac.ops.norm.triton import triton_norm

# Up to MOST_VECTORS, tensor cores win beyond this number of 16-bit weights times vectors, because
# each vector reads all weights (one H200, docs/log.md). 8-bit weights have no such limit: for a
# product they are dequantised, which moves five times the bytes that the kernel reads. Not measured
# yet.
MOST_READ = 2**24
# Matrix elements that a program has in flight, and the most of them along a row. 8-bit weights have
# twice as many, for the same number of bytes.
GEMV_TILE, LONGEST_ROW = 8192, 2048


def fused_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """residual + weight RMSNorm(x) + bias, rounded once at the end. No gradient.

    Args:
        x: (B, E), last axis contiguous, at most MOST_VECTORS rows.
        weight: (O, E), contiguous; bias: (O,) or None.
        scale: (O,), one factor per row of a quantised weight (a dtype of QUANTISED).
        norm_weight: (E,) of the norm, with its eps; None for no norm.
        residual: (B, O), contiguous, or None.
        early: as in `fused_control_step`.

    Returns:
        (B, O), in the dtype of x.
    """
    _check_vectors(x)
    (batch, size), num_outputs = x.shape, weight.shape[0]
    shapes = [("weight", weight, (num_outputs, size)), ("bias", bias, (num_outputs,))]
    shapes += [("norm_weight", norm_weight, (size,)), ("residual", residual, (batch, num_outputs))]
    check_step("fused_norm_linear", x, [*shapes, ("scale", scale, (num_outputs,))])
    _check_scale("weight", weight, scale)
    return norm_linear_op(x, weight, scale, bias, norm_weight, eps, residual, early)


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_norm_linear` for any number of vectors; many vectors use tensor cores."""
    num = x.shape[0]
    little = num == 1 or scale is not None or num * weight.numel() <= MOST_READ
    if num <= MOST_VECTORS and little:
        options = {"scale": scale, "norm_weight": norm_weight, "eps": eps, "residual": residual}
        return fused_norm_linear(x, weight, bias, **options)
    if norm_weight is not None:
        x = triton_norm(x, norm_weight, eps, x.dtype)
    if scale is not None:
        weight = _dequantised(weight, scale, x.dtype)
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def _dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights (O, E) in a dtype, rounded once.

    Scaled before a product and not after it: sums of unscaled values exceed float16.
    """
    # One kernel reads int8 and writes the result; torch does not multiply float8 by other dtypes.
    values = weight if weight.dtype is torch.int8 else weight.to(dtype)
    return torch.mul(values, scale[:, None], out=weight.new_empty(weight.shape, dtype=dtype))


def fused_norm_swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
) -> Tensor:
    """silu(gate_weight n) (up_weight n), n = RMSNorm(x), rounded once at the end. No gradient.

    Args:
        x: (B, E), last axis contiguous, at most MOST_VECTORS rows.
        gate_weight, up_weight: (O, E), contiguous.
        norm_weight: (E,) of the norm, with its eps.
        gate_scale, up_scale: (O,), as in `fused_norm_linear`.

    Returns:
        (B, O), in the dtype of x.
    """
    _check_vectors(x)
    size, num_outputs = x.shape[1], gate_weight.shape[0]
    shapes: list = [("gate_weight", gate_weight, (num_outputs, size))]
    shapes += [("up_weight", up_weight, (num_outputs, size)), ("norm_weight", norm_weight, (size,))]
    scales = {"gate_scale": gate_scale, "up_scale": up_scale}
    shapes += [(name, scale, (num_outputs,)) for name, scale in scales.items()]
    check_step("fused_norm_swiglu", x, shapes)
    _check_scale("gate_weight", gate_weight, gate_scale)
    _check_scale("up_weight", up_weight, up_scale)
    return norm_swiglu_op(x, gate_weight, up_weight, gate_scale, up_scale, norm_weight, eps)


def _check_scale(name: str, weight: Tensor, scale: Tensor | None) -> None:
    if (weight.dtype in QUANTISED) != (scale is not None):
        given = "a scale" if scale is not None else "no scale"
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in QUANTISED)
        raise ValueError(
            f"{name} of {kinds} has a scale, any other none; got {weight.dtype} and {given}"
        )


def _check_vectors(x: Tensor) -> None:
    if x.ndim != 2 or x.shape[0] > MOST_VECTORS:
        raise ValueError(
            f"x must be at most {MOST_VECTORS} vectors (B, E), got shape {tuple(x.shape)}"
        )


@operator("norm_linear")
def norm_linear_op(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    early: bool = False,
) -> Tensor:
    """y (B, O) in the dtype of x, whose rows may be apart; the rest is contiguous."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    layer = LinearStep(x, norm_weight, weight, scale, bias, residual, y)
    launch_gemv(layer, eps=eps, early=early)
    return y


def launch_gemv(
    first: LinearStep,
    second: LinearStep | None = None,
    conv: ConvStep | None = None,
    *,
    eps: float = 0.0,
    early: bool,
) -> None:
    """Run one or two layers with equally many inputs; conv is of the first outputs of the first."""
    rows, options = _gemv_options(first.weight, GEMV_TILE)
    (num_outputs, size), batch = first.weight.shape, first.x.shape[0]
    blocks, num_second, stride_second = ceil_div(num_outputs, rows), 0, 0
    if second is not None:
        num_second, stride_second = second.weight.shape[0], second.x.stride(0)
        blocks += ceil_div(num_second, rows)
    num_channels, taps = (0, 1) if conv is None else (conv.u.shape[1], conv.weight.shape[-1])
    with torch.cuda.device_of(first.x):
        gemv_kernel[(batch, blocks)](
            first, second, conv, num_outputs, num_second, E=size, stride_x=first.x.stride(0),
            stride_x2=stride_second, eps=eps, num_channels=num_channels, K=taps, EARLY=early,
            **options, **early_options(early),
        )  # fmt: skip


def _gemv_options(weight: Tensor, tile: int) -> tuple[int, dict[str, int]]:
    """Matrix rows per program, block sizes and launch options."""
    num_outputs, size = weight.shape
    length = min(block_size(size), LONGEST_ROW)
    # Few outputs are spread over more programs, to occupy all multiprocessors.
    spread, packed = num_outputs < 2048, 2 if weight.itemsize == 1 else 1
    rows = 1 if spread else packed * tile // length
    return rows, {"BO": rows, "BE": length, "num_warps": 4 if spread else 4 * packed}


@norm_linear_op.register_fake
def _(x, weight, scale, bias, norm_weight, eps, residual, early=False):
    return x.new_empty(x.shape[0], weight.shape[0])


@operator("norm_swiglu")
def norm_swiglu_op(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """y (B, O) in the dtype of x, whose rows may be apart; the rest is contiguous."""
    batch, (num_outputs, size) = x.shape[0], gate_weight.shape
    y = x.new_empty(batch, num_outputs)
    # Each of the two matrices gets half of the tile.
    rows, options = _gemv_options(gate_weight, GEMV_TILE // 2)
    with torch.cuda.device_of(x):
        swiglu_gemv_kernel[(batch, ceil_div(num_outputs, rows))](
            x, norm_weight, gate_weight, up_weight, gate_scale, up_scale, y, num_outputs,
            E=size, stride_x=x.stride(0), eps=eps, **options,
        )  # fmt: skip
    return y


@norm_swiglu_op.register_fake
def _(x, gate_weight, up_weight, gate_scale, up_scale, norm_weight, eps):
    return x.new_empty(x.shape[0], gate_weight.shape[0])
