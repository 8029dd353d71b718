"""Depthwise causal convolution over time and SiLU, with an explicit window of past inputs.

    u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k])

Letters: B batch, T time, I channels, K taps, N sequences (B, or those packed in a row).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops import uses_triton


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
        mask: (B, T), 0 at padding. Padding is stepped over: real tokens are convolved as if it
            were not there.
        cu_seqlens: (N + 1,) boundaries of packed sequences, B = 1; excludes a mask.
        backend: as in `frac_scan`. Rows with a mask, and other than 2 to 8 taps, are left to torch.
    """
    num_taps = weight.shape[-1]
    # The kernel could do with one tap too, but Triton 3.4 does not compile that.
    if mask is None and num_taps > 1 and uses_triton(backend, x):
        from flash_frac.ops.custom_ops.conv import MAX_TAPS, fused_causal_conv

        if num_taps <= MAX_TAPS:
            conv = fused_causal_conv(x, weight, bias, window=window, cu_seqlens=cu_seqlens)
            return ConvOutput(*conv)
    past = num_taps - 1
    num = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if window is None:
        window = x.new_zeros(num, x.shape[2], past)
    before = window.to(x.dtype).transpose(1, 2)
    if cu_seqlens is not None:
        return _packed(x, weight, bias, before, cu_seqlens.long())
    if mask is None:
        inputs = torch.cat([before, x], 1)
        u = _convolve(inputs, weight, bias)
        return ConvOutput(u, inputs[:, inputs.shape[1] - past :].transpose(1, 2))
    # Real tokens first, in order; then what follows them is padding, and none lies between.
    order = (mask == 0).to(torch.uint8).argsort(dim=1, stable=True)
    inputs = torch.cat([before, _take(x, order)], 1)
    u = _take(_convolve(inputs, weight, bias), order.argsort(1))
    # What a zero input after zeros gives; as in the published code, the output at padding is not 0.
    idle = u.new_zeros(()) if bias is None else F.silu(bias).to(u.dtype)
    u = torch.where((mask == 0)[..., None], idle, u)
    last = (mask != 0).sum(1, keepdim=True) + torch.arange(past, device=x.device)
    return ConvOutput(u, _take(inputs, last).transpose(1, 2))


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, T, I) by index (B, S): (B, S, I)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, T + K - 1, I) -> (B, T, I), summed in float32.

    Shifted sums beat a grouped convolution several times over on a CPU, for a handful of taps.
    """
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    num_taps = weight.shape[-1]
    num_tokens = inputs.shape[1] - num_taps + 1
    taps, wide = weight[:, 0].to(dtype), inputs.to(dtype)
    total = wide[:, :num_tokens] * taps[:, 0]
    for k in range(1, num_taps):
        total = torch.addcmul(total, wide[:, k : k + num_tokens], taps[:, k])
    total = total if bias is None else total + bias
    return F.silu(total).to(inputs.dtype)


def _packed(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, cu_seqlens: Tensor
) -> ConvOutput:
    """Each sequence follows its own window in one long row, so that one convolution serves all."""
    num, past, channels = before.shape
    num_tokens = x.shape[1]
    token = torch.arange(num_tokens, device=x.device)
    sequence = torch.searchsorted(cu_seqlens, token, right=True) - 1
    ends = cu_seqlens[1:] + past * torch.arange(1, num + 1, device=x.device)
    recent = torch.arange(past, device=x.device)
    starts = cu_seqlens[:-1] + past * torch.arange(num, device=x.device)
    row = x.new_zeros(num_tokens + num * past, channels)
    row = row.index_copy(0, token + past * (sequence + 1), x[0])
    row = row.index_copy(0, (starts[:, None] + recent).flatten(), before.flatten(0, 1))
    u = _convolve(row[None], weight, bias)[:, token + past * sequence]
    return ConvOutput(u, row[ends[:, None] - past + recent].transpose(1, 2))
