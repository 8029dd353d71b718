"""What is measured of a model: rows of prefill, decoding, a training step, and of small models.

Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.bench.peers import build
from flash_frac.bench.timing import (
    OURS,
    Times,
    attempt,
    make_row,
    peak_mib,
    quantiles,
    runnable,
    time_in_turns,
    wall_ms,
)
from flash_frac.models import FracConfig, FracForCausalLM


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: lengths, batches, and how many tokens a decoding takes."""

    prefill: tuple[int, ...] = (1024, 4096, 16384)
    decode_batches: tuple[int, ...] = (1, 64)
    prompt: int = 1024
    steps: int = 128
    # Fewer through transformers, where a step takes many times as long.
    eager_steps: int = 32
    train: tuple[int, int] = (8, 4096)
    small: tuple[int, ...] = (64, 256, 1024, 4096, 16384)


CPU_SIZES = Sizes(
    prefill=(16, 32),
    decode_batches=(1, 2),
    prompt=16,
    steps=16,
    eager_steps=16,
    train=(2, 32),
    small=(16,),
)


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
        function: Callable[[], object],
        *,
        tokens: int,
    ) -> dict:
        """A row, with the memory of one more call of the function."""
        # The allocator does not see what a CUDA graph uses when it is replayed.
        graph = label.endswith("(Generator)")
        return make_row(
            label,
            passed,
            {"B": ids.shape[0], "T": ids.shape[1], **self.shape},
            self.model.dtype,
            times,
            tokens=tokens,
            peak=None if graph else peak_mib(function, whole=True),
            error=self.error,
        )


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
        from flash_frac.generation import Generator

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
        functions = runnable(functions, failures)
        times = time_in_turns(functions)
        rows += [
            subject.row(label, "prefill", ids, times[label], function, tokens=num_tokens)
            for label, function in functions.items()
        ]
    return rows


def decode_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Greedy decoding by `generate` of transformers; ours also by `Generator`."""
    rows = []
    for batch in sizes.decode_batches:
        ids = subject.tokens(batch, sizes.prompt)
        ways = {subject.label("generate"): (subject.model.generate, sizes.eager_steps)}
        if generator := make_generator(subject, failures):
            ways[subject.label("Generator")] = (generator.generate, sizes.steps)
        for label, (generate, steps) in ways.items():
            for times in attempt(label, partial(step_times, generate, ids, steps), failures):
                many = partial(generate, ids, max_new_tokens=1 + steps)
                rows.append(subject.row(label, "decode", ids, times, many, tokens=batch))
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
    functions = runnable({subject.label(): partial(forward_backward, model, ids)}, failures)
    times = time_in_turns(functions)
    rows = [
        subject.row(label, "train", ids, times[label], function, tokens=ids.numel())
        for label, function in functions.items()
    ]
    model.zero_grad(set_to_none=True)
    model.eval()
    return rows


def small_rows(
    device: str, dtype: torch.dtype, sizes: Sizes, error: float, failures: list[str]
) -> list[dict]:
    """A model of width 256 on each of our backends, logits and loss included."""
    config = FracConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        frac_num_modes=16,
    )
    subjects = {}
    for backend in ("triton", "torch") if device == "cuda" else ("torch",):
        model = set_backend(build(config, dtype, device), backend)
        subject = our_subject(model, error if backend == "triton" else None)
        subjects[subject.label(backend)] = subject
    rows = []
    for num_tokens in sizes.small:
        ids = next(iter(subjects.values())).tokens(1, num_tokens)
        for passed, run in (("forward", forward), ("forward+backward", forward_backward)):
            functions = runnable(
                {label: partial(run, s.model, ids) for label, s in subjects.items()}, failures
            )
            times = time_in_turns(functions)
            rows += [
                subjects[label].row(label, passed, ids, times[label], function, tokens=num_tokens)
                for label, function in functions.items()
            ]
    return rows
