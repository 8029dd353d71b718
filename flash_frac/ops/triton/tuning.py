"""Launch parameters per class of GPU, measured ahead: nothing is tuned unless `autotune` is asked.

programs: how many the walks are cut into, roughly, by their segments; mix, mix_backward:
warps of the kernels in `mix.py`; channels, warps and stages of a program of each walk.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Walk(NamedTuple):
    """Launch parameters of a walk."""

    channels: int
    warps: int
    stages: int


class Tuning(NamedTuple):
    """Launch parameters of all walks of the scan on one class of GPU and dtype."""

    programs: int
    mix: int
    mix_backward: int
    states: Walk
    output: Walk
    gradient: Walk


# Hopper, measured on an H200; 16-bit inputs.
HOPPER = Tuning(512, 1, 2, Walk(128, 4, 2), Walk(256, 4, 3), Walk(128, 4, 3))
# Anything else with 16-bit inputs: small enough for the shared memory of any card since Ampere.
DEFAULT = Tuning(512, 1, 2, Walk(64, 4, 2), Walk(64, 4, 2), Walk(64, 4, 1))
# float32 multiplies in full precision, without tensor cores.
FLOAT32 = Tuning(512, 2, 2, Walk(32, 4, 1), Walk(32, 4, 1), Walk(32, 4, 1))


# What `autotune.py` has found, in this process.
CHOSEN: dict[tuple[torch.dtype, torch.device], Tuning] = {}


def tuning_for(dtype: torch.dtype, device: torch.device) -> Tuning:
    """The launch parameters for tensors of this dtype, there."""
    if (dtype, device) in CHOSEN:
        return CHOSEN[dtype, device]
    if dtype == torch.float32:
        return FLOAT32
    if device.type == "cuda" and _capability(device) == (9, 0):
        return HOPPER
    return DEFAULT


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
