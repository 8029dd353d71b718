"""Layers that are their weights and nothing else, which may be computed together.

A layer that something else waits for must be called: an adapter stands in its place, a hook moves
its weights, or its weights are stored as integers and scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.layers.conv import CausalConv1d

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_watched(module: nn.Module) -> bool:
    """Whether something waits for this module to be called: a hook, or offloading."""
    return (
        any(getattr(module, name) for name in _HOOKS)
        or hasattr(module, "_hf_hook")
        or "forward" in vars(module)
    )


def is_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether a layer is its weights and nothing else, such as an adapter.

    A weight of another class, such as one of integers and scales, is not what lies in its memory.
    """
    return (
        type(module) in (nn.Linear, CausalConv1d)
        and type(module.weight) in (Tensor, nn.Parameter)
        and module.weight.dtype == x.dtype
        and module.weight.device == x.device
    )


def can_join(modules: Sequence[nn.Module]) -> bool:
    """Whether layers of one kind, which have no bias, may be computed as one."""
    first = getattr(modules[0], "weight", None)
    return isinstance(first, Tensor) and all(
        is_plain(module, first) and module.bias is None and not is_watched(module)  # pyright: ignore
        for module in modules
    )


def joined_linear(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The outputs of linear layers of x (B, T, E), joined: by one product if they are plain.

    Each product alone is small beside reading x. For one token the weights are what is read, and
    joining them would read them twice.
    """
    if x.shape[1] == 1 or not can_join(modules):
        return torch.cat([module(x) for module in modules], -1)
    return F.linear(x, torch.cat([module.weight for module in modules]))  # pyright: ignore
