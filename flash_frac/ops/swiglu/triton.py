"""The Triton backend of `swiglu`: operators of torch.library and the launches behind them.

liger-kernel has this operator too. Ours needs no extra dependency for inference and decoding,
supports torch.compile and dispatch modes through `Operator`, and takes strided halves of a
projection.
Letters: E width of a row.
"""

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div, row_stride
from flash_frac.ops.backends import operator
from flash_frac.ops.swiglu.kernels import swiglu_backward_kernel, swiglu_forward_kernel

# Elements per program, and the most of them along a row.
TILE, LONGEST_ROW = 2048, 1024


def triton_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Backend "triton" of `swiglu`, with the same arguments."""
    gate, up = (x if row_stride(x) is not None else x.contiguous() for x in (gate, up))
    return swiglu_op(gate, up)


def _launch(gate: Tensor, up: Tensor) -> tuple[tuple[int], dict[str, int | None]]:
    """Grid, sizes, strides and launch options."""
    size = gate.shape[-1]
    num_rows = gate.numel() // size
    width = min(block_size(size, smallest=1), LONGEST_ROW)
    rows = TILE // width
    strides = {"stride_gate": row_stride(gate), "stride_up": row_stride(up)}
    options = {"BR": rows, "BN": width, "num_warps": 4}
    grid = (ceil_div(num_rows, rows) * ceil_div(size, width),)
    return grid, {"num_rows": num_rows, "size": size, **strides, **options}


@operator("swiglu")
def swiglu_op(gate: Tensor, up: Tensor) -> Tensor:
    """y like gate, contiguous. Rows of gate and up may be strided."""
    y = gate.new_empty(gate.shape)
    grid, options = _launch(gate, up)
    with torch.cuda.device_of(gate):
        swiglu_forward_kernel[grid](gate, up, y, **options)
    return y


@swiglu_op.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


@operator("swiglu_backward")
def swiglu_backward_op(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, contiguous."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    grid, options = _launch(gate, up)
    with torch.cuda.device_of(gate):
        swiglu_backward_kernel[grid](dy.contiguous(), gate, up, dgate, dup, **options)
    return dgate, dup


@swiglu_backward_op.register_fake
def _(dy, gate, up):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, dy):
    return swiglu_backward_op(dy, *ctx.saved_tensors)


swiglu_op.register_autograd(_gradients, setup_context=_save)
