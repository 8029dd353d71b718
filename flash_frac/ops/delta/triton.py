"""The Triton backend of `delta_scan`: operators of torch.library and the launches behind them.

Forward: per chunk whatever needs no state, then the states by a walk along the chunks, then outputs
per chunk. Backward: the first two again, a walk backward in time, then gradients per chunk. Only
the inputs are saved between the two. Kernels are in `kernels.py` and `walk.py`; `step.py` has
single steps.
Letters: B batch, T time, H heads, K key channels, D value channels, Q sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_frac.ops.backends import operator
from flash_frac.ops.delta.kernels import (
    Inputs,
    Prepared,
    Walked,
    delta_gradient_kernel,
    delta_output_kernel,
    delta_prepare_kernel,
)
from flash_frac.ops.delta.plan import Plan, plan_for, walk_grid
from flash_frac.ops.delta.step import fused_delta_step, triton_delta_step
from flash_frac.ops.delta.walk import delta_walk_backward_kernel, delta_walk_kernel
from flash_frac.ops.scan.plan import ChunkList
from flash_frac.ops.scan.reference import zero_state

__all__ = ["fused_delta_step", "triton_delta", "triton_delta_step"]


def triton_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `delta_scan`, with the same arguments."""
    if v.numel() == 0:
        state = zero_state(v, k, cu_seqlens) if initial_state is None else initial_state
        return torch.zeros_like(v), state
    inputs = [x.contiguous() for x in (q, k, v, beta, log_decay.float())]
    state = None if initial_state is None else initial_state.contiguous()
    return delta_op(*inputs, state, cu_seqlens)


@operator("delta")
def delta_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y like v and the final state, from contiguous inputs; starts from zeros by default."""
    inputs = Inputs(q, k, v, beta, log_decay)
    chunks, plan = plan_for(k, v, cu_seqlens)
    y, final = torch.empty_like(v), v.new_empty(_state_shape(k, v, cu_seqlens), dtype=torch.float32)
    walked, walk = Walked(*_empty_walk(k, v, chunks)), _walk_arguments(v, chunks, cu_seqlens)
    with torch.cuda.device_of(v):
        prepared = _prepare(inputs, chunks, plan)
        delta_walk_kernel[walk_grid(final.shape[0], v, plan.states)](
            inputs, prepared, walked, initial, final, *walk, **plan.states
        )
        delta_output_kernel[chunks.num_chunks, v.shape[2]](
            inputs, prepared, walked, y, *chunks.arguments, *v.shape[2:], **plan.output
        )
    return y, final


@delta_op.register_fake
def _(q, k, v, beta, log_decay, initial, cu_seqlens):
    return torch.empty_like(v), v.new_empty(_state_shape(k, v, cu_seqlens), dtype=torch.float32)


@operator("delta_backward")
def delta_backward_op(
    dy: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_decay and the initial state (empty if there is none).

    dfinal is None if nothing depends on the final state.
    """
    inputs = Inputs(q, k, v, beta, log_decay)
    chunks, plan = plan_for(k, v, cu_seqlens)
    gradients = Inputs(*(torch.empty_like(x) for x in inputs))
    dinitial = v.new_empty(_state_shape(k, v, cu_seqlens), dtype=torch.float32)
    walked = Walked(*_empty_walk(k, v, chunks), *_empty_walk(k, v, chunks))
    walk = _walk_arguments(v, chunks, cu_seqlens)
    with torch.cuda.device_of(v):
        prepared = _prepare(inputs, chunks, plan, dy, walked.dcorrected)
        delta_walk_kernel[walk_grid(dinitial.shape[0], v, plan.states)](
            inputs, prepared, walked, initial, None, *walk, **plan.states
        )
        delta_walk_backward_kernel[walk_grid(dinitial.shape[0], v, plan.backward)](
            inputs, prepared, walked, dy, dfinal, dinitial, *walk, **plan.backward
        )
        scratch = torch.empty_like(prepared.inverse)
        delta_gradient_kernel[chunks.num_chunks, v.shape[2]](
            inputs, prepared, walked, dy, gradients, scratch,
            *chunks.arguments, *v.shape[2:],
            **plan.gradient,
        )  # fmt: skip
    return *gradients, v.new_empty(0) if initial is None else dinitial


