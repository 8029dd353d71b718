"""When a layer's weights may be read directly, past the calls of its modules, and how.

Kernels that decode one token read weights themselves, and layers of one input are computed
together. They may not if something else is to be called: an adapter, a hook, a module that stands
for another.
Letters: B batch, T time, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.layers.conv import CausalConv1d
from flash_frac.layers.norm import RMSNorm
from flash_frac.ops import uses_triton

# Outputs of a joined product are a multiple of it.
ALIGNED = 8


def is_watched(module: nn.Module) -> bool:
    """Whether something waits for this module to be called: a hook, or offloading."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hasattr(module, "_hf_hook")
        or "forward" in vars(module)
    )


def has_plain_weight(module: nn.Module) -> TypeGuard[nn.Linear | CausalConv1d]:
    """Whether a layer is its weights and nothing else, such as an adapter.

    A weight of another class, such as one of integers and scales, is not what lies in its memory.
    """
    return type(module) in (nn.Linear, CausalConv1d) and type(module.weight) in (
        Tensor,
        nn.Parameter,
    )


def can_join(modules: Sequence[nn.Module]) -> bool:
    """Whether layers of one kind, which have no bias, may be computed as one."""
    return all(
        has_plain_weight(module)
        and _is_like(module.weight, modules[0].weight)  # pyright: ignore[reportArgumentType]
        and module.bias is None
        and not is_watched(module)
        for module in modules
    )


def joined_linear(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The outputs of linear layers of x (B, T, E), joined: by one product if they are plain.

    Each product alone is small beside reading x. For one token the weights are what is read, and
    joining them would read them twice.
    """
    if x.shape[1] == 1 or not can_join(modules):
        return torch.cat([module(x) for module in modules], -1)
    weights: list[Tensor] = [module.weight for module in modules]  # pyright: ignore
    size = sum(map(len, weights))
    # Tensor cores read rows of 16 bytes; cuBLAS has only slower kernels for other widths.
    weights.append(weights[0].new_zeros(-size % ALIGNED, x.shape[-1]))
    return F.linear(x, torch.cat(weights))[..., :size]


def steps_directly(
    module: nn.Module, x: Tensor, norm: nn.Module, parts: Sequence[nn.Module], backend: str
) -> bool:
    """Whether kernels may compute module(norm(x)), x (B, T, E), from the weights of its parts.

    That needs one token, no gradients, no autocast, Triton, plain parts and nobody who watches.
    """
    return (
        x.shape[1] == 1
        # Whatever else stands for a norm, such as a wrapper, is to be called.
        and type(norm) is RMSNorm
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and uses_triton(backend, x)
        and uses_triton(norm.backend, x)
        and all(has_plain_weight(part) and _is_like(part.weight, x) for part in parts)
        and not any(is_watched(watched) for watched in (norm, module, *parts))
    )


def _is_like(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == x.dtype and weight.device == x.device


def linear(
    x: Tensor, layer: nn.Linear, norm: RMSNorm | None = None, residual: Tensor | None = None
) -> Tensor:
    """residual + layer(norm(x)) of vectors (B, E), without gradients."""
    from flash_frac.ops.decode.triton import norm_linear

    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    return norm_linear(
        x, layer.weight, layer.bias, norm_weight=norm_weight, eps=eps, residual=residual
    )
