"""Which implementation of an operator runs.

`BACKENDS` is the table: a row is a backend, a column an operator. `choose` is the one place that
decides. A backend that is asked for by name runs or raises; "auto" takes the first of `AUTO_ORDER`
that can run, and says at level DEBUG of the logger "flash_frac.ops" which one that was, and why.
`Operator` registers a kernel with torch.library.
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
# Asked once, because torch.compile does not follow such questions.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None

# Limits of the Triton kernels: taps of a convolution (Triton 3.4 does not compile one tap), the
# width of a row that a program of the norm holds in registers, and the key and value channels of a
# head of the delta rule.
FEWEST_TAPS, MOST_TAPS, MOST_WIDTH = 2, 8, 8192
MOST_KEYS, MOST_VALUES = 128, 256


def _torch_loss(*arguments: Any) -> Tensor:
    from flash_frac.ops.loss import torch_loss

    return torch_loss(*arguments)


class Backend(NamedTuple):
    """One row of the table: an implementation of every operator.

    Attributes:
        scan, step: of `frac_scan` and `frac_step`.
        delta, delta_step: of `delta_scan` and `delta_step`.
        refusal: `refusal(x)` says why the backend cannot run on tensors like x, or None.
        controls, conv, norm, gated_norm, swiglu, loss: of the operators around the scan; a backend
            that does not have its own takes the plain-torch form.
        sample: of `sample`, the choice of tokens.
        limits: by operator, what else it refuses: called with x and the facts `choose` is given.
    """

    scan: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., tuple[Tensor, Tensor]]
    refusal: Callable[[Tensor], str | None]
    delta: Callable[..., tuple[Tensor, Tensor]] = chunk_delta
    delta_step: Callable[..., tuple[Tensor, Tensor]] = delta_step
    controls: Callable[..., Any] = torch_controls
    conv: Callable[..., tuple[Tensor, Tensor]] = torch_conv
    norm: Callable[..., Tensor] = torch_norm
    gated_norm: Callable[..., Tensor] = torch_gated_norm
    swiglu: Callable[..., Tensor] = torch_swiglu
    loss: Callable[..., Tensor] = _torch_loss
    sample: Callable[..., tuple[Tensor, Tensor]] = torch_sample
    limits: Mapping[str, Callable[..., str | None]] = {}


# The operators on sequences, whose contracts every backend keeps (`tests/ops/test_contracts.py`).
OPERATORS = ("scan", "step", "delta", "delta_step", "controls")
OPERATORS += ("conv", "norm", "gated_norm", "swiglu")


def _runs_anywhere(x: Tensor) -> None:
    return None


def triton_refusal(x: Tensor) -> str | None:
    """Why a Triton kernel cannot run on tensors like x, or None."""
    # Asked before triton is imported, which takes a second that a CPU does not need.
    if x.device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return "Triton kernels need CUDA tensors, got cpu"
    if not _HAS_TRITON:
        return "triton is not installed"
    if _is_interpreted():
        # Its bfloat16 is silently wrong, and its float16 untested.
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


def _loss_limit(hidden: Tensor, chunk_tokens: int | None) -> str | None:
    if not _HAS_LIGER:
        return "the fused loss is liger-kernel's, which is not installed (extra train)"
    if chunk_tokens is not None:
        return f"liger-kernel chooses its chunks itself, got chunk_tokens={chunk_tokens}"
    if torch.compiler.is_compiling():
        return "torch.compile does not follow liger-kernel"
    return None if hidden.is_cuda else f"liger-kernel needs CUDA tensors, got {hidden.device}"


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


def _liger_loss(*arguments: Any) -> Tensor:
    from flash_frac.ops.loss import liger_loss

    return liger_loss(*arguments)


BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        scan=_triton_scan,
        step=_triton_step,
        refusal=triton_refusal,
        delta=_triton_delta,
        delta_step=_triton_delta_step,
        controls=_triton_controls,
        conv=_triton_conv,
        norm=_triton_norm,
        gated_norm=_triton_gated_norm,
        swiglu=_triton_swiglu,
        loss=_liger_loss,
        sample=_triton_sample,
        limits={
            "delta": _delta_limit,
            "delta_step": _delta_limit,
            "conv": _conv_limit,
            "norm": _norm_limit,
            "gated_norm": _norm_limit,
            "loss": _loss_limit,
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
    """The name of the backend that `backend` stands for on inputs like x; ValueError if none.

    Args:
        backend: "auto", or a name in `BACKENDS`.
        x: the tensor that device and dtype are taken from.
        operator: a column of `BACKENDS`.
        facts: what else the backend's limit on this operator asks for.

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
    """Once for each choice and reason: a model makes thousands of the same."""
    reasons = f" ({'; '.join(refused)})" if refused else ""
    logger.debug("auto runs %s on %s%s", operator, name, reasons)


def choose(operator: str, backend: str, x: Tensor, *facts: Any) -> Callable[..., Any]:
    """The implementation of an operator, for inputs like x; ValueError if there is none.

    Example: `choose("conv", "auto", x, weight)`
    """
    name = resolve_backend(backend, x, operator, *facts)
    # A kernel needs at least one program: without elements the plain form gives the empty result.
    if x.numel() == 0 and operator not in ("scan", "step"):
        name = "torch"
    return getattr(BACKENDS[name], operator)


def uses_triton(backend: str, x: Tensor) -> bool:
    """Whether Triton kernels run on tensors like x, of which there must be an element."""
    return resolve_backend(backend, x) == "triton" and x.numel() > 0


def refuse_second_derivative(what: str, remedy: str = "use backend='torch'") -> None:
    """RuntimeError if a backward pass is itself to be differentiated, to be called in one.

    Without it the gradient would count as a constant, and a gradient penalty be wrong in silence.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{what} is differentiable once, not with create_graph=True or in torch.func; {remedy}"
        )


class Operator:
    """`flash_frac::name` of torch.library, computed by `kernel`, whose first argument is a tensor.

    In eager mode the way through torch's dispatcher takes longer than a launch, so plain tensors
    meet the kernel directly. Compilers, tensor subclasses and dispatch modes (FLOP counters,
    selective activation checkpointing) see the registered operator. A gradient cannot be
    differentiated again, nor torch.func be used: both raise.

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

    def register_flops(self, count: Callable[..., int]) -> None:
        """What torch.utils.flop_counter counts, from the arguments with shapes for tensors."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
        from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

        packet = getattr(torch.ops.flash_frac, self._name)
        register_flop_formula(packet)(count)
        # A counter copies all formulas when it is made. This operator may be loaded later, by the
        # first call under that counter.
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
                counter.flop_registry[packet] = flop_registry[packet]

    def register_autograd(
        self, gradients: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """As in torch.library: what to keep, and the gradients of all arguments."""

        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            refuse_second_derivative(f"the Triton kernel of flash_frac::{self._name}")
            return gradients(ctx, *grad_outputs)

        self.registered.register_autograd(backward, setup_context=setup_context)

        # A setup_context of its own would have torch inspect the signature at every call.
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
