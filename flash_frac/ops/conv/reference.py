"""The convolution in plain PyTorch: depthwise, causal, then SiLU.

    u[t] = silu(bias + sum_k weight[k] x[t - K + 1 + k])

Letters: B batch, T time, I channels, K taps, N sequences (B, or those packed in a row).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def torch_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Plain-torch form of `causal_conv`, without a mask: u (B, T, I) and the new window."""
    past = weight.shape[-1] - 1
    num = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if window is None:
        window = x.new_zeros(num, x.shape[2], past)
    before = window.to(x.dtype).transpose(1, 2)
    if cu_seqlens is not None:
        return _packed(x, weight, bias, before, cu_seqlens.long())
    inputs = torch.cat([before, x], 1)
    u = _convolve(inputs, weight, bias)
    return u, inputs[:, inputs.shape[1] - past :].transpose(1, 2)


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(B, T + K - 1, I) -> (B, T, I), summed in float32.

    With a handful of taps, shifted sums are several times faster than a grouped CPU convolution.
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
) -> tuple[Tensor, Tensor]:
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
    return u, row[ends[:, None] - past + recent].transpose(1, 2)
