"""Rows of one model: prefill, decoding, a training step, streams; and rows of small models.

Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.bench.rows import make_row
from flash_frac.bench.timing import (
    OURS,
    Times,
    attempt,
    peak_mib,
    quantiles,
    runnable,
    time_in_turns,
    wall_ms,
)
from flash_frac.inference import FracStream
from flash_frac.models import FracConfig, FracForCausalLM

# A small model in which all kernels run.
SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
SMALL |= {"num_attention_heads": 4, "frac_num_modes": 16}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths, batches, and how many tokens a decoding takes; those of a GPU by default."""

    prefill: tuple[int, ...] = (1024, 4096, 16384)
    decode_batches: tuple[int, ...] = (1, 64)
    prompt: int = 1024
    steps: int = 128
    # Fewer through transformers' loop, where a step takes many times as long.
    eager_steps: int = 32
    train: tuple[int, int] = (8, 4096)
    small: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    # Tokens that a stream is fed, and that it generates in a call.
    stream: tuple[int, int] = (1024, 256)


CPU_SIZES = Sizes(
    prefill=(16, 32),
    decode_batches=(1, 2),
    prompt=16,
    steps=16,
    eager_steps=16,
    train=(2, 32),
    small=(16,),
    stream=(16, 8),
)


def default_sizes(**asked: Any) -> Sizes:
    """Those of a GPU, or tiny ones on a CPU, with others for what is asked for and not None."""
    sizes = Sizes() if torch.cuda.is_available() else CPU_SIZES
    return replace(sizes, **{name: x for name, x in asked.items() if x is not None})


class Subject(NamedTuple):
    """A model on the device, what it is called, what runs in it, its H, M, D and known error."""

    name: str
    model: Any
    note: str
    shape: Mapping[str, int | None]
    error: float | None = None

    @property
    def is_ours(self) -> bool:
        return isinstance(self.model, FracForCausalLM)

    def label(self, way: str = "") -> str:
        """The implementation of a row: name, size, and the way of ours or the note of a peer."""
        note = way if self.is_ours else self.note
        return f"{self.name} {count(self.model)}" + (f" ({note})" if note else "")

    def tokens(self, batch: int, time: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.model.config.vocab_size, (batch, time), generator=generator)
        return ids.to(self.model.device)

    def row(
        self,
        label: str,
        passed: str,
        ids: Tensor,
        times: Times,
        *,
        tokens: int | None,
        function: Callable[[], object] | None = None,
    ) -> dict:
        """A row, with the memory of one more call of the function."""
        peak = None
        # The allocator does not see what a CUDA graph uses when it is replayed.
        if function is not None and not label.endswith(("(Generator)", "(generate)")):
            peak = peak_mib(function, whole=True)
        return make_row(
            label,
            passed,
            {"B": ids.shape[0], "T": ids.shape[1], **self.shape},
            self.model.dtype,
            times,
            tokens=tokens,
            peak=peak,
            error=self.error,
        )

    def rows(
        self,
        passed: str,
        ids: Tensor,
        functions: Mapping[str, Callable[[], object]],
        failures: list[str],
    ) -> list[dict]:
        """Rows of the functions that run, by their labels, timed in turns on all of `ids`."""
        times = time_in_turns(runnable(functions, failures))
        return [
            self.row(label, passed, ids, found, tokens=ids.numel(), function=functions[label])
            for label, found in times.items()
        ]


