"""Time each rank's own work in a step, to find a rank that slows down the others.

Ranks wait for each other in every step, so a whole step takes equally long on all of them. A rank's
own work differs: waiting for its batches, and the forward pass of its layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

# A rank is slow if its own work takes this many times the median, in two logs in a row.
SLOW = 1.3


class Pace:
    """Seconds that this rank waited for batches and computed layers since the last `take`.

    Under FSDP, the timing of a layer starts once its weights are gathered. With context parallelism
    the ranks of a sequence also wait for each other inside layers, so their times are about equal.

    Args:
        layers: modules of the model in training.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._waited, self._computed, self._steps = 0.0, 0.0, 0
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        for layer in layers:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of one step, and time the wait for each."""
        self._steps += 1
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield batch

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        if layer.training:
            self._began = self._now()

    def _end(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        # Recomputation can stop a forward pass early, which then never reaches its end hook.
        if not layer.training or self._began is None:
            return
        if self._cuda:
            self._spans.append((self._began, self._now()))
        else:
            self._computed += self._now() - self._began
        self._began = None

    def take(self) -> tuple[float, float]:
        """Mean seconds per step spent waiting and computing; resets both."""
        for began, ended in self._spans:
            ended.synchronize()
            self._computed += began.elapsed_time(ended) / 1e3
        steps = max(self._steps, 1)
        taken = self._waited / steps, self._computed / steps
        self._spans, self._waited, self._computed, self._steps = [], 0.0, 0.0, 0
        return taken


def compare(seconds: list[tuple[float, float]]) -> dict[str, float]:
    """Entries for the log: the median of the ranks, the slowest time, and the slowest rank.

    Args:
        seconds: per rank, the seconds per step spent waiting and computing.
    """
    own = [sum(pair) for pair in seconds]
    slowest = max(range(len(own)), key=own.__getitem__)
    return {
        "rank_seconds/median": statistics.median_low(own),
        "rank_seconds/slowest": own[slowest],
        "rank_seconds/slowest_rank": slowest,
    }


def slow_ranks(seconds: list[tuple[float, float]]) -> set[int]:
    """The ranks that are slower than the others.

    Args:
        seconds: as in `compare`.
    """
    # With two ranks, the low median compares the slower one with the faster.
    middle = statistics.median_low(sum(pair) for pair in seconds)
    return {rank for rank, pair in enumerate(seconds) if sum(pair) > SLOW * middle}


def describe_slow(rank: int, seconds: list[tuple[float, float]], hosts: list[str]) -> str:
    """A message about a slow rank."""
    (waited, computed), middle = seconds[rank], compare(seconds)["rank_seconds/median"]
    return (
        f"rank {rank} on {hosts[rank]} is slow: {1e3 * (waited + computed):.1f} ms per step of its "
        f"own, {1e3 * waited:.1f} ms of it waiting for data; the median of {len(seconds)} ranks is "
        f"{1e3 * middle:.1f} ms"
    )
