"""The Triton backend of `frac_scan` and `frac_step` as operators of torch.library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_frac.ops.custom_ops.operator import operator
from flash_frac.ops.reference import zero_state
from flash_frac.ops.triton import scan as kernels
from flash_frac.ops.triton import step as step_kernels
from flash_frac.ops.triton.mix import Mix


@operator("scan")
def scan_op(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, the final state, and for the backward pass the states before segments and a `Mix`."""
    with torch.cuda.device_of(u):
        return kernels.scan_forward(u, read, write, log_decay, initial, cu_seqlens)


@scan_op.register_fake
def _(u, read, write, log_decay, initial, cu_seqlens):
    incoming, *mixed, total = kernels.kept_shapes(u, read.shape[-1], cu_seqlens)
    return (
        torch.empty_like(u),
        u.new_empty(kernels.state_shape(u, read.shape[-1], cu_seqlens), dtype=torch.float32),
        u.new_empty(incoming, dtype=torch.float32),
        *(u.new_empty(shape) for shape in mixed),
        u.new_empty(total, dtype=torch.float32),
    )


@operator("scan_backward")
def scan_backward_op(
    dy: Tensor,
    dfinal: Tensor | None,
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    incoming: Tensor,
    gamma: Tensor,
    read_in: Tensor,
    write_out: Tensor,
    total: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, read, write, log_decay and the initial state, empty if there is none."""
    with torch.cuda.device_of(u):
        mixed = Mix(gamma, read_in, write_out, total)
        du, dread, dwrite, dlog_decay, dinitial = kernels.scan_backward(
            dy, dfinal, u, read, write, log_decay, initial, incoming, mixed, cu_seqlens
        )
    return du, dread, dwrite, dlog_decay, u.new_empty(0) if dinitial is None else dinitial


@scan_backward_op.register_fake
def _(dy, dfinal, u, read, write, log_decay, initial, *kept):
    gradients = (torch.empty_like(x) for x in (u, read, write, log_decay))
    return *gradients, u.new_empty(0) if initial is None else torch.empty_like(initial)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, *output[2:], cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *unused: None) -> tuple:
    u, initial = ctx.saved_tensors[0], ctx.saved_tensors[4]
    dy = torch.zeros_like(u) if dy is None else dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    *gradients, dinitial = scan_backward_op(dy, dfinal, *ctx.saved_tensors)
    return *gradients, None if initial is None else dinitial, None


scan_op.register_autograd(_gradients, setup_context=_save)


def triton_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `frac_scan`."""
    if u.shape[1] == 0:
        state = zero_state(u, read, cu_seqlens) if initial_state is None else initial_state
        return torch.zeros_like(u), state
    inputs = [x.contiguous() for x in (u, read, write, log_decay.float())]
    state = None if initial_state is None else initial_state.contiguous()
    y, final, *_ = scan_op(*inputs, state, cu_seqlens)
    return y, final


@operator("step")
def step_op(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the new state of one token."""
    with torch.cuda.device_of(u):
        return step_kernels.step(u, read, write, log_decay, state)


@step_op.register_fake
def _(u, read, write, log_decay, state):
    return torch.empty_like(u), torch.empty_like(state)


def _save_step(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(True)


def _step_gradients(ctx: Any, dy: Tensor, dnew: Tensor) -> tuple:
    """Written in torch: a token at a time is how one decodes, not how one trains."""
    u, read, write, log_decay, state, new_state = ctx.saved_tensors
    wide_dy, kept = dy.float(), log_decay.exp()
    dnew = dnew + read[..., None] * wide_dy[..., None, :]
    du = (write[..., None] * dnew).sum(-2).to(u.dtype)
    dread = (new_state * wide_dy[..., None, :]).sum(-1).to(read.dtype)
    dwrite = (dnew * u[..., None, :]).sum(-1).to(write.dtype)
    dlog_decay = kept * (dnew * state).sum(-1)
    return du, dread, dwrite, dlog_decay, kept[..., None] * dnew


step_op.register_autograd(_step_gradients, setup_context=_save_step)


def triton_step(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `frac_step`."""
    return step_op(*(x.contiguous() for x in (u, read, write, log_decay.float(), state)))
