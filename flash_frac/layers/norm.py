"""Root-mean-square norms, with statistics in float32 (float64 stays).

Letters: the last axis is normalised; weight has its size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.ops import uses_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed and returned in float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, in the dtype of x.

    `backend` is as in `frac_scan`; rows longer than a kernel takes (8192) are left to torch.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, backend: str = "auto") -> None:
        super().__init__()
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.ones(size))

    def _fused(self, x: Tensor) -> bool:
        if not uses_triton(self.backend, x):
            return False
        from flash_frac.ops.triton.norm import MAX_SIZE

        return x.shape[-1] <= MAX_SIZE

    def forward(self, x: Tensor) -> Tensor:
        if self._fused(x):
            from flash_frac.ops.custom_ops.norm import fused_rms_norm

            return fused_rms_norm(x.contiguous(), self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """y = RMSNorm((x + D u) * silu(gate + gate_bias)), in the dtype of the gate."""

    def __init__(
        self, size: int, eps: float = 1e-6, gate_bias: float = 0.0, *, backend: str = "auto"
    ) -> None:
        super().__init__(size, eps, backend=backend)
        self.gate_bias = gate_bias

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, gate: Tensor, skip: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """x, u: (B, T, H, D); gate: (B, T, H D); skip: the direct term as D (H, D) and u."""
        if self._fused(gate):
            from flash_frac.ops.custom_ops.norm import fused_gated_rms_norm

            x = x.flatten(-2)
            return fused_gated_rms_norm(x, gate, self.weight, self.eps, self.gate_bias, skip=skip)
        x = (x if skip is None else x + skip[0] * skip[1]).flatten(-2)
        dtype = torch.promote_types(gate.dtype, torch.float32)
        gated = x.to(dtype) * F.silu(gate.to(dtype) + self.gate_bias)
        return rms_norm(gated, self.weight, self.eps).to(gate.dtype)
