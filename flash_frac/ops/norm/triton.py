"""The Triton backend of the norms: operators of torch.library and the launches behind them.

Letters: E width of a row, B batch, T time, H heads, D head channels, I = H D inner width.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div, row_stride
from flash_frac.ops.backends import operator
from flash_frac.ops.norm.kernels import (
    GatedGradients,
    GatedInputs,
    gated_norm_backward_kernel,
    gated_norm_forward_kernel,
    norm_backward_kernel,
    norm_forward_kernel,
)


class Tile(NamedTuple):
    """How rows are tiled: minimum elements of a block, and elements per thread.

    warps: number of warps that a multiprocessor should run at once.
    """

    block: int
    per_thread: int
    warps: int


# The forward kernels have registers to spare; the gradient of the gated norm uses all of them with
# half of the warps.
FORWARD = Tile(block=4096, per_thread=32, warps=32)
BACKWARD = Tile(block=2048, per_thread=8, warps=32)
GATED_BACKWARD = Tile(block=2048, per_thread=8, warps=16)
MOST_WARPS = 16
# Number of programs in the interpreter, which has no multiprocessors.
INTERPRETED_PROGRAMS = 3


def triton_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Backend "triton" of `norm`, with the same arguments."""
    return norm_op(x.contiguous(), weight.contiguous(), eps, dtype)


def triton_gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_bias: float,
    skip: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Backend "triton" of `gated_norm`, with the same arguments."""
    d, u = (
        (None, None) if skip is None else (x.contiguous() for x in (skip[0], skip[1].flatten(-2)))
    )
    gate = gate if row_stride(gate) is not None else gate.contiguous()
    x = x.flatten(-2).contiguous()
    return gated_norm_op(x, gate, weight.contiguous(), d, u, eps, gate_bias)


def _launch(x: Tensor, tile: Tile) -> tuple[tuple[int], dict[str, int]]:
    """Grid, block sizes and launch options for the rows of x."""
    size = x.shape[-1]
    return _plan(x.numel() // size, size, tile, x.device)


@lru_cache(maxsize=1024)
def _plan(
    num_rows: int, size: int, tile: Tile, device: torch.device
) -> tuple[tuple[int], dict[str, int]]:
    """Cached, because computing it in Python takes as long as a launch."""
    width = block_size(size, smallest=1)
    rows = max(1, tile.block // width)
    num_warps = min(max(1, rows * width // (32 * tile.per_thread)), MOST_WARPS)
    num_blocks = ceil_div(num_rows, rows)
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        at_once = processors * max(1, tile.warps // num_warps)
    else:
        at_once = INTERPRETED_PROGRAMS
    options = {"BR": rows, "BN": width, "num_warps": num_warps}
    return (min(num_blocks, at_once),), {"num_rows": num_rows, "size": size, **options}


@operator("rms_norm")
def norm_op(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """y like x, in this dtype. All tensors are contiguous."""
    y = torch.empty_like(x, dtype=dtype)
    grid, options = _launch(x, FORWARD)
    with torch.cuda.device_of(x):
        norm_forward_kernel[grid](x, weight, y, eps=eps, **options)
    return y


@norm_op.register_fake
def _(x, weight, eps, dtype):
    return torch.empty_like(x, dtype=dtype)


@operator("rms_norm_backward")
def norm_backward_op(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    dx = torch.empty_like(x)
    grid, options = _launch(x, BACKWARD)
    dweight = x.new_empty(*grid, x.shape[-1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        norm_backward_kernel[grid](dy.contiguous(), x, weight, dx, dweight, eps=eps, **options)
    return dx, dweight.sum(0).to(weight.dtype)


@norm_backward_op.register_fake
def _(dy, x, weight, eps):
    return torch.empty_like(x), torch.empty_like(weight)


def _save_norm(ctx, inputs, output) -> None:
    x, weight, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _norm_gradients(ctx, dy):
    return *norm_backward_op(dy, *ctx.saved_tensors, ctx.eps), None, None


norm_op.register_autograd(_norm_gradients, setup_context=_save_norm)


@operator("gated_rms_norm")
def gated_norm_op(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    u: Tensor | None,
    eps: float,
    gate_bias: float,
) -> Tensor:
    """y in the dtype of gate. Rows of gate may be strided; the rest is contiguous."""
    y = torch.empty_like(x, dtype=gate.dtype)
    stride_gate = row_stride(gate)
    grid, options = _launch(x, FORWARD)
    with torch.cuda.device_of(x):
        gated_norm_forward_kernel[grid](
            GatedInputs(x, gate, weight, skip, u), y,
            stride_gate=stride_gate, eps=eps, gate_bias=gate_bias, **options,
        )  # fmt: skip
    return y


@gated_norm_op.register_fake
def _(x, gate, weight, skip, u, eps, gate_bias):
    return torch.empty_like(x, dtype=gate.dtype)


@operator("gated_rms_norm_backward", mutates=("dgate",))
def gated_norm_backward_op(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    skip: Tensor | None,
    u: Tensor | None,
    eps: float,
    gate_bias: float,
    dgate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gate (contiguous), weight, skip and u; empty for inputs that are None.

    If dgate is given, whose rows may be strided, the gradient of gate is written there and that of
    u is left out; both results are empty.
    """
    given, new = dgate is not None, x.new_empty
    grid, options = _launch(x, GATED_BACKWARD)
    partial = (*grid, x.shape[-1])
    gradients = GatedGradients(
        x=torch.empty_like(x),
        gate=torch.empty_like(x, dtype=gate.dtype) if dgate is None else dgate,
        u=None if u is None or given else torch.empty_like(u),
        weight=new(partial, dtype=torch.float32),
        skip=None if skip is None else new(partial, dtype=torch.float32),
    )
    with torch.cuda.device_of(x):
        gated_norm_backward_kernel[grid](
            GatedInputs(x, gate, weight, skip, u), dy.contiguous(), gradients,
            stride_gate=row_stride(gate), stride_dgate=row_stride(gradients.gate),
            eps=eps, gate_bias=gate_bias, **options,
        )  # fmt: skip
    dweight, dskip = gradients.weight.sum(0).to(weight.dtype), new(0)
    if skip is not None and gradients.skip is not None:
        dskip = gradients.skip.sum(0).view(skip.shape).to(skip.dtype)
    du = new(0) if gradients.u is None else gradients.u
    return gradients.x, new(0) if given else gradients.gate, dweight, dskip, du


@gated_norm_backward_op.register_fake
def _(dy, x, gate, weight, skip, u, eps, gate_bias, dgate):
    given, new = dgate is not None, x.new_empty
    found = new(0) if given else torch.empty_like(x, dtype=gate.dtype)
    du = new(0) if given or u is None else torch.empty_like(u)
    dskip = new(0) if skip is None else torch.empty_like(skip)
    return torch.empty_like(x), found, torch.empty_like(weight), dskip, du


def _save_gated(ctx, inputs, output) -> None:
    *tensors, ctx.eps, ctx.gate_bias = inputs
    ctx.save_for_backward(*tensors)


def _gated_gradients(ctx, dy):
    tensors = ctx.saved_tensors
    *gradients, dskip, du = gated_norm_backward_op(dy, *tensors, ctx.eps, ctx.gate_bias, None)
    if tensors[3] is None:
        dskip = du = None
    return *gradients, dskip, du, None, None


gated_norm_op.register_autograd(_gated_gradients, setup_context=_save_gated)
