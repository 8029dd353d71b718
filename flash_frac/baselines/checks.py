"""What every baseline asks of its sizes and inputs, and how they start their time steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def check_sizes(**sizes: int) -> None:
    """Raise unless all sizes are at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_input(x: Tensor, hidden_size: int) -> None:
    """Raise unless x is (B, T, hidden_size) with at least one token."""
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x must have shape (B, T, {hidden_size}), got {tuple(x.shape)}")
    if x.shape[1] == 0:
        raise ValueError("x must hold at least one token, got none; leave the call out")


def check_state(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless a tensor of a state has the expected shape."""
    if tensor.shape != expected:
        raise ValueError(
            f"state.{name} must have shape {expected}, got {tuple(tensor.shape)}; "
            "is the state of another model or batch?"
        )


def initial_dt_bias(num_heads: int) -> nn.Parameter:
    """(H,) biases b with softplus(b) log-uniform in [1e-3, 0.1], as in all three recurrences."""
    low, high = math.log(1e-3), math.log(0.1)
    dt = torch.exp(low + (high - low) * torch.rand(num_heads, dtype=torch.float32))
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
