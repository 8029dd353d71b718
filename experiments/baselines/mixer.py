"""The base class of the baselines, and the initialisation of their time steps.

Letters: B batch, T time, E width, H heads, D head channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Mixer(nn.Module):
    """Sizes and input checks of every baseline.

    Args:
        hidden_size: width E of input and output.
        num_heads: H.
        head_dim: D.
        sizes: further sizes that must be at least 1, by name.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, **sizes: int) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim, **sizes}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim

    def check(self, x: Tensor, state: Any, **shapes: tuple[int, ...]) -> None:
        """Raise unless x is (B, T, E) with at least one token, and the state matches it.

        Args:
            shapes: of the state's tensors without their first axis, B, by name.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x must have shape (B, T, {self.hidden_size}), got {tuple(x.shape)}")
        if x.shape[1] == 0:
            raise ValueError("x must hold at least one token, got none; leave the call out")
        for name, shape in () if state is None else shapes.items():
            tensor, expected = getattr(state, name), (x.shape[0], *shape)
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
