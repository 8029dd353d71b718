"""The Triton backend of `frac_scan`: operators of torch.library and the launches behind them.

Forward: mixing weights of every chunk, states before segments, outputs. Backward: states before
every chunk, gradients of states after segments, then the gradients. Outputs and gradients of u are
recomputed for sequences with an inf or NaN. Kernels are in `mix.py` and `walk.py`.
Letters: B batch, T time, H heads, M modes, BM their block, D head channels, C tokens of a chunk,
N chunks, S segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator
from flash_frac.ops.scan.mix import Weights, mix_backward_kernel, mix_kernel
from flash_frac.ops.scan.plan import (
    CHUNK,
    ChunkList,
    Plan,
    chunk_list,
    kept_shapes,
    plan_for,
    state_shape,
)
from flash_frac.ops.scan.reference import zero_state
from flash_frac.ops.scan.walk import (
    ChannelSums,
    Mix,
    gradient_kernel,
    output_kernel,
    pass_kernel,
    states_kernel,
)


def triton_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `frac_scan`, with the same arguments."""
    if u.numel() == 0:
        state = zero_state(u, read, cu_seqlens) if initial_state is None else initial_state
        return torch.zeros_like(u), state
    inputs = [x.contiguous() for x in (u, read, write, log_decay.float())]
    state = None if initial_state is None else initial_state.contiguous()
    y, final, *_ = scan_op(*inputs, state, cu_seqlens)
    return y, final


@operator("scan")
def scan_op(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y like u, the final state, and for the backward pass the states before segments and a `Mix`.

    Without an initial state, sequences start from zeros.
    """
    chunks = chunk_list(u.shape[0], u.shape[1], cu_seqlens)
    heads, num_modes = read.shape[-2:]
    plan = plan_for(u, num_modes, chunks)
    mix = Mix(
        gamma=u.new_empty(chunks.num_chunks, heads, CHUNK, CHUNK),
        read_in=u.new_empty(chunks.num_chunks, heads, CHUNK, plan.modes),
        write_out=u.new_empty(chunks.num_chunks, heads, CHUNK, plan.modes),
        total=u.new_empty(chunks.num_chunks, heads, plan.modes, dtype=torch.float32),
    )
    y = torch.empty_like(u)
    final = u.new_empty(state_shape(u, num_modes, cu_seqlens), dtype=torch.float32)
    with torch.cuda.device_of(u):
        mix_kernel[(chunks.num_chunks, heads)](
            Weights(read, write, log_decay),
            mix,
            *chunks.arguments,
            heads,
            **plan.mix,
            num_warps=plan.tuning.mix_warps,
        )
        incoming = _states_before_segments(
            u, mix.write_out, mix.total, initial, chunks, plan, backward=False
        )
        for careful in (False, True):
            output_kernel[plan.output.grid](
                u, mix, initial, incoming, y, final,
                *_sizes(u, chunks, plan),
                **plan.output.options,
                CAREFUL=careful,
            )  # fmt: skip
    return y, final, incoming, *mix


@scan_op.register_fake
def _(u, read, write, log_decay, initial, cu_seqlens):
    incoming, *mix, total = kept_shapes(u, read.shape[-1], cu_seqlens)
    return (
        torch.empty_like(u),
        u.new_empty(state_shape(u, read.shape[-1], cu_seqlens), dtype=torch.float32),
        u.new_empty(incoming, dtype=torch.float32),
        *(u.new_empty(shape) for shape in mix),
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
    skip: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, read, write, log_decay and the initial state (empty if there is none).

    dfinal is None if nothing depends on the final state. With skip (H, D), the gradient of u is
    that of y + skip u.
    """
    mix = Mix(gamma, read_in, write_out, total)
    chunks = chunk_list(u.shape[0], u.shape[1], cu_seqlens)
    heads, num_modes = read.shape[-2:]
    plan = plan_for(u, num_modes, chunks)
    num_parts = plan.gradient.grid[2]
    parts = (num_parts, chunks.num_chunks, heads)
    sums = ChannelSums(
        pairs=u.new_empty(*parts, CHUNK, CHUNK),
        read_state=u.new_empty(*parts, CHUNK, plan.modes, dtype=torch.float32),
        write_state=u.new_empty(*parts, CHUNK, plan.modes, dtype=torch.float32),
        across=u.new_empty(*parts, plan.modes, dtype=torch.float32),
    )
    du = torch.empty_like(u)
    dinitial = u.new_empty(state_shape(u, num_modes, cu_seqlens), dtype=torch.float32)
    gradients = Weights(*(torch.empty_like(x) for x in (read, write, log_decay)))
    with torch.cuda.device_of(u):
        states = _states_before_chunks(u, mix, initial, incoming, chunks, plan)
        later = _states_before_segments(
            dy, mix.read_in, mix.total, dfinal, chunks, plan, backward=True
        )
        for careful in (False, True):
            gradient_kernel[plan.gradient.grid](
                u, dy, mix, dfinal, later, states, skip, du, dinitial, sums,
                *_sizes(u, chunks, plan),
                **plan.gradient.options,
                CAREFUL=careful,
            )  # fmt: skip
        mix_backward_kernel[(chunks.num_chunks, heads)](
            Weights(read, write, log_decay),
            sums,
            gradients,
            *chunks.arguments,
            chunks.num_chunks * heads,
            heads,
            **plan.mix,
            PARTS=num_parts,
            num_warps=plan.tuning.mix_backward_warps,
        )
    return du, *gradients, u.new_empty(0) if initial is None else dinitial


@scan_backward_op.register_fake
def _(dy, dfinal, u, read, write, log_decay, initial, *kept):
    gradients = (torch.empty_like(x) for x in (u, read, write, log_decay))
    return *gradients, u.new_empty(0) if initial is None else torch.empty_like(initial)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, *output[2:], cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *unused: None) -> tuple:
    # Unpacked once: activation checkpointing recomputes saved tensors, and frees them once read.
    saved = ctx.saved_tensors
    u, initial = saved[0], saved[4]
    dy = torch.zeros_like(u) if dy is None else dy.contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    *gradients, dinitial = scan_backward_op(dy, dfinal, *saved, None)
    return *gradients, None if initial is None else dinitial, None


