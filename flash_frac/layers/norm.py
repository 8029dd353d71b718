"""Root-mean-square norms as modules. Letters: the last axis is normalised; weight has its size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_frac.ops.norm.api import gated_norm, norm


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, in the dtype of x; `backend` is as in `frac_scan`.

    In an autocast region y of a float32 x has the region's dtype: the linear layers that read it
    would cast it to that, each for itself.
    """

    def __init__(self, size: int, eps: float = 1e-6, *, backend: str = "auto") -> None:
        super().__init__()
        self.eps, self.backend = eps, backend
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        if dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        return norm(x, self.weight, self.eps, dtype=dtype, backend=self.backend)


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
        return gated_norm(
            x, gate, self.weight, self.eps, self.gate_bias, skip=skip, backend=self.backend
        )
