"""Root-mean-square norms, with statistics in float32 (float64 stays).

Letters: the last axis is normalised; weight has its size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed and returned in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, in the dtype of x."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """y = RMSNorm(x * silu(gate + gate_bias)), in the dtype of the gate."""

    def __init__(self, size: int, eps: float = 1e-6, gate_bias: float = 0.0) -> None:
        super().__init__(size, eps)
        self.gate_bias = gate_bias

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = torch.promote_types(gate.dtype, torch.float32)
        gated = x.to(dtype) * F.silu(gate.to(dtype) + self.gate_bias)
        return rms_norm(gated, self.weight, self.eps).to(gate.dtype)
