"""Choose the implementation of an operator.

`BACKENDS` is the table: a row is a backend, a column an operator. Only `choose` selects from it. A
backend requested by name runs or raises. "auto" takes the first of `AUTO_ORDER` that can run; the
logger "flash_frac.ops" reports the choice and its reason at level DEBUG. `Operator` registers a
kernel with torch.library.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.ops.control.reference import torch_controls
from flash_frac.ops.conv.reference import torch_conv
from flash_frac.ops.delta.chunk import chunk_delta
from flash_frac.ops.delta.reference import delta_step, recurrent_delta
from flash_frac.ops.norm.reference import torch_gated_norm, torch_norm
from flash_frac.ops.sample.reference import torch_sample
from flash_frac.ops.scan.chunk import chunk_scan
from flash_frac.ops.scan.reference import recurrent_scan, step
from flash_frac.ops.swiglu.reference import torch_swiglu

logger = logging.getLogger("flash_frac.ops")
# Evaluated once, because torch.compile cannot trace this check.
_HAS_TRITON = importlib.util.find_spec("triton") is not None

# Limits of the Triton kernels: taps of a convolution (Triton 3.4 cannot compile a single tap),
# width of a row that a norm program holds in registers, and key and value channels per head of the
# delta rule.
FEWEST_TAPS, MOST_TAPS, MOST_WIDTH = 2, 8, 8192
MOST_KEYS, MOST_VALUES = 128, 256


def _torch_loss(*arguments: Any) -> Tensor:
    from flash_frac.ops.loss.api import torch_loss

    return torch_loss(*arguments)


class Backend(NamedTuple):
    """One row of the table: an implementation of every operator.

    Attributes:
        scan, step: implement `frac_scan` and `frac_step`.
        delta, delta_step: implement `delta_scan` and `delta_step`.
        refusal: `refusal(x)` returns why the backend cannot run on tensors like x, or None.
        controls, conv, norm, gated_norm, swiglu, loss: the operators around the scan; a backend
            without its own uses the plain-torch form.
        masked_conv: implements `causal_conv` with a mask when no gradient is needed. If None,
            padding is moved out of the way instead.
        sample: implements `sample`, the choice of tokens.
        limits: further refusals by operator; each is called with x and the facts given to `choose`.
    """

    scan: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., tuple[Tensor, Tensor]]
    refusal: Callable[[Tensor], str | None]
    delta: Callable[..., tuple[Tensor, Tensor]] = chunk_delta
    delta_step: Callable[..., tuple[Tensor, Tensor]] = delta_step
    controls: Callable[..., Any] = torch_controls
    conv: Callable[..., tuple[Tensor, Tensor]] = torch_conv
    masked_conv: Callable[..., tuple[Tensor, Tensor]] | None = None
    norm: Callable[..., Tensor] = torch_norm
    gated_norm: Callable[..., Tensor] = torch_gated_norm
    swiglu: Callable[..., Tensor] = torch_swiglu
    loss: Callable[..., Tensor] = _torch_loss
    sample: Callable[..., tuple[Tensor, Tensor]] = torch_sample
    limits: Mapping[str, Callable[..., str | None]] = {}


# Operators on sequences; every backend honours their contracts (`tests/ops/test_contracts.py`).
OPERATORS = ("scan", "step", "delta", "delta_step", "controls")
OPERATORS += ("conv", "norm", "gated_norm", "swiglu")


def _runs_anywhere(x: Tensor) -> None:
    return None


def triton_refusal(x: Tensor) -> str | None:
    """Why a Triton kernel cannot run on tensors like x, or None."""
    # Checked before importing triton, which takes a second that CPU users need not wait.
    if x.device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return "Triton kernels need CUDA tensors, got cpu"
    if not _HAS_TRITON:
        return "triton is not installed"
    if _is_interpreted():
        # The interpreter's bfloat16 is silently wrong, and its float16 is untested.
        return None if x.dtype == torch.float32 else "the Triton interpreter computes float32 only"
    if x.device.type != "cuda":
        return f"Triton kernels need CUDA tensors, got {x.device}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"Triton kernels compute bfloat16, float16 and float32, got {x.dtype}"
    return None


def _is_interpreted() -> bool:
    from flash_frac.ops.arithmetic import INTERPRETED

    return INTERPRETED


def _conv_limit(x: Tensor, weight: Tensor) -> str | None:
    taps = weight.shape[-1]
    if FEWEST_TAPS <= taps <= MOST_TAPS:
        return None
    return f"the convolution's kernel takes {FEWEST_TAPS} to {MOST_TAPS} taps, got {taps}"


def _norm_limit(x: Tensor) -> str | None:
    width = x.shape[-1]
    return None if width <= MOST_WIDTH else f"the norm takes rows up to {MOST_WIDTH}, got {width}"


def _delta_limit(v: Tensor, k: Tensor) -> str | None:
    keys, values = k.shape[-1], v.shape[-1]
    if keys <= MOST_KEYS and values <= MOST_VALUES:
        return None
    most = f"{MOST_KEYS} key and {MOST_VALUES} value channels"
    return f"the delta rule's kernels take up to {most} of a head, got {keys} and {values}"


def _triton_scan(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.scan.triton import triton_scan

    return triton_scan(*arguments)


def _triton_step(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.scan.step import triton_step

    return triton_step(*arguments)


def _triton_delta(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.delta.triton import triton_delta

    return triton_delta(*arguments)


def _triton_delta_step(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.delta.triton import triton_delta_step

    return triton_delta_step(*arguments)


def _triton_controls(*arguments: Any) -> Any:
    from flash_frac.ops.control.triton import triton_controls

    return triton_controls(*arguments)


def _triton_conv(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.conv.triton import triton_conv

    return triton_conv(*arguments)


def _triton_masked_conv(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.conv.triton import triton_masked_conv

    return triton_masked_conv(*arguments)


def _triton_norm(*arguments: Any) -> Tensor:
    from flash_frac.ops.norm.triton import triton_norm

    return triton_norm(*arguments)


def _triton_gated_norm(*arguments: Any) -> Tensor:
    from flash_frac.ops.norm.triton import triton_gated_norm

    return triton_gated_norm(*arguments)


def _triton_swiglu(*arguments: Any) -> Tensor:
    from flash_frac.ops.swiglu.triton import triton_swiglu

    return triton_swiglu(*arguments)


def _triton_sample(*arguments: Any) -> tuple[Tensor, Tensor]:
    from flash_frac.ops.sample.triton import triton_sample

    return triton_sample(*arguments)


def _triton_loss(*arguments: Any) -> Tensor:
    from flash_frac.ops.loss.api import triton_loss

    return triton_loss(*arguments)


BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        scan=_triton_scan,
        step=_triton_step,
        refusal=triton_refusal,
        delta=_triton_delta,
        delta_step=_triton_delta_step,
        controls=_triton_controls,
        conv=_triton_conv,
        masked_conv=_triton_masked_conv,
        norm=_triton_norm,
        gated_norm=_triton_gated_norm,
        swiglu=_triton_swiglu,
        loss=_triton_loss,
        sample=_triton_sample,
        limits={
            "delta": _delta_limit,
            "delta_step": _delta_limit,
            "conv": _conv_limit,
            "masked_conv": _conv_limit,
            "norm": _norm_limit,
            "gated_norm": _norm_limit,
        },
    ),
    "recurrent": Backend(
        scan=recurrent_scan, step=step, refusal=_runs_anywhere, delta=recurrent_delta
    ),
    "torch": Backend(scan=chunk_scan, step=step, refusal=_runs_anywhere),
}
# "auto" takes the first of these that is in the table and can run.
AUTO_ORDER = ("triton", "torch")


def resolve_backend(backend: str, x: Tensor, operator: str = "scan", *facts: Any) -> str:
    """Return the name of the backend that runs on inputs like x; ValueError if none can.

    Args:
        backend: "auto", or a name in `BACKENDS`.
        x: the tensor whose device and dtype count.
        operator: a column of `BACKENDS`.
        facts: further arguments of the backend's limit on this operator.

    Example: `resolve_backend("auto", u)` is "triton" on a GPU.
    """
    if backend == "auto":
        refused = []
        for name in AUTO_ORDER:
            reason = _refusal(name, x, operator, facts) if name in BACKENDS else "not in BACKENDS"
            if reason is None:
                if not torch.compiler.is_compiling():
                    _log_choice(operator, name, *refused)
                return name
            refused.append(f"{name}: {reason}")
    if backend not in BACKENDS:
        names = ", ".join(repr(name) for name in ("auto", *BACKENDS))
        raise ValueError(f"backend must be one of {names}, got {backend!r}")
    if reason := _refusal(backend, x, operator, facts):
        raise ValueError(
            f"backend {backend!r} cannot run here: {reason}; use backend='auto' or 'torch'"
        )
    return backend


def _refusal(name: str, x: Tensor, operator: str, facts: Sequence[Any]) -> str | None:
    row = BACKENDS[name]
    reason = row.refusal(x)
    if reason is None and operator in row.limits:
        reason = row.limits[operator](x, *facts)
    return reason


@cache
def _log_choice(operator: str, name: str, *refused: str) -> None:
    """Log each choice and reason once: a model makes the same choice thousands of times."""
    reasons = f" ({'; '.join(refused)})" if refused else ""
    logger.debug("auto runs %s on %s%s", operator, name, reasons)


def choose(operator: str, backend: str, x: Tensor, *facts: Any) -> Callable[..., Any]:
    """Return the implementation of an operator for inputs like x; ValueError if none can run.

    Example: `choose("conv", "auto", x, weight)`
    """
    name = resolve_backend(backend, x, operator, *facts)
    # A kernel launch needs at least one program; plain torch returns the empty result.
    if x.numel() == 0 and operator not in ("scan", "step"):
        name = "torch"
    return getattr(BACKENDS[name], operator)


def uses_triton(backend: str, x: Tensor) -> bool:
    """Whether Triton kernels run on tensors like x, which must not be empty."""
    return resolve_backend(backend, x) == "triton" and x.numel() > 0


def refuse_second_derivative(what: str, remedy: str = "use backend='torch'") -> None:
    """Call in a backward pass: RuntimeError if that pass is itself to be differentiated.

    Otherwise the gradient would count as a constant, and a gradient penalty be silently wrong.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} is differentiable once, not with create_graph=True or in torch.func; {remedy}"
        )


