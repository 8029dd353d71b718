"""Rows of one model: prefill, forward, decoding, a training step, streams; also small models.

Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_frac.bench.recording import can_record, is_recorded, record_decoding, record_prefill
from flash_frac.bench.subjects import (
    Subject,
    Way,
    build,
    make_generator,
    mode_name,
    our_subject,
    set_backend,
)
from flash_frac.bench.timing import Times, attempt, quantiles, runnable, time_in_turns, wall_ms
from flash_frac.inference import FracStream
from flash_frac.inference.slots import LONGEST_RECORDED
from flash_frac.models import FracConfig, FracForCausalLM

# A step of twice as many sequences may take this many times as long; more is a cliff.
STEEPEST = 1.5
# A small model that uses all kernels.
SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
SMALL |= {"num_attention_heads": 4, "frac_num_modes": 16}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths, batches and number of decoded tokens; the defaults are for a GPU."""

    prefill: tuple[int, ...] = (1024, 4096, 16384)
    forward: tuple[int, ...] = (1024, 4096)
    decode_batches: tuple[int, ...] = (1, 64)
    prompt: int = 1024
    # As in the paper.
    steps: int = 64
    train: tuple[int, int] = (8, 4096)
    # Prompts that are read in pieces, the shortest first.
    growth: tuple[int, ...] = (2**14, 2**16, 2**18, 2**20)
    # Gradient checkpointing policies with which to also train our model.
    policies: tuple[str, ...] = ()
    small: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    # Tokens fed to a stream, and tokens that it generates per call.
    stream: tuple[int, int] = (1024, 256)
    # "eager" or "graph": measure only this mode of prefill and decoding.
    only: str | None = None

    def asks_for(self, mode: str) -> bool:
        return self.only in (None, mode)


CPU_SIZES = Sizes(
    prefill=(16, 32),
    forward=(16, 32),
    decode_batches=(1, 2),
    prompt=16,
    steps=16,
    train=(2, 32),
    growth=(16, 64),
    small=(16,),
    stream=(16, 8),
)


def default_sizes(**asked: Any) -> Sizes:
    """Sizes for a GPU, or tiny ones for a CPU; arguments that are not None override them."""
    sizes = Sizes() if torch.cuda.is_available() else CPU_SIZES
    return replace(sizes, **{name: x for name, x in asked.items() if x is not None})


