"""Pre-tuned launch parameters of the scan's kernels, for each kind of GPU."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch


class Walk(NamedTuple):
    """Launch parameters of one kernel that walks along chunks (`ops/scan/walk.py`)."""

    channels: int
    warps: int
    stages: int


class Tuning(NamedTuple):
    """Launch parameters of the scan, tuned in advance: only a call of `autotune` tunes again.

    Attributes:
        programs: approximate number of programs of the walks.
        mix_warps, mix_backward_warps: for the kernels in `ops/scan/mix.py`.
        states, output, gradient: for the three walks.
    """

    programs: int
    mix_warps: int
    mix_backward_warps: int
    states: Walk
    output: Walk
    gradient: Walk


# Hopper with 16-bit inputs, measured on an H200.
HOPPER = Tuning(
    programs=512,
    mix_warps=1,
    mix_backward_warps=2,
    states=Walk(channels=128, warps=4, stages=2),
    output=Walk(channels=256, warps=4, stages=3),
    gradient=Walk(channels=128, warps=4, stages=3),
)
# Other GPUs with 16-bit inputs: fits into shared memory of any GPU since Ampere.
DEFAULT = Tuning(
    programs=512,
    mix_warps=1,
    mix_backward_warps=2,
    states=Walk(channels=64, warps=4, stages=2),
    output=Walk(channels=64, warps=4, stages=2),
    gradient=Walk(channels=64, warps=4, stages=1),
)
# float32: products in full precision, without tensor cores.
_FLOAT32_WALK = Walk(channels=32, warps=4, stages=1)
FLOAT32 = Tuning(
    programs=512,
    mix_warps=2,
    mix_backward_warps=2,
    states=_FLOAT32_WALK,
    output=_FLOAT32_WALK,
    gradient=_FLOAT32_WALK,
)
# Parameters that `ops/scan/autotune.py` has found in this process.
TUNED: dict[tuple[torch.dtype, torch.device], Tuning] = {}


def tuning_for(dtype: torch.dtype, device: torch.device) -> Tuning:
    """The launch parameters of the scan for tensors of this dtype on this device."""
    if (dtype, device) in TUNED:
        return TUNED[dtype, device]
    if dtype == torch.float32:
        return FLOAT32
    if device.type == "cuda" and _capability(device) == (9, 0):
        return HOPPER
    return DEFAULT


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
