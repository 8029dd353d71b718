"""Root-mean-square norms as operators, for tensors that Triton can take.

    y = z / sqrt(mean(z^2) + eps) weight,    z = x,   x + residual   or   (x + D u) silu(gate)

Letters: the last axis is normalised, up to 8192 long; B batch, T time, I = H D inner width. Here D
in a shape is the channels of a head, and `D` the skip of the paper.
"""

from itertools import pairwise

import torch
from torch import Tensor

from flash_frac.ops.custom_ops.operator import operator
from flash_frac.ops.triton.launch import refusal
from flash_frac.ops.triton.norm import (
    MAX_SIZE,
    launch_gated_norm_backward,
    launch_gated_norm_forward,
    launch_norm_backward,
    launch_norm_forward,
)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(x) in the dtype of x, contiguous (..., E), with weight (E,)."""
    _check("fused_rms_norm", {"x": x}, weight)
    return _rms_norm(x, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm(x + residual), and x + residual; in the wider dtype of the two.

    Args:
        x, residual: (..., E), contiguous.
        weight: (E,).
    """
    _check("fused_add_rms_norm", {"x": x, "residual": residual}, weight)
    return _add_rms_norm(x, residual, weight, eps)


def fused_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_bias: float = 0.0,
    *,
    skip: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """RMSNorm((x + D u) silu(gate + gate_bias)), in the dtype of the gate.

    Args:
        x: (B, T, I), contiguous.
        gate: (B, T, I), its last axis contiguous and its rows evenly apart: half of a (B, T, 2 I)
            projection will do.
        weight: (I,).
        skip: D (H, D) and u (B, T, I) or (B, T, H, D), contiguous; None to leave D u out.

    Example:
        >>> x, gate = in_proj(hidden).chunk(2, -1)
        >>> y = fused_gated_rms_norm(scanned, gate, norm.weight, norm.eps, skip=(mixer.D, u))
    """
    d, u = (None, None) if skip is None else (skip[0].contiguous(), skip[1].flatten(x.ndim - 1))
    rows = {"x": x} if u is None else {"x": x, "u": u}
    _check("fused_gated_rms_norm", rows, weight)
    if gate.shape != x.shape:
        raise ValueError(f"gate must have shape {tuple(x.shape)}, got {tuple(gate.shape)}")
    if d is not None and d.numel() != weight.numel():
        raise ValueError(f"D must have {weight.numel()} elements, got {tuple(d.shape)}")
    if _row_stride(gate) is None:
        raise ValueError(
            "gate must be contiguous in its last axis and have rows evenly apart, "
            f"got strides {gate.stride()}; use gate.contiguous()"
        )
    return _gated_rms_norm(x, gate, weight, d, u, eps, gate_bias)


def _check(function: str, rows: dict[str, Tensor], weight: Tensor) -> None:
    x = rows["x"]
    if reason := refusal(x):
        raise ValueError(f"{function} cannot run here: {reason}")
    for name, tensor in rows.items():
        if tensor.shape != x.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must have shape {tuple(x.shape)} and be contiguous, "
                f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if x.shape[-1] > MAX_SIZE:
        raise ValueError(f"rows must be at most {MAX_SIZE} long, got {x.shape[-1]}")
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(
            f"weight must have shape ({x.shape[-1]},) and be contiguous, "
            f"got {tuple(weight.shape)} with strides {weight.stride()}"
        )


def _row_stride(x: Tensor) -> int | None:
    """Elements from row to row of x (..., E); None if there is no one such number."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    # Axes of size 1 have strides without meaning.
    axes = [i for i in range(x.ndim - 1) if x.shape[i] != 1]
    for i, j in pairwise(axes):
        if x.stride(i) != x.stride(j) * x.shape[j]:
            return None
    return x.stride(axes[-1]) if axes else x.shape[-1]


@operator("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return launch_norm_forward(x, None, weight, eps)[0]


@_rms_norm.register_fake
def _(x, weight, eps):
    return torch.empty_like(x)


@operator("add_rms_norm")
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, z = launch_norm_forward(x, residual, weight, eps)
    assert z is not None
    return y, z


@_add_rms_norm.register_fake
def _(x, residual, weight, eps):
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
    return y, torch.empty_like(y)


@operator("rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, dz: Tensor | None, z: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dz = None if dz is None else dz.contiguous()
    return launch_norm_backward(dy.contiguous(), dz, z, weight, eps)


@_rms_norm_backward.register_fake
def _(dy, dz, z, weight, eps):
    return torch.empty_like(z), torch.empty_like(weight)


def _save_norm(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _norm_gradients(ctx, dy):
    x, weight = ctx.saved_tensors
    return *_rms_norm_backward(dy, None, x, weight, ctx.eps), None


def _save_add_norm(ctx, inputs, output) -> None:
    x, residual, weight, ctx.eps = inputs
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _add_norm_gradients(ctx, dy, dz):
    z, weight = ctx.saved_tensors
    dy = torch.zeros_like(z) if dy is None else dy
    dx, dweight = _rms_norm_backward(dy, dz, z, weight, ctx.eps)
    return *(dx.to(dtype) for dtype in ctx.dtypes), dweight, None


_rms_norm.register_autograd(_norm_gradients, setup_context=_save_norm)
_add_rms_norm.register_autograd(_add_norm_gradients, setup_context=_save_add_norm)


@operator("gated_rms_norm")
def _gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    u: Tensor | None,
    eps: float,
    gate_bias: float,
) -> Tensor:
    stride = _row_stride(gate)
    assert stride is not None
    return launch_gated_norm_forward(x, gate, weight, skip, u, eps, gate_bias, stride)


@_gated_rms_norm.register_fake
def _(x, gate, weight, skip, u, eps, gate_bias):
    return torch.empty_like(x, dtype=gate.dtype)


@operator("gated_rms_norm_backward")
def _gated_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    u: Tensor | None,
    eps: float,
    gate_bias: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate, weight, skip and u; those of what is None are empty."""
    stride = _row_stride(gate)
    assert stride is not None
    dx, dgate, dweight, dskip, du = launch_gated_norm_backward(
        dy.contiguous(), x, gate, weight, skip, u, eps, gate_bias, stride
    )
    dskip = x.new_empty(0) if dskip is None else dskip
    return dx, dgate, dweight, dskip, x.new_empty(0) if du is None else du


@_gated_rms_norm_backward.register_fake
def _(dy, x, gate, weight, skip, u, eps, gate_bias):
    dgate = torch.empty_like(x, dtype=gate.dtype)
    dskip, du = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (skip, u))
    return torch.empty_like(x), dgate, torch.empty_like(weight), dskip, du


def _save_gated(ctx, inputs, output) -> None:
    *tensors, ctx.eps, ctx.gate_bias = inputs
    ctx.save_for_backward(*tensors)


def _gated_gradients(ctx, dy):
    tensors = ctx.saved_tensors
    *gradients, dskip, du = _gated_rms_norm_backward(dy, *tensors, ctx.eps, ctx.gate_bias)
    if tensors[3] is None:
        dskip = du = None
    return *gradients, dskip, du, None, None


_gated_rms_norm.register_autograd(_gated_gradients, setup_context=_save_gated)