scan_op.register_autograd(_gradients, setup_context=_save)


def _count_flops(u_shape: Any, read_shape: Any, passes_pairs: int, passes_states: int) -> int:
    """FLOPs of the products of tokens with their chunk, and with the state of M modes."""
    *tokens, channels = u_shape
    pairs, states = passes_pairs * CHUNK, passes_states * read_shape[-1]
    return 2 * torch.Size(tokens).numel() * channels * (pairs + states)


@scan_op.register_flops
def _(u_shape, read_shape, *rest, **options):
    # gamma u; read_in S, and write_out^T u twice: for the states of segments and in the walk.
    return _count_flops(u_shape, read_shape, 1, 3)


@scan_backward_op.register_flops
def _(dy_shape, dfinal_shape, u_shape, read_shape, *rest, **options):
    # gamma^T dy and dy u^T; write_out^T u, read_in^T dy twice, write_out dS, dy S^T and u dS^T.
    return _count_flops(u_shape, read_shape, 2, 6)


def _sizes(u: Tensor, chunks: ChunkList, plan: Plan) -> tuple:
    """Arguments of all walks: the list of chunks, the segments, and H and D."""
    return (*chunks.arguments, chunks.num_chunks, plan.per_segment, *u.shape[2:])


def _states_before_segments(
    x: Tensor,
    weights: Tensor,
    total: Tensor,
    initial: Tensor | None,
    chunks: ChunkList,
    plan: Plan,
    *,
    backward: bool,
) -> Tensor:
    """The state before each segment, (S, H, BM, D) float32, in the order of the walk."""
    heads, channels = x.shape[2:]
    shape = (plan.num_segments, heads, plan.modes, channels)
    state, incoming = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    kept = x.new_empty(shape[:3], dtype=torch.float32)
    states_kernel[plan.states.grid](
        x, weights, total, initial, None, None, state, kept,
        *_sizes(x, chunks, plan),
        **plan.states.options,
        BACKWARD=backward,
        EVERY_CHUNK=False,
    )  # fmt: skip
    block = min(block_size(channels), 256)
    pass_kernel[(heads, plan.modes, ceil_div(channels, block))](
        state, kept, incoming, plan.num_segments, heads, channels,
        BM=plan.modes,
        BD=block,
        AHEAD=8,
        num_warps=1,
    )  # fmt: skip
    return incoming


def _states_before_chunks(
    u: Tensor, mix: Mix, initial: Tensor | None, incoming: Tensor, chunks: ChunkList, plan: Plan
) -> Tensor:
    """The state before each chunk, (N, H, BM, D) in the dtype of u."""
    heads, channels = u.shape[2:]
    states = u.new_empty(chunks.num_chunks, heads, plan.modes, channels)
    states_kernel[plan.states.grid](
        u, mix.write_out, mix.total, initial, incoming, states, None, None,
        *_sizes(u, chunks, plan),
        **plan.states.options,
        BACKWARD=False,
        EVERY_CHUNK=True,
    )  # fmt: skip
    return states