def forward(model: Any, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def forward_backward(model: Any, ids: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def recomputing(model: FracForCausalLM, ids: Tensor, policy: str) -> None:
    """`forward_backward` with a gradient checkpointing policy."""
    model.gradient_checkpointing_enable({"policy": policy})
    try:
        forward_backward(model, ids)
    finally:
        model.gradient_checkpointing_disable()


def prefill_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """The backbone with its cache, eager and in a graph; `Generator` also computes logits."""

    def eager(ids: Tensor) -> None:
        with torch.no_grad():
            subject.model.base_model(input_ids=ids, use_cache=True)

    rows = []
    for num_tokens in sizes.prefill:
        ids = subject.tokens(1, num_tokens)
        ways = [Way(subject.label("eager"), "eager", partial(eager, ids))]
        recorded = can_record(subject.model) and sizes.asks_for("graph")
        # Build a new one each time, because it keeps the memory of every shape.
        if generator := make_generator(subject, failures):
            ways.append(generator_way(subject, generator, ids))
            # For our model, use the graph of `Generator` if it has one.
            recorded = recorded and ways[-1].mode == "eager"
        if recorded:
            record = partial(record_prefill, subject.model, ids, subject.prefill_options)
            label = subject.label("graph")
            ways += [Way(label, "graph", call) for call in attempt(label, record, failures)]
        held = subject.state_bytes(ids, failures)
        ways = [way for way in ways if sizes.asks_for(way.mode)]
        rows += subject.rows("prefill", ids, ways, failures, held)
    return rows


def generator_way(subject: Subject, generator: Any, ids: Tensor) -> Way:
    """Prefill by `Generator`, which records short prompts."""
    by_graph = is_recorded(subject.model) and ids.shape[1] <= LONGEST_RECORDED
    return Way(subject.label("Generator"), mode_name(by_graph), partial(generator.prefill, ids))


def forward_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """`model(ids)` without a cache or gradients, eager, with the logits of all tokens."""
    rows = []
    for num_tokens in sizes.forward:
        ids = subject.tokens(1, num_tokens)
        way = Way(subject.label("eager"), "eager", partial(forward, subject.model, ids))
        rows += subject.rows("forward", ids, [way], failures)
    return rows


def decode_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Greedy decoding with `model.generate` and, for peers, with all steps in one graph.

    Our `generate` replays graphs on a GPU, so our eager row uses transformers' loop. Our other row
    uses `Generator`. Prints how step times grow with the batch.
    """
    rows = []
    for batch in sizes.decode_batches:
        ids = subject.tokens(batch, sizes.prompt)
        held = subject.state_bytes(ids, failures)
        times: dict[Way, Callable[[], Times]] = {}
        for way, generate in generating_ways(subject, failures).items():
            many = partial(generate, ids, max_new_tokens=1 + sizes.steps)
            times[way._replace(call=many)] = partial(step_times, generate, ids, sizes.steps)
        if can_record(subject.model) and not subject.is_ours:
            way = Way(subject.label("graph"), "graph")
            times[way] = partial(recorded_step_times, subject, ids, sizes.steps)
        for way, measure in times.items():
            for found in attempt(way.label, measure, failures) if sizes.asks_for(way.mode) else ():
                row = subject.row(way, "decode", ids, found, tokens=batch, state_bytes=held)
                rows.append(row)
    for line in describe_steps(rows):
        print(line, flush=True)
    return rows


def describe_steps(rows: Iterable[dict]) -> list[str]:
    """For each way of decoding, the steepest growth of a step with twice as many sequences."""
    steps: dict[str, dict[int, float]] = {}
    for row in rows:
        steps.setdefault(row["implementation"], {})[row["B"]] = row["ms_p50"]
    lines = []
    for label, times in steps.items():
        growth = {b: times[2 * b] / times[b] for b in times if 2 * b in times}
        if growth:
            batch = max(growth, key=lambda b: growth[b])
            text = f"{label}: a step of 2B takes at most {growth[batch]:.2f} times a step of B"
            cliffs = [b for b in growth if growth[b] > STEEPEST]
            named = "".join(f"; CLIFF from {b} to {2 * b}: {growth[b]:.2f}" for b in cliffs)
            lines.append(f"{text} ({batch} to {2 * batch}){named}")
    return lines


def generating_ways(subject: Subject, failures: list[str]) -> dict[Way, Callable[..., Tensor]]:
    """Functions of prompts and `max_new_tokens`, by label."""
    generate = subject.model.generate
    if not subject.is_ours:
        return {Way(subject.label("generate"), "eager"): generate}
    ways: dict[Way, Callable[..., Tensor]] = {}
    mode = mode_name(is_recorded(subject.model))
    if generator := make_generator(subject, failures):
        ways[Way(subject.label("Generator"), mode)] = generator.generate
    # On a GPU, `generate` also replays graphs, unless a cache implementation is requested.
    ways[Way(subject.label("generate"), mode)] = generate
    loop = partial(generate, cache_implementation="dynamic")
    return {**ways, Way(subject.label("transformers' loop"), "eager"): loop}


def recorded_step_times(subject: Subject, ids: Tensor, steps: int) -> Times:
    """Milliseconds per step in a graph of all steps."""
    decode = record_decoding(subject.model, ids, steps, subject.make_cache)
    return repeated_times(decode, parts=steps)


def step_times(generate: Callable[..., Tensor], ids: Tensor, steps: int) -> Times:
    """Milliseconds per step: time of many tokens minus that of one, which includes the prefill."""

    def run(num: int) -> None:
        output = generate(ids, max_new_tokens=num)
        expected = (ids.shape[0], ids.shape[1] + num)
        if output.shape != expected:
            raise ValueError(f"generate gave {tuple(output.shape)}, expected {expected}")

    one, many = partial(run, 1), partial(run, 1 + steps)
    one()
    many()
    pairs = [(wall_ms(one), wall_ms(many)) for _ in range(3)]
    first = statistics.median(pair[0] for pair in pairs)
    times = quantiles([(pair[1] - first) / steps for pair in pairs])
    if times.p50 <= 0:
        raise ValueError("the clock is too noisy: many tokens took no longer than one")
    return times


def train_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Forward and backward of the language model with its loss; ours also with `policies`."""
    model, ids = subject.model.train(), subject.tokens(*sizes.train)
    ways = [Way(subject.label(), "eager", partial(forward_backward, model, ids))]
    for policy in sizes.policies if subject.is_ours else ():
        label = subject.label(f"recomputing {policy}")
        ways.append(Way(label, "eager", partial(recomputing, model, ids, policy)))
    rows = subject.rows("train", ids, ways, failures)
    model.zero_grad(set_to_none=True)
    model.eval()
    return rows


def small_rows(
    device: str, dtype: torch.dtype, sizes: Sizes, error: float, failures: list[str]
) -> list[dict]:
    """A model of width 256 on each of our backends, including logits and loss."""
    config = FracConfig(**SMALL, num_hidden_layers=8)
    subjects = {}
    for backend in ("triton", "torch") if device == "cuda" else ("torch",):
        model = set_backend(build(config, dtype, device), backend)
        subject = our_subject(model, error if backend == "triton" else None)
        subjects[subject.label(backend)] = subject
    rows = []
    for num_tokens in sizes.small:
        ids = next(iter(subjects.values())).tokens(1, num_tokens)
        for passed, run in (("forward", forward), ("forward+backward", forward_backward)):
            functions = {label: partial(run, s.model, ids) for label, s in subjects.items()}
            times = time_in_turns(runnable(functions, failures))
            for label, found in times.items():
                way = Way(label, "eager", functions[label])
                rows.append(subjects[label].row(way, passed, ids, found, tokens=num_tokens))
    return rows


def stream_rows(subject: Subject, sizes: Sizes, folder: Path) -> Iterator[dict]:
    """Save and load a FracStream of T tokens in a folder, and decode one more token."""
    fed, generated = sizes.stream
    ids = subject.tokens(1, fed)
    way = Way(subject.label("FracStream"), mode_name(is_recorded(subject.model)))
    row = partial(subject.row, way, ids=ids)
    stream = FracStream(subject.model).feed(ids)
    path = folder / "state.safetensors"
    files = {
        "save": partial(stream.save, path),
        "load": partial(FracStream.load, path, subject.model),
    }
    for name, call in files.items():
        yield row(passed=name, times=repeated_times(call), tokens=None)
    yield row(passed="stream", times=stream_step_times(stream, generated), tokens=1)


def stream_step_times(stream: FracStream, num_tokens: int) -> Times:
    """Times per token in a continuing stream, after graphs are recorded."""

    def run() -> None:
        made = sum(1 for _ in stream.generate(max_new_tokens=num_tokens, eos=False))
        assert made == num_tokens, f"{made} of {num_tokens} tokens were generated"

    return repeated_times(run, parts=num_tokens)


def repeated_times(function: Callable[[], object], *, parts: int = 1) -> Times:
    """Times of one of the equal parts of a call, over seven calls after one warm-up."""
    function()
    return quantiles([wall_ms(function) / parts for _ in range(7)])
