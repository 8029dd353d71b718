"""The depthwise causal convolution with SiLU as one operator, for tensors that Triton can take.

    u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k])

Letters: B batch, T time, I channels, K taps, N sequences (B, or those packed in a row).
"""

import torch
from torch import Tensor

from flash_frac.ops.api import check_cu_seqlens
from flash_frac.ops.custom_ops.operator import operator
from flash_frac.ops.triton.conv import MAX_TAPS, launch_conv_backward, launch_conv_forward
from flash_frac.ops.triton.launch import refusal


def fused_causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    window: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve, starting each sequence from its window; sums in float32.

    Args:
        x: (B, T, I), its last axis contiguous: half of a (B, T, 2 I) projection will do.
        weight: (I, 1, K), the last tap for the current token, K <= 8; bias: (I,) or None.
        window: (N, I, K - 1) inputs before the first token; zeros if None.
        cu_seqlens: (N + 1,) boundaries of packed sequences, B = 1.

    Returns:
        u (B, T, I) like x, contiguous, and the window (N, I, K - 1) after the last token.

    Example:
        >>> x, gate = in_proj(hidden).chunk(2, -1)
        >>> u, window = fused_causal_conv(x, conv1d.weight, conv1d.bias)
    """
    num = x.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, x)
    _check(x, weight, bias, window, num)
    sequence = None
    if cu_seqlens is not None:
        token = torch.arange(x.shape[1], dtype=cu_seqlens.dtype, device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=True)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    window = None if window is None else window.to(x.dtype).contiguous()
    return _causal_conv(x, weight, bias, window, cu_seqlens, sequence)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor | None, num: int) -> None:
    if reason := refusal(x):
        raise ValueError(f"fused_causal_conv cannot run here: {reason}")
    channels = x.shape[2]
    if channels > 1 and x.stride(2) != 1:
        raise ValueError(
            f"x must be contiguous in its last axis, got strides {x.stride()}; use x.contiguous()"
        )
    taps = weight.shape[-1]
    if weight.shape != (channels, 1, taps) or not 1 <= taps <= MAX_TAPS:
        raise ValueError(
            f"weight must have shape ({channels}, 1, K) with 1 <= K <= {MAX_TAPS}, "
            f"got {tuple(weight.shape)}"
        )
    for name, tensor, shape in (
        ("bias", bias, (channels,)),
        ("window", window, (num, channels, taps - 1)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


@operator("causal_conv")
def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return launch_conv_forward(x, weight, bias, window, cu_seqlens, sequence)


@_causal_conv.register_fake
def _(x, weight, bias, window, cu_seqlens, sequence):
    num = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(num, x.shape[2], weight.shape[-1] - 1)


@operator("causal_conv_backward")
def _causal_conv_backward(
    du: Tensor,
    dnew: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
    sequence: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and window; those of what is None are empty."""
    dnew = None if dnew is None else dnew.contiguous()
    dx, dweight, dbias, dwindow = launch_conv_backward(
        du.contiguous(), dnew, x, weight, bias, window, cu_seqlens, sequence
    )
    # A copy, because results of an operator must not share memory.
    dbias = x.new_empty(0) if bias is None else dbias.to(bias.dtype, copy=True)
    return dx, dweight, dbias, x.new_empty(0) if dwindow is None else dwindow


@_causal_conv_backward.register_fake
def _(du, dnew, x, weight, bias, window, cu_seqlens, sequence):
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    dwindow = x.new_empty(0) if window is None else torch.empty_like(window)
    return x.new_empty(x.shape), torch.empty_like(weight), dbias, dwindow


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _gradients(ctx, du, dnew):
    x, weight, bias, window, cu_seqlens, sequence = ctx.saved_tensors
    if du is None:
        du = x.new_zeros(x.shape)
    dx, dweight, dbias, dwindow = _causal_conv_backward(
        du, dnew, x, weight, bias, window, cu_seqlens, sequence
    )
    dbias = None if bias is None else dbias
    return dx, dweight, dbias, None if window is None else dwindow, None, None


_causal_conv.register_autograd(_gradients, setup_context=_save)
