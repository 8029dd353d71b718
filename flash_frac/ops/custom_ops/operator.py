"""Operators of torch.library, called past its dispatcher where nothing listens to it.

In eager mode the way through the dispatcher takes longer than a launch, so plain tensors meet the
functions directly. Compilers, fake tensors and other subclasses see the registered operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Operator:
    """`flash_frac::name`, computed by `kernel`, whose first argument is a tensor.

    Attributes:
        registered: the operator of torch.library.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], mutates: Sequence[str]) -> None:
        self.kernel = kernel
        self.registered = torch.library.custom_op(
            f"flash_frac::{name}", kernel, mutates_args=mutates
        )
        self._name, self._function = name, None
        self.__doc__ = kernel.__doc__

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Shapes and dtypes of the results."""
        self.registered.register_fake(fake)

    def register_autograd(
        self, gradients: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """As in torch.library: what to keep, and the gradients of all arguments."""
        self.registered.register_autograd(gradients, setup_context=setup_context)

        # A setup_context of its own would have torch inspect the signature at every call.
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self.kernel(*arguments)
            setup_context(ctx, arguments, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        self._function: Any = type(self._name, (torch.autograd.Function,), members)

    def __call__(self, *arguments: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or type(arguments[0]) is not Tensor
            or torch._C._are_functorch_transforms_active()
        ):
            return self.registered(*arguments)
        if self._function is not None and torch.is_grad_enabled():
            return self._function.apply(*arguments)
        return self.kernel(*arguments)


def operator(name: str, *, mutates: Sequence[str] = ()) -> Callable[[Callable], Operator]:
    """Register the decorated function; `mutates` names the arguments that it writes to."""
    return lambda kernel: Operator(name, kernel, mutates)
