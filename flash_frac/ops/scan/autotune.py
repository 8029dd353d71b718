"""Tune launch parameters of the scan on this GPU, on request.

    python -m flash_frac.ops.scan.autotune --batch 8 --time 4096 --heads 16 --channels 256

Copy the printed parameters to `ops/scan/tuning.py`, or call `autotune` to use them in a process.
Letters: B batch, T time, H heads, M modes, D head channels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from flash_frac.ops.scan.plan import forget_plans
from flash_frac.ops.scan.triton import triton_scan
from flash_frac.ops.scan.tuning import TUNED, Tuning, Walk, tuning_for
from flash_frac.ops.testing import random_inputs


def candidates(tuning: Tuning) -> Iterator[Tuning]:
    """All parameter sets that differ from `tuning` in one parameter."""
    for programs in (256, 512, 1024, 2048):
        yield tuning._replace(programs=programs)
    for warps in (1, 2, 4):
        yield tuning._replace(mix_warps=warps)
        yield tuning._replace(mix_backward_warps=warps)
    for name in ("states", "output", "gradient"):
        walk: Walk = getattr(tuning, name)
        for channels in (32, 64, 128, 256):
            yield tuning._replace(**{name: walk._replace(channels=channels)})
        for warps in (2, 4, 8):
            yield tuning._replace(**{name: walk._replace(warps=warps)})
        for stages in (1, 2, 3):
            yield tuning._replace(**{name: walk._replace(stages=stages)})


def improve(start: Tuning, cost: Callable[[Tuning], float]) -> Tuning:
    """Change one parameter at a time, as long as that is faster."""
    best, least = start, cost(start)
    known = {start}
    while True:
        before = best
        for tuning in candidates(best):
            if tuning in known:
                continue
            known.add(tuning)
            if (found := cost(tuning)) < least:
                best, least = tuning, found
        if best is before:
            return best


def autotune(
    *,
    batch: int = 8,
    time: int = 4096,
    heads: int = 16,
    modes: int = 16,
    channels: int = 256,
    dtype: torch.dtype = torch.bfloat16,
) -> Tuning:
    """Find the fastest parameters for these sizes, and use them in this process from now on."""
    if not torch.cuda.is_available():
        raise RuntimeError("autotune measures on a GPU, and there is none")
    from triton.testing import do_bench

    inputs = random_inputs(batch, time, heads, modes, channels, device="cuda", rho_eps=1e-6)
    leaves = [x.requires_grad_() for x in inputs._replace(u=inputs.u.to(dtype))]
    key = (dtype, leaves[0].device)

    def run() -> None:
        y, _ = triton_scan(*leaves, None, None)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    def cost(tuning: Tuning) -> float:
        use(tuning)
        try:
            milliseconds = do_bench(run, warmup=5, rep=30, return_mode="median")
        except (CompilationError, OutOfResources):
            # Needs more shared memory or registers than the GPU has.
            return float("inf")
        print(f"{milliseconds:8.3f} ms  {tuning}")
        return milliseconds

    def use(tuning: Tuning) -> None:
        TUNED[key] = tuning
        forget_plans()

    best = improve(tuning_for(*key), cost)
    use(best)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("batch", 8), ("time", 4096), ("heads", 16), ("modes", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = vars(parser.parse_args())
    print("fastest:", autotune(**options | {"dtype": getattr(torch, options["dtype"])}))


if __name__ == "__main__":
    main()
