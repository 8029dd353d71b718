"""RMS norms in plain PyTorch, with statistics in float32 (float64 for float64 inputs).

    y = z / sqrt(mean(z^2) + eps) weight,       z = x   or   (x + D u) silu(gate + gate_bias)

The last axis is normalised; weight has its size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed and returned in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def torch_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Plain-torch form of `norm`, with the same arguments."""
    return rms_norm(x, weight, eps).to(dtype)


def torch_gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_bias: float,
    skip: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Plain-torch form of `gated_norm`, with the same arguments."""
    x = (x if skip is None else x + skip[0] * skip[1]).flatten(-2)
    dtype = torch.promote_types(gate.dtype, torch.float32)
    gated = x.to(dtype) * F.silu(gate.to(dtype) + gate_bias)
    return rms_norm(gated, weight, eps).to(gate.dtype)
