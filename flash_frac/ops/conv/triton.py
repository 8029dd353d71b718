"""The Triton backend of the convolution: operators of torch.library and the launches behind them.

Letters: B batch, T time, I channels, K taps, N sequences (B, or those packed in a row).
"""

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator
from flash_frac.ops.conv.kernels import (
    conv_backward_kernel,
    conv_forward_kernel,
    conv_window_backward_kernel,
)
from flash_frac.ops.conv.walk import ConvInputs

# Tokens per segment and channels per program; a thread has two channels.
SEGMENT, CHANNELS = 64, 256
# Rows whose loads are in flight together.
FORWARD_ROWS, BACKWARD_ROWS = 8, 4


def triton_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `causal_conv`, without a mask: u (B, T, I) and the new window.

    Rows of x may be strided: half of a (B, T, 2 I) projection needs no copy.
    """
    if x.shape[2] > 1 and x.stride(2) != 1:
        x = x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    window = None if window is None else window.to(x.dtype).contiguous()
    return conv_op(x, weight, bias, window, cu_seqlens, sequence_of_tokens(cu_seqlens, x))


def sequence_of_tokens(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """The number of each token's sequence, (T,) int32, for packed x (1, T, I)."""
    if cu_seqlens is None:
        return None
    token = torch.arange(x.shape[1], dtype=cu_seqlens.dtype, device=x.device)
    return torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=True)


def triton_masked_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `causal_conv` with a mask, where no gradient is needed."""
    if x.shape[2] > 1 and x.stride(2) != 1:
        x = x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    window = None if window is None else window.to(x.dtype).contiguous()
    real = mask if mask.dtype == torch.bool else mask != 0
    return masked_conv_op(x, weight, bias, window, real.contiguous())


def _tile(num_channels: int) -> tuple[int, int, int]:
    """Channels per program, number of channel blocks, and warps."""
    block = min(CHANNELS, block_size(num_channels, smallest=1))
    return block, ceil_div(num_channels, block), max(1, block // 64)


@operator("causal_conv")
def conv_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """u (B, T, I) and the new windows (N, I, K - 1). Only rows of x may be strided."""
    num = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _convolve(ConvInputs(x, weight, bias, window, cu_seqlens, sequence), num)


def _convolve(inputs: ConvInputs, num: int) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel for `num` sequences."""
    x = inputs.x
    batch, num_tokens, num_channels = x.shape
    num_taps = inputs.weight.shape[-1]
    u = x.new_empty(x.shape)
    new = x.new_empty(num, num_channels, num_taps - 1)
    block, num_blocks, num_warps = _tile(num_channels)
    num_segments = ceil_div(num_tokens, SEGMENT)
    with torch.cuda.device_of(x):
        conv_forward_kernel[((batch * num_segments + num) * num_blocks,)](
            inputs, u, new,
            num_tokens, num_channels, num_segments, batch, x.stride(0), x.stride(1),
            K=num_taps, L=SEGMENT, U=FORWARD_ROWS, BI=block, num_warps=num_warps,
        )  # fmt: skip
    return u, new


@conv_op.register_fake
def _(x, weight, bias, window, cu_seqlens, sequence):
    num = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(num, x.shape[2], weight.shape[-1] - 1)


@operator("causal_conv_masked")
def masked_conv_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `conv_op`, for padded sequences and without a gradient; mask (B, T) bool."""
    inputs = ConvInputs(x, weight, bias, window, None, None, mask.view(torch.uint8))
    return _convolve(inputs, x.shape[0])


@masked_conv_op.register_fake
def _(x, weight, bias, window, mask):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], x.shape[2], weight.shape[-1] - 1)


@operator("causal_conv_backward", mutates=("dx",))
def conv_backward_op(
    du: Tensor,
    dnew: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
    dx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and window; empty for inputs that are None.

    If dx is given, whose rows may be strided, the gradient of x is written there, and its result is
    empty.
    """
    du, dnew = du.contiguous(), None if dnew is None else dnew.contiguous()
    batch, num_tokens, num_channels = x.shape
    num_taps = weight.shape[-1]
    block, num_blocks, num_warps = _tile(num_channels)
    num_segments = ceil_div(num_tokens, SEGMENT)
    found = x.new_empty(x.shape) if dx is None else dx
    shape = (batch * num_segments, num_taps + 1, num_channels)
    partial = x.new_empty(shape, dtype=torch.float32)
    dwindow = x.new_empty(0) if window is None else torch.empty_like(window)
    inputs = ConvInputs(x, weight, bias, window, cu_seqlens, sequence)
    with torch.cuda.device_of(x):
        conv_backward_kernel[(shape[0] * num_blocks,)](
            inputs, du, dnew, found, partial,
            num_tokens, num_channels, num_segments, *x.stride()[:2], *found.stride()[:2],
            K=num_taps, L=SEGMENT, U=BACKWARD_ROWS, BI=block, num_warps=num_warps,
        )  # fmt: skip
        if window is not None:
            conv_window_backward_kernel[(window.shape[0] * num_blocks,)](
                inputs, du, dnew, dwindow, num_tokens, num_channels, x.stride(0), x.stride(1),
                K=num_taps, BI=block, num_warps=num_warps,
            )  # fmt: skip
    total = partial.sum(0)
    dweight = total[:num_taps].t().unsqueeze(1).to(weight.dtype).contiguous()
    # A copy, because results of an operator must not share memory.
    dbias = x.new_empty(0) if bias is None else total[num_taps].to(bias.dtype, copy=True)
    return found if dx is None else x.new_empty(0), dweight, dbias, dwindow


@conv_backward_op.register_fake
def _(du, dnew, x, weight, bias, window, cu_seqlens, sequence, dx):
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    dwindow = x.new_empty(0) if window is None else torch.empty_like(window)
    found = x.new_empty(x.shape if dx is None else 0)
    return found, torch.empty_like(weight), dbias, dwindow


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _gradients(ctx, du, dnew):
    x, weight, bias, window, cu_seqlens, sequence = ctx.saved_tensors
    if du is None:
        du = x.new_zeros(x.shape)
    dx, dweight, dbias, dwindow = conv_backward_op(
        du, dnew, x, weight, bias, window, cu_seqlens, sequence, None
    )
    dbias = None if bias is None else dbias
    return dx, dweight, dbias, None if window is None else dwindow, None, None


conv_op.register_autograd(_gradients, setup_context=_save)
