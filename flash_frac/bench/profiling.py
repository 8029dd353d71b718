"""Where the time of our model goes: its kernels, and the time in which none runs.

Letters: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from flash_frac.bench.parts import Sizes, forward, forward_backward, generator_way
from flash_frac.bench.recording import is_recorded
from flash_frac.bench.rows import MADE_WITH
from flash_frac.bench.subjects import Subject, Way, make_generator, mode_name
from flash_frac.bench.timing import attempt, synchronize

PROFILE_COLUMNS = (
    *("implementation", "pass", "mode", "B", "T", "kernel", "calls", "us", "percent"),
    *MADE_WITH,
)
# Kernels with rows of their own; longer names are cut.
MOST_KERNELS, LONGEST_NAME = 15, 90
ALL, OTHERS, NONE = "(all)", "(other kernels)", "(no kernel runs)"
# Calls before and in a profile. The third call of a recorded function replays its graph.
WARM, REPEATS = 3, 5


class Kernel(NamedTuple):
    """One run of a kernel, in microseconds."""

    name: str
    start: float
    end: float


def kernels_of(function: Callable[[], object], repeats: int) -> list[Kernel]:
    """The kernels of some calls, also of CUDA graphs; on a CPU, torch's operators."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    synchronize()
    with profile(activities=[activity]) as profiler:
        for _ in range(repeats):
            function()
        synchronize()
    kind = "CUDA" if on_gpu else "CPU"
    events: Iterable[Any] = profiler.events() or ()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == kind
    ]


def summarise(kernels: Sequence[Kernel], repeats: int) -> list[dict]:
    """Calls, microseconds and percent of the time of a call, the longest kernels first.

    The time of a call is from the first kernel to the last, divided by `repeats`. Kernels that run
    concurrently each count in full, so percents may add up to more than 100.
    """
    if not kernels:
        raise ValueError("the profiler saw no kernels: it needs CUPTI, and no other profiler")
    whole = max(x.end for x in kernels) - min(x.start for x in kernels)
    found: dict[str, list[float]] = {}
    # The end of what has run so far, and the time during which nothing ran.
    end, idle = min(x.start for x in kernels), 0.0
    for kernel in sorted(kernels, key=lambda x: x.start):
        found.setdefault(kernel.name[:LONGEST_NAME], []).append(kernel.end - kernel.start)
        idle += max(0.0, kernel.start - end)
        end = max(end, kernel.end)
    longest = sorted(found, key=lambda name: -sum(found[name]))
    kept, rest = longest[:MOST_KERNELS], longest[MOST_KERNELS:]
    others = [time for name in rest for time in found[name]]
    lines = [(ALL, repeats, whole), *((name, len(found[name]), sum(found[name])) for name in kept)]
    lines += [(OTHERS, len(others), sum(others)), (NONE, 0, idle)]
    return [
        {
            "kernel": name,
            "calls": round(calls / repeats, 2),
            "us": round(time / repeats, 1),
            "percent": round(100 * time / whole, 1),
        }
        for name, calls, time in lines
    ]


def print_profile(rows: Sequence[Mapping]) -> None:
    for row in rows:
        if row["kernel"] == ALL:
            about = f"{row['pass']} ({row['mode']}), {row['B']} x {row['T']}"
            print(f"{row['implementation']}, {about}: {row['us']:,.1f} us")
        else:
            print(
                f"{row['us']:12,.1f} us {row['percent']:5.1f}% {row['calls']:8g} x {row['kernel']}"
            )


def profile_prefill(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """`Generator.prefill` of one prompt."""
    rows = []
    for num_tokens in sizes.prefill:
        ids = subject.tokens(1, num_tokens)
        for generator in filter(None, [make_generator(subject, failures)]):
            rows += _rows(subject, generator_way(subject, generator, ids), "prefill", ids, failures)
    return rows


def profile_forward(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """`model(ids)`, eager: the time in which no kernel runs is the host's."""
    rows = []
    for num_tokens in sizes.forward:
        ids = subject.tokens(1, num_tokens)
        way = Way(subject.label("eager"), "eager", partial(forward, subject.model, ids))
        rows += _rows(subject, way, "forward", ids, failures)
    return rows


def profile_decode(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Steps of `Generator`."""
    rows, mode = [], mode_name(is_recorded(subject.model))
    for batch in sizes.decode_batches:
        ids = subject.tokens(batch, sizes.prompt)
        for generator in filter(None, [make_generator(subject, failures)]):
            # One more, because on a GPU a step is launched before the last token is read.
            tokens = generator.stream(ids, max_new_tokens=WARM + REPEATS + 1)
            way = Way(subject.label("Generator"), mode, partial(next, tokens))
            rows += _rows(subject, way, "decode", ids, failures)
    return rows


def profile_train(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Forward and backward of the language model with its loss."""
    model, ids = subject.model.train(), subject.tokens(*sizes.train)
    way = Way(subject.label(), "eager", partial(forward_backward, model, ids))
    rows = _rows(subject, way, "train", ids, failures)
    model.zero_grad(set_to_none=True)
    model.eval()
    return rows


PROFILED = {
    "prefill": profile_prefill,
    "forward": profile_forward,
    "decode": profile_decode,
    "train": profile_train,
}


def _rows(
    subject: Subject, way: Way, passed: str, ids: torch.Tensor, failures: list[str]
) -> list[dict]:
    """The rows of one way to run a model; none for a peer."""

    def measure() -> list[dict]:
        call = way.call
        assert call is not None
        for _ in range(WARM):
            call()
        return summarise(kernels_of(call, REPEATS), REPEATS)

    about = {"implementation": way.label, "pass": passed, "mode": way.mode}
    about |= {"B": ids.shape[0], "T": ids.shape[1]}
    found = attempt(way.label, measure, failures) if subject.is_ours else []
    return [{**about, **line} for lines in found for line in lines]
