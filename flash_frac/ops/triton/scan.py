"""Launchers of the scan: forward and backward, from kernels in `mix.py` and `walk.py`.

Letters: B batch, T time, H heads, M modes, BM their block, D head channels, N chunks, S segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_frac.ops.triton.chunks import CHUNK, ChunkList, chunk_list
from flash_frac.ops.triton.launch import block_size
from flash_frac.ops.triton.mix import mix, mix_backward
from flash_frac.ops.triton.tuning import Walk, tuning_for
from flash_frac.ops.triton.walk import (
    gradient_kernel,
    output_kernel,
    pass_kernel,
    states_kernel,
)


class _Plan(NamedTuple):
    """The sizes of a call: its chunks, how many of them a segment has, and the block of modes."""

    chunks: ChunkList
    per_segment: int
    modes: int

    @property
    def num_segments(self) -> int:
        return triton.cdiv(self.chunks.num_chunks, self.per_segment)

    def sizes(self, u: Tensor) -> tuple:
        """What all walks take: the list of chunks, the segments, and H and D."""
        return (*self.chunks.arguments, self.chunks.num_chunks, self.per_segment, *u.shape[2:])

    def grid(self, u: Tensor, walk: Walk) -> tuple[int, int, int]:
        return self.num_segments, u.shape[2], triton.cdiv(u.shape[3], _channels(u, walk))

    def constants(self, u: Tensor, read: Tensor, walk: Walk) -> dict[str, Any]:
        return {
            "M": read.shape[-1],
            "BM": self.modes,
            "BD": _channels(u, walk),
            "C": CHUNK,
            "PACKED": self.chunks.table is not None,
            "PRECISION": "ieee" if u.dtype == torch.float32 else "tf32",
            "num_warps": walk.warps,
            "num_stages": walk.stages,
        }


def _channels(u: Tensor, walk: Walk) -> int:
    return min(block_size(u.shape[3]), walk.channels)


def _plan(u: Tensor, read: Tensor, cu_seqlens: Tensor | None) -> _Plan:
    chunks = chunk_list(u.shape[0], u.shape[1], cu_seqlens)
    tuning = tuning_for(u)
    walks = chunks.num_chunks * u.shape[2] * triton.cdiv(u.shape[3], tuning.output.channels)
    return _Plan(chunks, triton.cdiv(walks, tuning.programs), block_size(read.shape[-1]))


def segment_shape(u: Tensor, read: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """Shape (S, H, BM, D) of the states before the segments."""
    plan = _plan(u, read, cu_seqlens)
    return plan.num_segments, u.shape[2], plan.modes, u.shape[3]


def _mix(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    warps = tuning_for(u).mix
    return mix(read, write, log_decay, plan.chunks, dtype=u.dtype, modes=plan.modes, warps=warps)


def _states_before_segments(
    x: Tensor,
    weights: Tensor,
    total: Tensor,
    initial: Tensor,
    read: Tensor,
    plan: _Plan,
    *,
    backward: bool,
) -> Tensor:
    """The state before every segment, (S, H, BM, D) float32, in the order of the walk."""
    heads, channels = x.shape[2:]
    state = x.new_empty(plan.num_segments, heads, plan.modes, channels, dtype=torch.float32)
    decay = x.new_empty(plan.num_segments, heads, plan.modes, dtype=torch.float32)
    walk = tuning_for(x).states
    states_kernel[plan.grid(x, walk)](
        x,
        weights,
        total,
        initial,
        None,
        None,
        state,
        decay,
        *plan.sizes(x),
        **plan.constants(x, read, walk),
        BACKWARD=backward,
        EVERY_CHUNK=False,
    )
    incoming = torch.empty_like(state)
    block = min(block_size(channels), 256)
    pass_kernel[(heads, plan.modes, triton.cdiv(channels, block))](
        state,
        decay,
        incoming,
        plan.num_segments,
        heads,
        channels,
        BM=plan.modes,
        BD=block,
        AHEAD=8,
        num_warps=1,
    )
    return incoming


def scan_forward(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y like u, the final state, and the states before the segments, for the backward pass."""
    plan = _plan(u, read, cu_seqlens)
    gamma, read_in, write_out, total = _mix(u, read, write, log_decay, plan)
    incoming = _states_before_segments(u, write_out, total, initial, read, plan, backward=False)
    y, final = torch.empty_like(u), torch.empty_like(initial)
    walk = tuning_for(u).output
    output_kernel[plan.grid(u, walk)](
        u,
        gamma,
        read_in,
        write_out,
        total,
        initial,
        incoming,
        y,
        final,
        *plan.sizes(u),
        **plan.constants(u, read, walk),
    )
    return y, final, incoming


def _states_before_chunks(
    u: Tensor,
    write_out: Tensor,
    total: Tensor,
    initial: Tensor,
    incoming: Tensor,
    read: Tensor,
    plan: _Plan,
) -> Tensor:
    """The state before every chunk, (N, H, BM, D) in the dtype of u."""
    heads, channels = u.shape[2:]
    states = u.new_empty(plan.chunks.num_chunks, heads, plan.modes, channels)
    walk = tuning_for(u).states
    states_kernel[plan.grid(u, walk)](
        u,
        write_out,
        total,
        initial,
        incoming,
        states,
        None,
        None,
        *plan.sizes(u),
        **plan.constants(u, read, walk),
        BACKWARD=False,
        EVERY_CHUNK=True,
    )
    return states


def scan_backward(
    dy: Tensor,
    dfinal: Tensor,
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    incoming: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, read, write, log_decay and the initial state."""
    plan = _plan(u, read, cu_seqlens)
    gamma, read_in, write_out, total = _mix(u, read, write, log_decay, plan)
    states = _states_before_chunks(u, write_out, total, initial, incoming, read, plan)
    later = _states_before_segments(dy, read_in, total, dfinal, read, plan, backward=True)
    walk = tuning_for(u).gradient
    parts = (plan.grid(u, walk)[2], plan.chunks.num_chunks, u.shape[2])
    du, dinitial = torch.empty_like(u), torch.empty_like(initial)
    products = u.new_empty(*parts, CHUNK, CHUNK)
    read_state = u.new_empty(*parts, CHUNK, plan.modes, dtype=torch.float32)
    write_state = torch.empty_like(read_state)
    across = u.new_empty(*parts, plan.modes, dtype=torch.float32)
    gradient_kernel[plan.grid(u, walk)](
        u,
        dy,
        gamma,
        read_in,
        write_out,
        total,
        dfinal,
        later,
        states,
        du,
        dinitial,
        products,
        read_state,
        write_state,
        across,
        *plan.sizes(u),
        **plan.constants(u, read, walk),
    )
    gradients = mix_backward(
        read,
        write,
        log_decay,
        products,
        read_state,
        write_state,
        across,
        plan.chunks,
        warps=tuning_for(u).mix_backward,
    )
    return du, *gradients, dinitial