class Operator:
    """The torch.library operator `flash_frac::name`; `kernel` takes a tensor as first argument.

    In eager mode torch's dispatcher takes longer than a launch, so plain tensors go to the kernel
    directly. Compilers, tensor subclasses and dispatch modes (FLOP counters, selective activation
    checkpointing) see the registered operator. Differentiating a gradient again, or using
    torch.func, raises.

    Attributes:
        registered: the torch.library operator.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], mutates: Sequence[str]) -> None:
        self.kernel = kernel
        self.registered = torch.library.custom_op(
            f"flash_frac::{name}", kernel, mutates_args=mutates
        )
        self._name, self._function = name, None
        self.__doc__ = kernel.__doc__

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """Register the function that gives shapes and dtypes of the results."""
        self.registered.register_fake(fake)

    def register_flops(self, count: Callable[..., int]) -> None:
        """Register the FLOP formula; its arguments are the operator's, with shapes for tensors."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
        from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

        packet = getattr(torch.ops.flash_frac, self._name)
        register_flop_formula(packet)(count)
        # A counter copies all formulas when it is created, but this operator may be loaded
        # later, by the first call under that counter.
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
                counter.flop_registry[packet] = flop_registry[packet]

    def register_autograd(
        self, gradients: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """Register, as in torch.library, what to save and the gradients of all arguments."""

        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            refuse_second_derivative(f"the Triton kernel of flash_frac::{self._name}")
            return gradients(ctx, *grad_outputs)

        self.registered.register_autograd(backward, setup_context=setup_context)

        # With a separate setup_context, torch would inspect the signature at every call.
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self.kernel(*arguments)
            setup_context(ctx, arguments, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function: Any = type(self._name, (torch.autograd.Function,), members)

    def __call__(self, *arguments: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or type(arguments[0]) is not Tensor
            or torch._C._len_torch_dispatch_stack() > 0
        ):
            return self.registered(*arguments)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"torch.func does not reach the Triton kernel of flash_frac::{self._name}; "
                "use backend='torch'"
            )
        if self._function is not None and torch.is_grad_enabled():
            return self._function.apply(*arguments)
        return self.kernel(*arguments)


def operator(name: str, *, mutates: Sequence[str] = ()) -> Callable[[Callable], Operator]:
    """Register the decorated function; `mutates` names the arguments that it writes to."""
    return lambda kernel: Operator(name, kernel, mutates)
