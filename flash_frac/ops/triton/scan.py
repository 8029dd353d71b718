"""Launchers of the scan: forward and backward, from kernels in `mix.py` and `walk.py`.

Letters: B batch, T time, H heads, M modes, BM their block, D head channels, N chunks, S segments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.ops.triton.chunks import CHUNK, ChunkList, chunk_list, count_chunks
from flash_frac.ops.triton.launch import block_size, ceil_div
from flash_frac.ops.triton.mix import Mix, mix, mix_backward
from flash_frac.ops.triton.tuning import Tuning, Walk, tuning_for
from flash_frac.ops.triton.walk import (
    gradient_kernel,
    output_kernel,
    pass_kernel,
    states_kernel,
)


class _Launch(NamedTuple):
    """How a walk is launched."""

    grid: tuple[int, int, int]
    constants: dict[str, Any]


class _Plan(NamedTuple):
    """What follows from the sizes of a call, for the kernels."""

    per_segment: int
    num_segments: int
    modes: int
    tuning: Tuning
    states: _Launch
    output: _Launch
    gradient: _Launch


def _segments(num_chunks: int, heads: int, channels: int, tuning: Tuning) -> tuple[int, int]:
    """Chunks of a segment, and how many segments there are."""
    walks = num_chunks * heads * ceil_div(channels, tuning.output.channels)
    per_segment = ceil_div(walks, tuning.programs)
    return per_segment, ceil_div(num_chunks, per_segment)


@lru_cache(maxsize=1024)
def _plan(
    num_chunks: int,
    heads: int,
    channels: int,
    num_modes: int,
    packed: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> _Plan:
    """Cached, because Python takes as long over it as over a launch."""
    tuning = tuning_for(dtype, device)
    per_segment, num_segments = _segments(num_chunks, heads, channels, tuning)
    modes = block_size(num_modes)

    def launch(walk: Walk) -> _Launch:
        width = min(block_size(channels), walk.channels)
        constants = {
            "M": num_modes,
            "BM": modes,
            "BD": width,
            "C": CHUNK,
            "PACKED": packed,
            "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "num_warps": walk.warps,
            "num_stages": walk.stages,
        }
        return _Launch((num_segments, heads, ceil_div(channels, width)), constants)

    walks = (tuning.states, tuning.output, tuning.gradient)
    return _Plan(per_segment, num_segments, modes, tuning, *map(launch, walks))


def forget_plans() -> None:
    """Plan anew, after another tuning was chosen."""
    _plan.cache_clear()


def _plan_for(u: Tensor, num_modes: int, chunks: ChunkList) -> _Plan:
    packed = chunks.table is not None
    return _plan(chunks.num_chunks, *u.shape[2:], num_modes, packed, u.dtype, u.device)


def _sizes(u: Tensor, chunks: ChunkList, plan: _Plan) -> tuple:
    """What all walks take: the list of chunks, the segments, and H and D."""
    return (*chunks.arguments, chunks.num_chunks, plan.per_segment, *u.shape[2:])


def state_shape(u: Tensor, num_modes: int, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """(N, H, M, D), for N sequences."""
    num = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return num, u.shape[2], num_modes, u.shape[3]


def kept_shapes(u: Tensor, num_modes: int, cu_seqlens: Tensor | None) -> list[tuple[int, ...]]:
    """Shapes of what `scan_forward` returns after y and the final state; sizes may be symbolic."""
    heads, channels = u.shape[2:]
    num_chunks, modes = count_chunks(u.shape[0], u.shape[1], cu_seqlens), block_size(num_modes)
    _, num_segments = _segments(num_chunks, heads, channels, tuning_for(u.dtype, u.device))
    weights = (num_chunks, heads, CHUNK, modes)
    return [
        (num_segments, heads, modes, channels),
        (num_chunks, heads, CHUNK, CHUNK),
        weights,
        weights,
        (num_chunks, heads, modes),
    ]


def _states_before_segments(
    x: Tensor,
    weights: Tensor,
    total: Tensor,
    initial: Tensor | None,
    chunks: ChunkList,
    plan: _Plan,
    *,
    backward: bool,
) -> Tensor:
    """The state before every segment, (S, H, BM, D) float32, in the order of the walk."""
    heads, channels = x.shape[2:]
    shape = (plan.num_segments, heads, plan.modes, channels)
    state, incoming = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    decay = x.new_empty(shape[:3], dtype=torch.float32)
    states_kernel[plan.states.grid](
        x,
        weights,
        total,
        initial,
        None,
        None,
        state,
        decay,
        *_sizes(x, chunks, plan),
        **plan.states.constants,
        BACKWARD=backward,
        EVERY_CHUNK=False,
    )
    block = min(block_size(channels), 256)
    pass_kernel[(heads, plan.modes, ceil_div(channels, block))](
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
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y like u, the final state, and for the backward pass: states before segments, mix weights.

    Without an initial state, sequences begin with zeros.
    """
    chunks = chunk_list(u.shape[0], u.shape[1], cu_seqlens)
    plan = _plan_for(u, read.shape[-1], chunks)
    mixed = mix(
        read, write, log_decay, chunks, dtype=u.dtype, modes=plan.modes, warps=plan.tuning.mix
    )
    incoming = _states_before_segments(
        u, mixed.write_out, mixed.total, initial, chunks, plan, backward=False
    )
    y = torch.empty_like(u)
    final = u.new_empty(state_shape(u, read.shape[-1], cu_seqlens), dtype=torch.float32)
    output_kernel[plan.output.grid](
        u,
        *mixed,
        initial,
        incoming,
        y,
        final,
        *_sizes(u, chunks, plan),
        **plan.output.constants,
    )
    return y, final, incoming, *mixed


