"""Depthwise causal convolution over time and SiLU, with an explicit window of past inputs.

    u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k])

Letters: B batch, T time, I channels, K taps, N sequences (B, or those packed in a row).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.backends import choose
from flash_frac.ops.scan.api import check_cu_seqlens


class ConvOutput(NamedTuple):
    """u: (B, T, I); window: (N, I, K - 1), the last inputs of each sequence."""

    u: Tensor
    window: Tensor


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    window: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> ConvOutput:
    """Convolve, starting each sequence from its window.

    Args:
        x: (B, T, I) inputs.
        weight: (I, 1, K), the last tap for the current token; bias: (I,) or None.
        window: (N, I, K - 1) inputs before the first token; zeros if None.
        mask: (B, T), 0 at padding. Padding is skipped: real tokens are convolved as if it were
            not there.
        cu_seqlens: (N + 1,) boundaries of packed sequences, B = 1; excludes a mask.
        backend: as in `frac_scan`; "triton" takes 2 to 8 taps.

    Example: `u, window = causal_conv(x, conv1d.weight, conv1d.bias)`
    """
    num = x.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, x)
    _check(x, weight, bias, window, mask, cu_seqlens, num)
    convolve = choose("conv", backend, x, weight)
    if mask is None:
        return ConvOutput(*convolve(x, weight, bias, window, cu_seqlens))
    masked = choose("masked_conv", backend, x, weight)
    if masked is not None and not _wants_gradient(x, weight, bias, window):
        return ConvOutput(*masked(x, weight, bias, window, mask))
    past = weight.shape[-1] - 1
    if window is None:
        window = x.new_zeros(num, x.shape[2], past)
    # Real tokens first, in order, so that no padding lies between them.
    real = mask != 0
    count = real.sum(1, keepdim=True)
    slot = torch.where(real, real.cumsum(1), count + (~real).cumsum(1)) - 1
    token = torch.arange(x.shape[1], device=x.device).expand_as(slot)
    packed = _take(x, torch.empty_like(slot).scatter_(1, slot, token))
    u = _take(convolve(packed, weight, bias, window, None)[0], slot)
    # The output of all-zero inputs: as in the published code, padding does not output 0.
    idle = u.new_zeros(()) if bias is None else F.silu(bias).to(u.dtype)
    u = torch.where(real[..., None], u, idle)
    # The last K - 1 of the old window and the real tokens after it.
    last = count + torch.arange(past, device=x.device)
    old = _take(window.to(x.dtype).transpose(1, 2), last.clamp_max(past - 1))
    new = _take(packed, (last - past).clamp_min(0))
    return ConvOutput(u, torch.where(last[..., None] < past, old, new).transpose(1, 2))


def _wants_gradient(*tensors: Tensor | None) -> bool:
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    return torch.is_grad_enabled() and len(wanted) > 0


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, T, I) by index (B, S): (B, S, I)."""
    return x.gather(1, _rows(index, x))


def _rows(index: Tensor, x: Tensor) -> Tensor:
    """The row index (B, S), expanded to all channels of x."""
    return index[..., None].expand(-1, -1, x.shape[2])


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    num: int,
) -> None:
    if x.ndim != 3:
        raise ValueError(f"x must have shape (B, T, I), got {tuple(x.shape)}")
    if mask is not None and cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens cannot be combined; packed rows need no mask")
    channels, taps = x.shape[2], weight.shape[-1]
    for name, tensor, shape in (
        ("weight", weight, (channels, 1, taps)),
        ("bias", bias, (channels,)),
        ("window", window, (num, channels, taps - 1)),
        ("mask", mask, tuple(x.shape[:2])),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
