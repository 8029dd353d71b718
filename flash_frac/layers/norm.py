"""Root-mean-square norms as modules. Letters: the last axis is normalised; weight has its size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_frac.ops.norm.api import gated_norm, norm
from flash_frac.ops.norm.reference import rms_norm


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight, in the dtype of x; `backend` is as in `frac_scan`.

    Under autocast, y of a float32 x has autocast's dtype; otherwise each linear layer that reads it
    would cast it again.
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


class ModeRMSNorm(nn.Module):
    """Logits of reads and of writes, each divided by its rms over the modes of its head.

    Like query and key norms of attention: how sharply modes are chosen no longer depends on the
    size of a projection but on the weight (2 M,), for reads then writes, shared by all heads.
    """

    def __init__(self, num_modes: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.num_modes, self.eps = num_modes, eps
        # One-dimensional, because plain training loops exclude such weights from weight decay.
        self.weight = nn.Parameter(torch.ones(2 * num_modes))

    def forward(self, logits: Tensor) -> Tensor:
        """Norm logits (..., 2 H M) of any number of heads, in their dtype."""
        of_modes = logits.unflatten(-1, (2, -1, self.num_modes))
        weight = self.weight.view(2, 1, self.num_modes)
        return rms_norm(of_modes, weight, self.eps).flatten(-3).to(logits.dtype)


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
