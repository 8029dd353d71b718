"""When and how to read a layer's weights directly, without calling its modules.

Kernels that decode one token read weights themselves, and layers with the same input are computed
together. That is not allowed if something else must be called: an adapter, a hook, or a replaced
module. The kernels also read torchao's int8 and fp8 weights with one scale per row.
Letters: B batch, T time, E inputs and O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flash_frac.layers.branches import in_branches
from flash_frac.layers.conv import CausalConv1d
from flash_frac.layers.norm import RMSNorm
from flash_frac.ops import uses_triton

# The outputs of a joined product are padded to a multiple of this.
ALIGNED = 8
# torchao's weight classes that kernels read, by name, so that it need not be installed.
QUANTISED = {"Int8Tensor": torch.int8, "Float8Tensor": torch.float8_e4m3fn}
# The first compute capability that converts 8-bit floats.
FP8_CAPABILITY = (8, 9)


class Stored(NamedTuple):
    """A weight as stored in memory.

    Attributes:
        values: (O, E), of 8 bits if quantised.
        scale: (O,), the factors of quantised rows; None otherwise.
    """

    values: Tensor
    scale: Tensor | None = None


def stored(weight: Tensor) -> Stored | None:
    """The stored form of a linear layer's weight; None if kernels cannot read it.

    Quantised weights are supported if torchao's defaults made them: int8 or float8_e4m3fn, one
    scale per row, unquantised inputs. Their zero points are zeros, which torchao ignores too.

    Example: `stored(mixer.in_proj.weight).values.dtype`
    """
    kind = type(weight)
    if kind in (Tensor, nn.Parameter):
        return Stored(weight)
    if kind.__module__ != "torchao.quantization" or kind.__name__ not in QUANTISED:
        return None
    given: Any = weight
    reads_inputs = (getattr(given, x, None) for x in ("act_quant_kwargs", "act_pre_scale"))
    if (
        any(x is not None for x in reads_inputs)
        or given.qdata.dtype is not QUANTISED[kind.__name__]
        or given.qdata.ndim != 2
        or list(given.block_size) != [1, given.qdata.shape[1]]
        or not given.qdata.is_contiguous()
        or not _converts(given.qdata)
    ):
        return None
    return Stored(given.qdata, given.scale.flatten())


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of a tensor: itself, or values and scales if it is quantised."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def _converts(values: Tensor) -> bool:
    """Whether the device of quantised values has instructions for their dtype."""
    if values.dtype is torch.int8 or values.device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(values.device) >= FP8_CAPABILITY


def is_watched(module: nn.Module) -> bool:
    """Whether something relies on calls of this module: a hook of it or of all, or offloading."""
    return bool(
        nn.modules.module._has_any_global_hook()
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "_hf_hook" in vars(module)
        or "forward" in vars(module)
    )


def has_plain_weight(module: nn.Module) -> TypeGuard[nn.Linear | CausalConv1d]:
    """Whether a layer is only its weights, without an adapter or the like.

    A weight of another class, such as one of integers and scales, is not plain; see `stored`.
    """
    return type(module) in (nn.Linear, CausalConv1d) and type(module.weight) in (
        Tensor,
        nn.Parameter,
    )


def can_join(modules: Sequence[nn.Module]) -> bool:
    """Whether layers of one kind, without biases, may be computed as one."""
    return all(
        has_plain_weight(module)
        and _is_like(module.weight, modules[0].weight)  # pyright: ignore[reportArgumentType]
        and module.bias is None
        and not is_watched(module)
        for module in modules
    )


def joined_linear(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """The concatenated outputs of linear layers on x (B, T, E), in one product if they are plain.

    For many tokens, reading x dominates, so one product is faster. For one token, reading weights
    dominates, and concatenating them would read them twice.
    """
    if x.shape[1] == 1 or not can_join(modules):
        return torch.cat([module(x) for module in modules], -1)
    weights: list[Tensor] = [module.weight for module in modules]  # pyright: ignore
    size = sum(map(len, weights))
    # Tensor cores read rows of 16 bytes; cuBLAS is slower for other widths.
    weights.append(weights[0].new_zeros(-size % ALIGNED, x.shape[-1]))
    return F.linear(x, torch.cat(weights))[..., :size]


def steps_directly(
    module: nn.Module, x: Tensor, norm: nn.Module, parts: Sequence[nn.Module], backend: str
) -> bool:
    """`runs_directly` for one token."""
    return x.shape[1] == 1 and runs_directly(module, x, norm, parts, backend)


def runs_directly(
    module: nn.Module, x: Tensor, norm: nn.Module, parts: Sequence[nn.Module], backend: str
) -> bool:
    """Whether kernels may compute module(norm(x)), x (B, T, E), from the weights of its parts.

    That requires Triton, no gradients, no autocast, no hooks, and parts that are plain except for
    quantised weights.
    """
    return (
        # Anything else in place of a norm, such as a wrapper, must be called.
        type(norm) is RMSNorm
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and uses_triton(backend, x)
        and uses_triton(norm.backend, x)
        and all(_is_read(part) and _is_like(part.weight, x) for part in parts)
        and not any(is_watched(watched) for watched in (norm, module, *parts))
    )


def _is_read(module: nn.Module) -> TypeGuard[nn.Linear | CausalConv1d]:
    """Whether a layer is only a bias and a weight that kernels can read."""
    is_linear = type(module) is nn.Linear and stored(module.weight) is not None
    return is_linear or has_plain_weight(module)


def _is_like(weight: Tensor, x: Tensor) -> bool:
    # A quantised weight keeps its original dtype even if the model is cast.
    plain = type(weight) in (Tensor, nn.Parameter)
    return weight.device == x.device and (weight.dtype == x.dtype or not plain)


def linear(
    x: Tensor, layer: nn.Linear, norm: RMSNorm | None = None, residual: Tensor | None = None
) -> Tensor:
    """residual + layer(norm(x)) of vectors (B, E), without gradients."""
    from flash_frac.ops.decode.linear import norm_linear

    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    weight = stored(layer.weight)
    assert weight is not None, "steps_directly"
    return norm_linear(
        x,
        weight.values,
        layer.bias,
        scale=weight.scale,
        norm_weight=norm_weight,
        eps=eps,
        residual=residual,
    )


def call_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), x (B, T, E); to decode one token, a kernel reads quantised weights.

    torchao would first expand them to the dtype of x, and move five times as many bytes.
    """
    if (
        # Test this first, so that compiled plain models have no guard on sizes.
        type(layer) is nn.Linear
        and type(layer.weight) not in (Tensor, nn.Parameter)
        and x.shape[1] == 1
        and stored(layer.weight) is not None
        and _is_like(layer.weight, x)
        and not is_watched(layer)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and uses_triton("auto", x)
    ):
        return linear(x[:, 0], layer)[:, None]
    return layer(x)


def linears(x: Tensor, layers: Sequence[nn.Linear], norm: RMSNorm) -> list[Tensor]:
    """layer(norm(x)) of vectors (B, E) for each of the layers, without gradients."""
    from flash_frac.ops.decode.plan import MOST_VECTORS
    from flash_frac.ops.norm.triton import triton_norm

    # Every kernel that reads a few vectors norms them itself, which saves a launch.
    few = x.shape[0] <= MOST_VECTORS
    inputs = x if few else triton_norm(x, norm.weight, norm.eps, x.dtype)
    return in_branches(*(partial(linear, inputs, each, norm if few else None) for each in layers))
