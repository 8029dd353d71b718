"""Estimate the throughput of a run from measured runs, or from the MFU that they reach.

`MEASURED` repeats rows of benchmarks/results/train and memory, which are not installed; a test
keeps them equal.

The model between rows: a micro-batch takes as long as its FLOPs at the MFU of the most similar row,
and at least `LAUNCH_SECONDS` per layer, because launching the kernels takes that long. Each row is
within a factor of 1.3 of its estimate from the other rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flash_frac.train.flops import training_flops
from flash_frac.train.memory import Setup, count_parameters
from flash_frac.train.monitor import PEAK_TFLOPS


class Measured(NamedTuple):
    """A measured run on one GPU in bfloat16: columns of its row, and its MFU."""

    model: str
    gpu: str
    parameters: int
    batch: int
    length: int
    recompute: str
    compile: str
    tokens_per_s: int
    mfu: float


MEASURED = (
    Measured("frac-delta-1.3b", "H200", 1386845408, 4, 4096, "no", "no", 51121, 0.4361),
    Measured("frac-1.3b", "H200", 1385075808, 1, 4096, "no", "no", 20698, 0.1757),
    Measured("frac-1.3b", "H200", 1385075808, 2, 4096, "all", "no", 29072, 0.2468),
    Measured("frac-1.3b", "H200", 1385075808, 4, 4096, "no", "no", 47451, 0.4028),
    Measured("frac-1.3b", "H200", 1385075808, 8, 4096, "all", "no", 40337, 0.3425),
    Measured("frac-1.3b", "H200", 1385075808, 8, 4096, "no", "no", 49181, 0.4175),
    Measured("frac-mixed-1.3b", "H200", 1378316964, 4, 4096, "no", "no", 52619, 0.4576),
    Measured("frac-390m", "H200", 390549600, 4, 4096, "no", "no", 78575, 0.1897),
    Measured("frac-390m", "H200", 390549600, 8, 4096, "all", "no", 99031, 0.239),
    Measured("frac-390m", "H200", 390549600, 8, 4096, "no", "no", 125739, 0.3035),
    Measured("frac-390m", "H200", 390549600, 16, 4096, "no", "no", 121762, 0.2939),
    Measured("frac-30m", "H200", 46261280, 16, 4096, "all", "no", 573635, 0.1653),
    Measured("frac-30m", "H200", 46261280, 16, 4096, "no", "no", 772656, 0.2226),
    Measured("frac-mixed-30m", "H200", 46205900, 16, 4096, "no", "no", 906141, 0.2795),
    Measured("frac-delta-30m", "H200", 46014610, 16, 4096, "no", "no", 802203, 0.2311),
)

# Seconds per layer and micro-batch, measured where the GPU waited: frac-390m at 4 x 4096 and
# frac-1.3b at 1 x 4096, and frac-1.3b at 2 x 4096 with recomputation, which launches more.
LAUNCH_SECONDS = {"no": 0.0042, "all": 0.0059}


class Speed(NamedTuple):
    """Tokens per second of all GPUs, and a phrase that says where the number comes from.

    is_bound: the number is an upper bound, because something slows the run that is not counted.
    """

    tokens_per_s: float
    source: str
    is_bound: bool = False


def estimate_speed(setup: Setup, *, gpu: str = "H200", peak_tflops: float | None = None) -> Speed:
    """Estimate the throughput of a run: N times that of one GPU, ignoring communication.

    Args:
        gpu: a name in `PEAK_TFLOPS`; peak_tflops: peak of a GPU that is not listed there.
    """
    parameters = count_parameters(setup.config).total
    row = _nearest(parameters, setup)
    settings = (gpu, parameters, setup.batch, setup.length, setup.recomputed, setup.compile)
    plain = peak_tflops is None and setup.half and setup.context == 1
    name = f"the run of {row.model} on one {row.gpu} ({row.tokens_per_s:,} tokens/s at "
    name += f"{row.batch} x {row.length}"
    if plain and settings == row[1:7]:
        one, source, slower = float(row.tokens_per_s), f"measured: {name})", []
    else:
        rate = row.mfu * 1e12 * (peak_tflops or PEAK_TFLOPS[gpu])
        one = rate / training_flops(setup.config, setup.length / 2)
        card = f"{peak_tflops} TFLOP/s" if peak_tflops else gpu
        source = f"estimated for {card} at the MFU of {name}, MFU {row.mfu:.1%})"
        if setup.recomputed != row.recompute:
            # MFU does not count the recomputed forward pass.
            one *= _RECOMPUTED.get(setup.recomputed, 1)
        launching = LAUNCH_SECONDS.get(setup.recomputed, LAUNCH_SECONDS["no"])
        most = setup.tokens / (launching * setup.config.num_hidden_layers)
        if most < one:
            one = most
            source += f"; limited by launching kernels, {1e3 * launching:g} ms per layer"
        slower = _not_counted(setup, row)
        source += "".join(f"; excludes {reason}" for reason in slower)
        if setup.compile != row.compile:
            source += "; the effect of torch.compile is not measured"
    if setup.gpus > 1:
        source += f"; {setup.gpus} times one GPU, excluding communication"
    small = parameters < row.parameters / _MUCH_SMALLER
    return Speed(one * setup.gpus, source, small or bool(slower))


# Models smaller by this factor do not reach the MFU of a measured one.
_MUCH_SMALLER = 3
# Slowdown by policy of gradient checkpointing: frac-1.3b at 8 x 4096 on one H200.
_RECOMPUTED = {"all": 40337 / 49181}


def _not_counted(setup: Setup, row: Measured) -> list[str]:
    """What makes a run slower than its estimate."""
    reasons = []
    if setup.recomputed not in ("no", row.recompute, *_RECOMPUTED):
        reasons.append(f"the time of recomputation with policy {setup.policy!r}")
    if not setup.half:
        reasons.append("the slowdown of float32, which is not measured")
    return reasons


def _nearest(parameters: int, setup: Setup) -> Measured:
    """The row most similar to a run, by the first difference of these.

    Size; torch.compile; whether a micro-batch has at least as many tokens, because the speed of few
    says nothing about more; recomputation; tokens.
    """

    def distance(row: Measured) -> tuple[float, bool, bool, bool, float]:
        tokens = row.batch * row.length
        return (
            abs(math.log(row.parameters / parameters)),
            row.compile != setup.compile,
            tokens < setup.tokens,
            row.recompute != setup.recomputed,
            abs(math.log(tokens / setup.tokens)),
        )

    # Rows with other kinds of recomputation or compilation say nothing about a run without.
    rows = [
        row
        for row in MEASURED
        if row.recompute in ("no", setup.recomputed) and row.compile in ("no", setup.compile)
    ]
    return min(rows, key=distance)
