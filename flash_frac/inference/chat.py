"""A model at the terminal: one continuation, or a conversation, with a state that can be kept."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flash_frac.inference import FracStream
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

# What ends a process from outside: a supervisor or `kill`, and a terminal that is closed.
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def open_stream(
    checkpoint: str | Path, state: str | Path | None = None, *, tokenizer: Any = None
) -> FracStream:
    """A stream of the model and tokenizer in `checkpoint`, from a saved state if one is named.

    A tokenizer that is given takes the place of the checkpoint's own.

    Example: `open_stream("quickstart/final", "yesterday.state").generate(max_new_tokens=100)`
    """
    found = find_checkpoint(checkpoint)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    model = load_model(found, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if state is None:
        return FracStream(model, tokenizer)
    return FracStream.load(state, model, tokenizer)


@contextmanager
def saving(stream: FracStream, path: Path | None, say: Callable[[str], object]) -> Iterator[None]:
    """Save a stream when the block ends, and say so, however it ends: by SIGTERM or SIGHUP too.

    Those raise SystemExit with a shell's code for them, 128 and the number of the signal. While the
    file is written, they are ignored. Without a path nothing is saved, and no signal is handled.

    Example: `with saving(stream, Path("today.state"), print): converse(stream, ...)`
    """
    if path is None:
        yield
        return

    def end(number: int, *unused: object) -> None:
        raise SystemExit(128 + number)

    # What is ignored already, by nohup, stays so.
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


def continue_text(
    stream: FracStream,
    prompt: str,
    write: Callable[[str], object],
    *,
    sampling: SamplingSettings,
    max_new_tokens: int | None,
    seed: int | None = None,
    echo: bool = False,
) -> bool:
    """Feed a prompt and write what follows, as it comes; whether it came to its end.

    An interrupt (Ctrl-C) ends it early. What was written, and nothing else, is in the state. With
    `echo` the prompt is written first, once all arguments were found to be right.

    Example: `continue_text(stream, "Once", print, sampling=GREEDY, max_new_tokens=100)`
    """
    if prompt:
        stream.feed(prompt)
    pieces = stream.sample(sampling, max_new_tokens=max_new_tokens, seed=seed)
    if echo:
        write(prompt)
    try:
        for piece in pieces:
            write(piece)
    except KeyboardInterrupt:
        return False
    return True


def converse(
    stream: FracStream,
    read: Callable[[], str],
    write: Callable[[str], object],
    *,
    sampling: SamplingSettings,
    max_new_tokens: int | None,
) -> None:
    """Take lines in turn with the model until the end of input (Ctrl-D).

    An interrupt ends the model's turn, and the state stays. The line "/back" undoes the last turn,
    the reader's line and the answer both.

    Example: `converse(stream, input, print, sampling=GREEDY, max_new_tokens=400)`
    """
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            write("\n(Ctrl-D ends)\n")
            continue
        if line.strip() == "/back":
            try:
                stream.rollback()
                stream.release()
                write("(one turn back)\n")
            except ValueError:
                write("(there is no turn to undo)\n")
            continue
        stream.mark()
        ended = continue_text(
            stream, line + "\n", write, sampling=sampling, max_new_tokens=max_new_tokens
        )
        write("\n" if ended else "\n(interrupted)\n")
