"""Stream a model's continuation to the terminal, and save its state."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from flash_frac.inference import FracStream
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

# Sent by a supervisor or `kill`, and by a terminal that closes.
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def open_stream(
    checkpoint: str | Path,
    state: str | Path | None = None,
    *,
    tokenizer: Any = None,
    quantize: str | None = None,
) -> FracStream:
    """Open a stream on the model and tokenizer in `checkpoint`, from a saved state if given.

    `tokenizer` replaces the checkpoint's own. `quantize` is "int8" or "fp8" for 8-bit weights.

    Example: `open_stream("quickstart/final", "yesterday.state").generate(max_new_tokens=100)`
    """
    found = find_checkpoint(checkpoint)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    model = load_model(found, dtype="auto", quantize=quantize)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if state is None:
        return FracStream(model, tokenizer)
    return FracStream.load(state, model, tokenizer)


class Saves(Protocol):
    """A stream, or a conversation that may switch streams."""

    def save(self, path: Path) -> None:
        """Write the state to a file."""
        ...


@contextmanager
def saving(stream: Saves, path: Path | None, say: Callable[[str], object]) -> Iterator[None]:
    """Save a stream when the block ends for any reason, including SIGTERM and SIGHUP, and say so.

    These signals raise SystemExit with the shell's exit code, 128 + the signal number. They are
    ignored while the file is written. Without a path, nothing is saved and no signal is handled.

    Example: `with saving(stream, Path("today.state"), print): continue_text(stream, ...)`
    """
    if path is None:
        yield
        return

    def end(number: int, *unused: object) -> None:
        raise SystemExit(128 + number)

    # A signal that nohup ignores stays ignored.
    handled = [x for x in _ENDS if signal.getsignal(x) is not signal.SIG_IGN]
    before = {x: signal.signal(x, end) for x in handled}
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        try:
            stream.save(path)
            say(f"The state is in {path}.")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class Answer:
    """How a continuation ended, and how fast it came.

    Attributes:
        end: "stop" if the model ended it, "length" at the limit, "interrupt" after Ctrl-C.
        num_tokens: number of new tokens.
        seconds: time to generate them.
    """

    end: Literal["stop", "length", "interrupt"]
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed."""
        return self.num_tokens / max(self.seconds, 1e-9)


def continue_text(
    stream: FracStream,
    prompt: str,
    write: Callable[[str], object],
    *,
    sampling: SamplingSettings,
    max_new_tokens: int | None,
    seed: int | None = None,
    echo: bool = False,
) -> Answer:
    """Feed a prompt and write the continuation as it comes.

    Ctrl-C ends it early. The state then holds exactly the text written so far. With `echo`, the
    prompt is written first, after all arguments are checked.

    Example: `continue_text(stream, "Once", print, sampling=GREEDY, max_new_tokens=100)`
    """
    if prompt:
        stream.feed(prompt)
    pieces = stream.sample(sampling, max_new_tokens=max_new_tokens, seed=seed)
    if echo:
        write(prompt)
    start, before = time.perf_counter(), stream.num_tokens
    try:
        end = "stop" if _write_all(pieces, write) else "length"
    except KeyboardInterrupt:
        end = "interrupt"
    return Answer(end, stream.num_tokens - before, time.perf_counter() - start)


def _write_all(pieces: Generator[str, None, bool], write: Callable[[str], object]) -> bool:
    """Write all pieces; return the generator's value: whether the model ended the text."""
    while True:
        try:
            write(next(pieces))
        except StopIteration as done:
            return done.value
