"""Time functions: after a warm-up, interleaved, with CUDA events on a GPU; measure their memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")
# Prefix of rows of this project's own code; all others are peers.
OURS = "flash_frac"


class Times(NamedTuple):
    """Quantiles of the time of a call, in milliseconds."""

    p20: float
    p50: float
    p80: float


def quantiles(times: list[float]) -> Times:
    """p20, p50 and p80 of two or more times."""
    low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return Times(low, statistics.median(times), high)


def wall_ms(function: Callable[[], object]) -> float:
    """Milliseconds of one call, including its pending work on the GPU."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sample(function: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of `repeats` calls; for quick ones on a GPU, of as many as fit in 0.2 s.

    Quick ones are timed with CUDA events, after flushing the GPU's cache. Above 50 ms neither the
    cache nor the clock's overhead matters, and `do_bench` would need twelve calls for five times.
    """
    if not torch.cuda.is_available() or wall_ms(function) > 50:
        return [wall_ms(function) for _ in range(repeats)]
    from triton.testing import do_bench

    return do_bench(function, warmup=20, rep=200, return_mode="all")  # pyright: ignore


def time_in_turns(
    functions: Mapping[str, Callable[[], object]], *, rounds: int = 2, repeats: int = 5
) -> dict[str, Times]:
    """Times of each function; calls are interleaved, so that noise affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            times[name] += sample(function, repeats)
    return {name: quantiles(values) for name, values in times.items()}


def runnable(
    functions: Mapping[str, Callable[[], object]], failures: list[str]
) -> dict[str, Callable[[], object]]:
    """The functions that run once without an error."""
    return {name: f for name, f in functions.items() if attempt(name, f, failures)}


def attempt(name: str, function: Callable[[], Result], failures: list[str]) -> list[Result]:
    """The result in a list; after an error an empty list, and the reason is printed and recorded.

    A peer may be missing or fail, and the others must still run.
    """
    try:
        result = function()
        synchronize()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        failure = f"{name}: {type(error).__name__}: {lines[0][:300]}"
        if failure not in failures:
            print(f"left out: {failure}", flush=True)
            failures.append(failure)
        return []
    return [result]


def peak_mib(function: Callable[[], object], *, whole: bool = False) -> int | None:
    """Peak GPU memory of a call: what it adds, or all of it; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = 0 if whole else torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def exit_if_ours_failed(failures: Iterable[str]) -> None:
    """Exit with an error if our own code failed; a peer may fail."""
    if ours := [failure for failure in failures if failure.startswith(OURS)]:
        raise SystemExit("\n".join(["our own code failed:", *ours]))