@delta_backward_op.register_fake
def _(dy, dfinal, q, k, v, beta, log_decay, initial, cu_seqlens):
    gradients = (torch.empty_like(x) for x in (q, k, v, beta, log_decay))
    return *gradients, v.new_empty(0) if initial is None else torch.empty_like(initial)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple:
    # Unpacked once: activation checkpointing recomputes saved tensors, and frees them once read.
    saved = ctx.saved_tensors
    v, initial = saved[2], saved[5]
    dy = torch.zeros_like(v) if dy is None else dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    *gradients, dinitial = delta_backward_op(dy, dfinal, *saved)
    return *gradients, None if initial is None else dinitial, None


delta_op.register_autograd(_gradients, setup_context=_save)


def _count_flops(q_shape: Any, v_shape: Any, keys: int, values: int, both: int) -> int:
    """FLOPs of the products of tokens with their chunk and with the state.

    keys, values: number of products of C tokens with K and with D channels; both: of K with D. C is
    64, which also accounts for the inverse of a chunk.
    """
    *tokens, num_keys = q_shape
    chunk, num_values = 64, v_shape[-1]
    each = keys * chunk * num_keys + values * chunk * num_values + both * num_keys * num_values
    return 2 * torch.Size(tokens).numel() * each


@delta_op.register_flops
def _(q_shape, k_shape, v_shape, *rest, **options):
    # k k^T, q k^T and w; u and pairs U; w S, q S and k^T U.
    return _count_flops(q_shape, v_shape, 3, 2, 3)


@delta_backward_op.register_flops
def _(dy_shape, dfinal_shape, q_shape, k_shape, v_shape, *rest, **options):
    # k k^T and q k^T twice, w, and four for dq and dk; u, pairs^T dy, X, dy U^T and X U^T; two in
    # the walk, three in the backward walk, and dy S^T, U dS^T and X S^T.
    return _count_flops(q_shape, v_shape, 9, 5, 8)


def _state_shape(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """(Q, H, K, D)."""
    num = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return num, v.shape[2], k.shape[3], v.shape[3]


def _prepare(
    inputs: Inputs,
    chunks: ChunkList,
    plan: Plan,
    dy: Tensor | None = None,
    local: Tensor | None = None,
) -> Prepared:
    """Results that need no state; with dy (backward) also T, and pairs^T dy in `local`."""
    k, v = inputs.k, inputs.v
    heads, keys = k.shape[2:]
    shape = (chunks.num_chunks, heads, chunks.size)
    prepared = Prepared(
        inverse=None if dy is None else v.new_empty(*shape, chunks.size),
        w=v.new_empty(*shape, keys),
        u=v.new_empty(*shape, v.shape[3]),
        decay_in=v.new_empty(shape, dtype=torch.float32),
        decay_out=v.new_empty(shape, dtype=torch.float32),
        total=v.new_empty(shape[:2], dtype=torch.float32),
    )
    delta_prepare_kernel[shape[:2]](
        inputs, prepared, dy, local, *chunks.arguments, *v.shape[2:], **plan.prepare
    )
    return prepared


def _empty_walk(k: Tensor, v: Tensor, chunks: ChunkList) -> tuple[Tensor, Tensor]:
    """Memory for U (N, H, C, D) and S (N, H, D, K), or for their gradients."""
    chunk_heads, channels = (chunks.num_chunks, v.shape[2]), v.shape[3]
    states = v.new_empty(*chunk_heads, channels, k.shape[3])
    return v.new_empty(*chunk_heads, chunks.size, channels), states


def _walk_arguments(v: Tensor, chunks: ChunkList, cu_seqlens: Tensor | None) -> tuple:
    """Arguments of both walks after their tensors."""
    bounds = None if cu_seqlens is None else cu_seqlens.contiguous()
    return bounds, chunks.starts, chunks.num_tokens, chunks.chunks_each, *v.shape[2:]
