"""silu(gate) up in plain PyTorch, in float32 (float64 for float64 inputs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Plain-torch form of `swiglu`, with the same arguments."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)