def _states_before_chunks(
    u: Tensor, mixed: Mix, initial: Tensor | None, incoming: Tensor, chunks: ChunkList, plan: _Plan
) -> Tensor:
    """The state before every chunk, (N, H, BM, D) in the dtype of u."""
    heads, channels = u.shape[2:]
    states = u.new_empty(chunks.num_chunks, heads, plan.modes, channels)
    states_kernel[plan.states.grid](
        u,
        mixed.write_out,
        mixed.total,
        initial,
        incoming,
        states,
        None,
        None,
        *_sizes(u, chunks, plan),
        **plan.states.constants,
        BACKWARD=False,
        EVERY_CHUNK=True,
    )
    return states


def scan_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    incoming: Tensor,
    mixed: Mix,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of u, read, write, log_decay and, if there is one, the initial state.

    Without dfinal, nothing depends on the final state.
    """
    chunks = chunk_list(u.shape[0], u.shape[1], cu_seqlens)
    plan = _plan_for(u, read.shape[-1], chunks)
    states = _states_before_chunks(u, mixed, initial, incoming, chunks, plan)
    later = _states_before_segments(
        dy, mixed.read_in, mixed.total, dfinal, chunks, plan, backward=True
    )
    parts = (plan.gradient.grid[2], chunks.num_chunks, u.shape[2])
    du, dinitial = torch.empty_like(u), None if initial is None else torch.empty_like(initial)
    products = u.new_empty(*parts, CHUNK, CHUNK)
    read_state = u.new_empty(*parts, CHUNK, plan.modes, dtype=torch.float32)
    write_state = torch.empty_like(read_state)
    across = u.new_empty(*parts, plan.modes, dtype=torch.float32)
    gradient_kernel[plan.gradient.grid](
        u,
        dy,
        *mixed,
        dfinal,
        later,
        states,
        du,
        dinitial,
        products,
        read_state,
        write_state,
        across,
        *_sizes(u, chunks, plan),
        **plan.gradient.constants,
    )
    gradients = mix_backward(
        read,
        write,
        log_decay,
        products,
        read_state,
        write_state,
        across,
        chunks,
        warps=plan.tuning.mix_backward,
    )
    return du, *gradients, dinitial