def build(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A causal language model with random weights, made on the device and never elsewhere."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # generate is to run to the end, whatever the random weights come up with.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def our_subject(model: FracForCausalLM, error: float | None) -> Subject:
    config = model.config
    heads, modes = config.num_attention_heads, config.frac_num_modes
    shape = {"H": heads, "M": modes, "D": config.frac_head_dim}
    return Subject(OURS, model, "", shape, error)


def count(model: Any) -> str:
    """The number of parameters, those shared counted once."""
    number = sum(parameter.numel() for parameter in model.parameters())
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{letter}"
    return f"{number / 1e3:.1f}K"


def set_backend(model: Any, backend: str) -> Any:
    """Have every layer that can choose compute with this backend."""
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = backend
    return model


def forward(model: Any, ids: Tensor) -> None:
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def forward_backward(model: Any, ids: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def make_generator(subject: Subject, failures: list[str]) -> Any:
    """Our fast path of inference around the model; None for a peer, or if it cannot be made."""

    def make() -> Any:
        from flash_frac.inference import Generator

        return Generator(subject.model)

    made = attempt(subject.label("Generator"), make, failures) if subject.is_ours else []
    return made[0] if made else None


def prefill_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """The backbone with its cache; ours also as `Generator` does it, up to the next token."""

    def eager(ids: Tensor) -> None:
        with torch.no_grad():
            subject.model.base_model(input_ids=ids, use_cache=True)

    rows = []
    for num_tokens in sizes.prefill:
        ids = subject.tokens(1, num_tokens)
        functions: dict[str, Callable[[], object]] = {subject.label("eager"): partial(eager, ids)}
        # A new one each time, because it keeps the memory of every shape it has seen.
        if generator := make_generator(subject, failures):
            functions[subject.label("Generator")] = partial(generator.prefill, ids)
        rows += subject.rows("prefill", ids, functions, failures)
    return rows


def decode_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Greedy decoding by `model.generate`; ours also by transformers' loop and by `Generator`."""
    rows = []
    for batch in sizes.decode_batches:
        ids = subject.tokens(batch, sizes.prompt)
        generate = subject.model.generate
        ways = {subject.label("generate"): (generate, sizes.eager_steps)}
        if subject.is_ours:
            # On a GPU, `generate` replays graphs, unless it is asked for a cache.
            loop = partial(generate, cache_implementation="dynamic")
            ways = {
                subject.label("generate"): (generate, sizes.steps),
                subject.label("transformers' loop"): (loop, sizes.eager_steps),
            }
        if generator := make_generator(subject, failures):
            ways[subject.label("Generator")] = (generator.generate, sizes.steps)
        for label, (generate, steps) in ways.items():
            for times in attempt(label, partial(step_times, generate, ids, steps), failures):
                many = partial(generate, ids, max_new_tokens=1 + steps)
                row = subject.row(label, "decode", ids, times, tokens=batch, function=many)
                rows.append(row)
    return rows


def step_times(generate: Callable[..., Tensor], ids: Tensor, steps: int) -> Times:
    """Milliseconds of a step: the time of many tokens less that of one, which holds the prefill."""

    def run(num: int) -> None:
        output = generate(ids, max_new_tokens=num)
        expected = (ids.shape[0], ids.shape[1] + num)
        if output.shape != expected:
            raise ValueError(f"generate gave {tuple(output.shape)}, expected {expected}")

    one, many = partial(run, 1), partial(run, 1 + steps)
    one()
    many()
    pairs = [(wall_ms(one), wall_ms(many)) for _ in range(5)]
    first = statistics.median(pair[0] for pair in pairs)
    times = quantiles([(pair[1] - first) / steps for pair in pairs])
    if times.p50 <= 0:
        raise ValueError("the clock is too noisy: many tokens took no longer than one")
    return times


def train_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Forward and backward of the language model, its loss included."""
    model, ids = subject.model.train(), subject.tokens(*sizes.train)
    functions = {subject.label(): partial(forward_backward, model, ids)}
    rows = subject.rows("train", ids, functions, failures)
    model.zero_grad(set_to_none=True)
    model.eval()
    return rows


def small_rows(
    device: str, dtype: torch.dtype, sizes: Sizes, error: float, failures: list[str]
) -> list[dict]:
    """A model of width 256 on each of our backends, logits and loss included."""
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
                row = subjects[label].row(
                    label, passed, ids, found, tokens=num_tokens, function=functions[label]
                )
                rows.append(row)
    return rows


def stream_rows(subject: Subject, sizes: Sizes, folder: Path) -> Iterator[dict]:
    """Saving and loading a FracStream in a folder, and one token more; T tokens were fed."""
    fed, generated = sizes.stream
    ids = subject.tokens(1, fed)
    row = partial(subject.row, subject.label("FracStream"), ids=ids)
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
    """Times of one token, in a stream that goes on and on; graphs are recorded before."""

    def run() -> None:
        made = sum(1 for _ in stream.generate(max_new_tokens=num_tokens, eos=False))
        assert made == num_tokens, f"{made} of {num_tokens} tokens were generated"

    return repeated_times(run, parts=num_tokens)


def repeated_times(function: Callable[[], object], *, parts: int = 1) -> Times:
    """Times of one of the equal parts of a call, over seven calls after one that does not count."""
    function()
    return quantiles([wall_ms(function) / parts for _ in range(7)])
