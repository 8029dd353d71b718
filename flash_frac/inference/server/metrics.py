"""Metrics of a server in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

# Upper bounds of the buckets, in seconds.
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Histogram:
    """Counts of values up to each bound.

    Example: `Histogram("x_seconds", "Time of x.", (0.1, 1)).add(0.5)`
    """

    def __init__(self, name: str, meaning: str, bounds: Iterable[float]) -> None:
        self.name, self.meaning, self.bounds = name, meaning, tuple(bounds)
        self.counts, self.sum = [0] * (len(self.bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.meaning, "histogram")
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self.sum:.6f}"
        yield f"{self.name}_count {total}"


class Metrics:
    """Metrics of the server, with those of its engine.

    Example: `Metrics().text(engine)`
    """

    def __init__(self) -> None:
        self.first = Histogram(
            "frac_time_to_first_token_seconds", "Time from a request to its first token.", FIRST
        )
        self.between = Histogram(
            "frac_time_between_tokens_seconds", "Time between tokens of an answer.", BETWEEN
        )
        self.refused = 0

    def tokens(self, answer: Any, now: float) -> None:
        """Record that one or more tokens of an answer have come."""
        known = self.between if answer.num_tokens else self.first
        known.add(now - answer.last)
        answer.last = now

    def text(self, engine: Any) -> str:
        """All metrics in Prometheus' format."""
        lines = [*self._engine(engine), *self.first.lines(), *self.between.lines()]
        return "\n".join([*lines, ""])

    def _engine(self, engine: Any) -> Iterator[str]:
        stats = engine.stats()
        for name, meaning, value in (
            ("frac_slots", "Maximum concurrent requests.", stats.slots),
            ("frac_requests_running", "Requests being decoded.", stats.running),
            ("frac_requests_reading", "Requests in prefill.", stats.reading),
            ("frac_requests_waiting", "Requests waiting for a slot.", stats.waiting),
            ("frac_slot_bytes", "Bytes of the states of all slots.", stats.nbytes),
            ("frac_healthy", "1 until the engine has failed.", int(engine.failed is None)),
            *_memory(engine),
        ):
            yield from (*_head(name, meaning, "gauge"), f"{name} {value}")
        for name, meaning, value in (
            ("frac_prompt_tokens_total", "Prompt tokens read.", stats.prompt_tokens),
            ("frac_generated_tokens_total", "Tokens generated.", stats.new_tokens),
            (
                "frac_requests_refused_total",
                "Requests rejected because the queue was full.",
                self.refused,
            ),
        ):
            yield from (*_head(name, meaning, "counter"), f"{name} {value}")
        yield from _head("frac_requests_total", "Finished requests, by reason.", "counter")
        for reason, number in stats.finished.items():
            yield f'frac_requests_total{{reason="{reason}"}} {number}'
        yield from _prefixes(stats.prefixes)


def _head(name: str, meaning: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _memory(engine: Any) -> Iterator[tuple[str, str, int]]:
    device = engine.model.device
    if device.type == "cuda":
        taken = torch.cuda.memory_allocated(device)
        yield "frac_device_bytes", "Bytes of tensors on the GPU.", taken
        claimed = torch.cuda.memory_reserved(device)
        yield "frac_device_reserved_bytes", "Bytes that PyTorch reserves on the GPU.", claimed


def _prefixes(stats: Any) -> Iterator[str]:
    if stats is None:
        return
    counters = ("hits", "misses", "refused", "dropped", "tokens_asked", "tokens_reused")
    for name, value in asdict(stats).items():
        kind = "counter" if name in counters else "gauge" if name.endswith("bytes") else None
        if kind is None:
            continue
        label = f"frac_prefix_{name}" + ("_total" if kind == "counter" else "")
        yield from _head(label, f"Prefix states: {name.replace('_', ' ')}.", kind)
        yield f"{label} {value}"
