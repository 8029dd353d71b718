"""Grids and launch parameters of the delta rule's kernels.

The list of chunks is that of `ops/scan/plan.py`, with other chunk sizes. Nothing is tuned at first
use: `HOPPER`, `DEFAULT` and `FLOAT32` are the only parameter sets.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.scan.plan import ChunkList, chunk_list, precision


class Launch(NamedTuple):
    """Launch parameters of a kernel; `channels` is its block of value channels."""

    channels: int
    warps: int
    stages: int


class DeltaTuning(NamedTuple):
    """Launch parameters of the delta rule.

    Attributes:
        chunk: tokens per chunk, a power of two of at least 16.
        narrowest: minimum of columns in a product: of key channels per block, and of value channels
            except in the walks, where they are rows.
        prepare, output, gradient: for the kernels with one program per chunk and head.
        states, backward: for the walks forward and backward in time.
        backward_programs: the backward walk shrinks its blocks of value channels, down to 16, while
            it has no more programs than this.
    """

    chunk: int
    narrowest: int
    prepare: Launch
    output: Launch
    states: Launch
    backward: Launch
    gradient: Launch
    backward_programs: int = 0


# Hopper with 16-bit inputs: the fastest of eight sets for each kernel, measured on an H200, except
# that outputs took 0.139 instead of 0.151 ms with 32 channels. Triton 3.6 reads past the end of
# shared memory there in a product of fewer than 64 columns, the left factor in registers.
HOPPER = DeltaTuning(
    chunk=64,
    narrowest=64,
    prepare=Launch(channels=64, warps=4, stages=3),
    output=Launch(channels=64, warps=4, stages=3),
    states=Launch(channels=32, warps=4, stages=3),
    backward=Launch(channels=32, warps=4, stages=3),
    gradient=Launch(channels=64, warps=8, stages=3),
    backward_programs=256,
)
# Other GPUs with 16-bit inputs: fits into shared memory of any GPU since Ampere.
DEFAULT = DeltaTuning(
    chunk=32,
    narrowest=16,
    prepare=Launch(channels=64, warps=4, stages=1),
    output=Launch(channels=32, warps=4, stages=2),
    states=Launch(channels=32, warps=4, stages=2),
    backward=Launch(channels=32, warps=4, stages=2),
    gradient=Launch(channels=32, warps=4, stages=1),
)
# float32: products in full precision, without tensor cores.
_FLOAT32_LAUNCH = Launch(channels=16, warps=8, stages=1)
FLOAT32 = DeltaTuning(32, 16, *(_FLOAT32_LAUNCH,) * 5, backward_programs=0)


@cache
def tuning_for(dtype: torch.dtype, device: torch.device) -> DeltaTuning:
    """The launch parameters for tensors of this dtype on this device."""
    if dtype == torch.float32:
        return FLOAT32
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        return HOPPER
    return DEFAULT


class Plan(NamedTuple):
    """Launch parameters and kernel options that follow from the sizes of a call."""

    tuning: DeltaTuning
    prepare: dict[str, Any]
    output: dict[str, Any]
    states: dict[str, Any]
    backward: dict[str, Any]
    gradient: dict[str, Any]


@lru_cache(maxsize=1024)
def _plan(
    keys: int, channels: int, walks: int, layout: str, dtype: torch.dtype, device: torch.device
) -> Plan:
    """For this many sequences times heads. Cached: computing it takes as long as a launch."""
    tuning = tuning_for(dtype, device)
    block = tuning.backward.channels
    while block > 16 and 2 * walks * ceil_div(channels, block) <= tuning.backward_programs:
        block //= 2
    tuning = tuning._replace(backward=tuning.backward._replace(channels=block))

    wide = max(block_size(channels), tuning.narrowest)

    def options(launch: Launch, least: int = tuning.narrowest) -> dict[str, Any]:
        return {
            "K": keys,
            "BK": max(block_size(keys), tuning.narrowest),
            "BD": max(min(wide, launch.channels), least),
            "C": tuning.chunk,
            "LAYOUT": layout,
            "PRECISION": precision(dtype),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }

    return Plan(
        tuning,
        prepare=options(tuning.prepare),
        output=options(tuning.output),
        states=options(tuning.states, 16),
        backward=options(tuning.backward, 16),
        gradient=options(tuning.gradient),
    )


def plan_for(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[ChunkList, Plan]:
    """The chunks of a call, and its plan, for k (B, T, H, K) and v (B, T, H, D)."""
    tuning = tuning_for(v.dtype, v.device)
    chunks = chunk_list(v.shape[0], v.shape[1], cu_seqlens, tuning.chunk)
    walks = v.shape[2] * (v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    plan = _plan(k.shape[-1], v.shape[-1], walks, chunks.layout, v.dtype, v.device)
    return chunks, plan


def walk_grid(num_sequences: int, v: Tensor, options: dict[str, Any]) -> tuple[int, int]:
    """One program per sequence, block of value channels, and head."""
    heads, channels = v.shape[2:]
    return num_sequences * ceil_div(channels, options["BD"]), heads


def forget_plans() -> None:
    """Clear cached plans, after a change of launch parameters."""
    _plan.cache_clear()
