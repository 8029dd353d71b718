"""Our fused head and loss against those of other libraries, forward and backward.

Inputs are hidden states and head of the 1.3B model (E 2048, V 32000) in bfloat16, with gradients of
both. Each loss is first checked against float64 on 4,096 tokens; a row's error is that of the
weight gradient, and its column D is E. Letters: B batch, T time, E width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.bench.rows import make_row
from flash_frac.bench.timing import OURS, attempt, peak_mib, runnable, time_in_turns
from flash_frac.ops.loss.api import linear_cross_entropy
from flash_frac.ops.testing import relative_error
from flash_frac.provenance import version_of

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
WIDTH, VOCABULARY = 2048, 32000


def two_steps(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's head and loss, with all logits in memory; float64 inputs stay float64."""
    logits = hidden @ weight.T
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def liger(accum_dtype: torch.dtype | None) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore
        LigerFusedLinearCrossEntropyFunction as function,
    )

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        defaults = (None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)
        return function.apply(hidden, weight, labels, *defaults)[0]

    return loss


def cut(filter_eps: float | str | None) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as function  # pyright: ignore

    return partial(function, filter_eps=filter_eps)


def losses(failures: list[str], *, peers: bool) -> dict[str, Loss]:
    """Our losses, and those of other libraries that can be imported."""
    found: dict[str, Loss] = {
        f"{OURS} linear_cross_entropy, {name}": partial(linear_cross_entropy, backend=name)
        for name in ("triton", "torch")
    }
    if not peers:
        return found
    makers = {
        f"torch {version_of('torch')} linear, cross_entropy": lambda: two_steps,
        f"liger {version_of('liger_kernel')}": partial(liger, None),
        f"liger {version_of('liger_kernel')}, float32 sums": partial(liger, torch.float32),
        f"cut_cross_entropy {version_of('cut_cross_entropy')}": partial(cut, "high"),
        f"cut_cross_entropy {version_of('cut_cross_entropy')}, no filter": partial(cut, None),
    }
    for name, make in makers.items():
        for loss in attempt(name, make, failures):
            found[name] = loss
    return found


def inputs(num_tokens: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as after the last norm, and a head with weights of initial scale."""
    generator = torch.Generator("cuda").manual_seed(0)
    normal = partial(torch.randn, device="cuda", generator=generator, dtype=torch.bfloat16)
    labels = torch.randint(VOCABULARY, (num_tokens,), device="cuda", generator=generator)
    weight = 0.02 * normal(VOCABULARY, WIDTH)
    return normal(num_tokens, WIDTH), weight.to(weight_dtype), labels


def gradients(loss: Loss, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss, and its gradients with respect to hidden states and weight."""
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    # Trainers keep the head in float32; then autocast multiplies in bfloat16.
    with torch.autocast("cuda", torch.bfloat16, enabled=weight.dtype == torch.float32):
        value = loss(hidden, weight, labels)
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


def measure_losses(failures: list[str], *, peers: bool) -> Iterator[dict]:
    """A row for each loss on 8 x 4096 tokens: head in bfloat16, then in float32 with autocast."""
    found = losses(failures, peers=peers)
    for dtype in (torch.bfloat16, torch.float32):
        yield from _measure(found, dtype, failures)


def _measure(
    found: dict[str, Loss], weight_dtype: torch.dtype, failures: list[str]
) -> Iterator[dict]:
    hidden, weight, labels = inputs(4096, weight_dtype)
    exact = gradients(two_steps, hidden.double(), weight.double(), labels)
    errors = {}
    for name, loss in found.items():
        for got in attempt(name, partial(gradients, loss, hidden, weight, labels), failures):
            each = [relative_error(a, b) for a, b in zip(got, exact, strict=True)]
            print(f"{name}: loss, hidden, weight off by {', '.join(f'{e:.1e}' for e in each)}")
            errors[name] = each[2]
    batch, time = 8, 4096
    tensors = inputs(batch * time, weight_dtype)
    timed = {name: partial(gradients, found[name], *tensors) for name in errors}
    functions = runnable(timed, failures)
    times = time_in_turns(functions)
    shape = {"B": batch, "T": time, "H": None, "M": None, "D": WIDTH}
    for name, function in functions.items():
        yield make_row(
            name,
            "loss" if weight_dtype == torch.bfloat16 else "loss, autocast",
            shape,
            weight_dtype,
            times[name],
            tokens=batch * time,
            peak=peak_mib(function),
            error=errors[name],
        )
