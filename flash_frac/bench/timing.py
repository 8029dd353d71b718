"""How functions are timed: warm, in turns, on a GPU by events, with the memory they need."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")
# What the rows of this project's own code begin with; all others are peers.
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
    """Milliseconds of one call, the work it left on the GPU included."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return 1e3 * (time.perf_counter() - start)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sample(function: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of `repeats` calls; of quick ones on a GPU as many as fit in 0.2 s.

    Those are timed by CUDA events, the GPU's cache flushed before each; past 50 ms neither that nor
    the clock's own cost matters, and `do_bench` would take twelve calls to give five times.
    """
    if not torch.cuda.is_available() or wall_ms(function) > 50:
        return [wall_ms(function) for _ in range(repeats)]
    from triton.testing import do_bench

    return do_bench(function, warmup=20, rep=200, return_mode="all")  # pyright: ignore


def time_in_turns(
    functions: Mapping[str, Callable[[], object]], *, rounds: int = 2, repeats: int = 5
) -> dict[str, Times]:
    """Times of each function; they take turns, so that noise falls on all."""
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
    """Those that run once without an error."""
    return {name: f for name, f in functions.items() if attempt(name, f, failures)}


def attempt(name: str, function: Callable[[], Result], failures: list[str]) -> list[Result]:
    """The result in a list; if it fails an empty one, and why is printed and noted, once.

    A peer may be missing or refuse its work, and the others are still to run.
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
    """Memory on the GPU at its highest in a call: what it adds, or all of it; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = 0 if whole else torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def exit_if_ours_failed(failures: Iterable[str]) -> None:
    """A peer may fail; if our own code does, the run is to be seen as failed."""
    if ours := [failure for failure in failures if failure.startswith(OURS)]:
        raise SystemExit("\n".join(["our own code failed:", *ours]))
