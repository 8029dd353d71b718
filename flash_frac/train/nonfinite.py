"""Find the first non-finite tensor of a model, for the error that ends a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class NotFiniteError(RuntimeError):
    """A loss or gradient is not finite; the message names the first such tensor."""


def first_not_finite(model: nn.Module, inputs: Mapping[str, Any]) -> str:
    """The name of the first non-finite tensor, in the order of computation.

    Checks parameters and buffers; then the output of each module in a forward pass over `inputs`;
    then the gradients of the parameters, last to first. Existing gradients are overwritten.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _finite(tensor):
            return f"parameter {name}"
    found: list[str] = []
    handles = [
        module.register_forward_hook(_watch(name or "the model", found))
        for name, module in model.named_modules()
    ]
    try:
        model.zero_grad()
        loss = model(**inputs).loss
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"output of {found[0]}"
    loss.backward()
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"gradient of {name}"
    return "none in a second pass over the last batch"


def _watch(name: str, found: list[str]) -> Any:
    def look(module: nn.Module, arguments: Any, output: Any) -> None:
        if not all(map(_finite, _tensors(output))):
            found.append(name)

    return look


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
