"""Requests and updates of the engine, and the order in which prompts are read."""

from __future__ import annotations

import operator
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from flash_frac.inference.prefixes import PrefixStats
from flash_frac.inference.sampling import GREEDY, SamplingSettings
from flash_frac.inference.text import StopStrings

# Tokens of the shortest recorded piece of a prompt; shorter pieces are padded.
SHORTEST = 32

Finished: TypeAlias = Literal["stop", "length", "cancelled", "error"]


class QueueFull(RuntimeError):
    """The engine's queue is full; try again later."""


class EngineStopped(RuntimeError):
    """The engine accepts no more requests: it was stopped, or a step has failed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: ids of its tokens, at least one.
        max_new_tokens: maximum number of tokens to add.
        sampling: how tokens are chosen; greedy by default.
        seed: random seed for sampling; None for a new one each time.
        eos_token_ids: tokens that end the answer, which includes them.
        stop: texts that end the answer as soon as it contains one of them.
        logprobs: also return log-probabilities of the chosen tokens, and of this many of the most
            likely tokens at each step; None returns neither.
        boundaries: positions in the prompt where a message ends. Other prompts probably start with
            the same tokens up to there, so the prefix cache keeps these states.

    Example: `Request(prompt=[5, 6, 7], max_new_tokens=100, eos_token_ids=[2])`
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingSettings = GREEDY
    seed: int | None = None
    eos_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: int | None = None
    boundaries: Sequence[int] = ()

    def __post_init__(self) -> None:
        # Everything is checked here, because an error in the engine's thread ends all requests.
        object.__setattr__(self, "prompt", self._numbers("prompt", "ids of tokens, at least one"))
        if not self.prompt:
            raise ValueError("prompt must be ids of tokens, at least one, got none")
        for name, wanted in (("eos_token_ids", "ids of tokens"), ("boundaries", "positions")):
            object.__setattr__(self, name, self._numbers(name, wanted))
        if not isinstance(self.sampling, SamplingSettings):
            raise ValueError(f"sampling must be SamplingSettings, got {self.sampling!r}")
        # An answer would never have 2.5 tokens, and never end.
        if not _is_whole(self.max_new_tokens) or self.max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be at least 1, and whole, got {self.max_new_tokens}"
            )
        if self.logprobs is not None and not (_is_whole(self.logprobs) and self.logprobs >= 0):
            raise ValueError(f"logprobs must be None or whole, at least 0, got {self.logprobs}")
        if self.seed is not None and not (_is_whole(self.seed) and -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be a signed 64-bit integer, got {self.seed}")
        if isinstance(self.stop, str):
            raise ValueError(
                f"stop must be a list of texts, got {self.stop!r}; use [{self.stop!r}]"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be a list of non-empty texts, got {list(self.stop)!r}")

    def _numbers(self, name: str, wanted: str) -> tuple[int, ...]:
        """A field as whole numbers of Python, from those of any library."""
        given: Any = getattr(self, name)
        found = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise ValueError(f"{name} must be {wanted}, got {given!r}")
        found = tuple(found)
        if not all(_is_whole(x) for x in found):
            raise ValueError(f"{name} must be {wanted}, got {found[:8]!s}")
        return tuple(map(operator.index, found))

    def check(self, vocab_size: int, max_length: int | None) -> None:
        """Raise a ValueError if an engine with these limits can never answer it."""
        low, high = min(self.prompt), max(self.prompt)
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"prompt must be in [0, {vocab_size}), the vocabulary, got ids from {low} to {high}"
            )
        length, num_new = len(self.prompt), self.max_new_tokens
        if max_length is not None and length + num_new > max_length:
            raise ValueError(
                f"prompt ({length} tokens) and max_new_tokens ({num_new}) must be at most "
                f"{max_length} together, the engine's max_length; shorten one of them"
            )
        if any(not 0 <= n <= length for n in self.boundaries):
            raise ValueError(
                f"boundaries must be between 0 and the prompt's length ({length}), got "
                f"{list(self.boundaries)}"
            )


def in_words(error: BaseException) -> str:
    """The kind and the message of an error."""
    return f"{type(error).__name__}: {error}"


def _is_whole(x: Any) -> bool:
    try:
        # Tensors of other numbers have the method, too.
        operator.index(x)
    except TypeError:
        return False
    return not isinstance(x, bool)


class Update(NamedTuple):
    """Progress of a request since its last update.

    Attributes:
        id: the id that `Engine.submit` returned.
        tokens: new tokens, including one that ends the answer.
        logprobs: one for each new token, if requested: natural logarithms of the model's
            probabilities, before temperature and other settings.
        top: for each new token, the most likely tokens and their logprobs, the likeliest first.
        finished: why this is the last update, or None. "stop": a token or text that ends the
            answer; "length": max_new_tokens; "cancelled"; "error".
        error: message for "error".
        num_cached: prompt tokens that came from the prefix cache; the same in each update of
            tokens.
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finished: Finished | None = None
    error: str | None = None
    num_cached: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Current load of the engine, and totals since it was built.

    Attributes:
        slots: maximum number of concurrent sequences.
        running, reading, waiting: requests in a slot, in prefill, and in the queue.
        finished: requests that have ended, by reason.
        prompt_tokens, new_tokens: tokens read, and tokens generated.
        steps: decode steps.
        nbytes: bytes of the rows of all sequences, allocated when the engine was built.
        prefixes: statistics of the prefix cache, if there is one.
    """

    slots: int
    running: int
    reading: int
    waiting: int
    finished: dict[Finished, int]
    prompt_tokens: int
    new_tokens: int
    steps: int
    nbytes: int
    prefixes: PrefixStats | None


class Job:
    """A running request.

    Attributes:
        prompt: its token ids.
        tokens: the answer so far.
        num_read: tokens that the job's row has read, of the prompt and then of the answer.
        num_cached: tokens of the prompt that came from the prefix cache.
        cuts: positions where reading pauses, in descending order; the first element is the length
            of the prompt.
        keeps: whether its states may join the prefix cache: not after a pause.
        row: its row, in the staging cache while the prompt is read and then among the slots.
        finished: whether the last update was sent.
    """

    def __init__(
        self,
        id: int,
        request: Request,
        on_update: Callable[[Update], object] | None,
        tokenizer: Any,
    ) -> None:
        self.id, self.request, self.on_update = id, request, on_update
        self.seed = secrets.randbits(63) if request.seed is None else request.seed
        self.eos = frozenset(request.eos_token_ids)
        self.stop = StopStrings(tokenizer, request.stop) if request.stop else None
        if self.stop is not None:
            self.stop.watch(1)
        self.prompt = np.array(request.prompt, np.int64)
        self.tokens: list[int] = []
        self.num_read, self.num_cached, self.row, self.finished = 0, 0, -1, False
        self.cuts, self.keeps = [len(self.prompt)], True

    @property
    def num_unread(self) -> int:
        """Number of prompt tokens still to be read."""
        return len(self.prompt) - self.num_read

    def cut_at(self, positions: Iterable[int]) -> None:
        """Pause reading at these positions, and at the end of the prompt."""
        end = len(self.prompt)
        found = {n for n in positions if self.num_read < n < end}
        self.cuts = sorted({*found, end}, reverse=True)

    def read(self) -> np.ndarray:
        """The tokens that the job's row has read, as far as the host knows them."""
        if self.num_read <= len(self.prompt):
            return self.prompt[: self.num_read]
        new = self.tokens[: self.num_read - len(self.prompt)]
        return np.concatenate([self.prompt, np.array(new, np.int64)])

    def take(self, token: int) -> Finished | None:
        """Add a token to the answer; return why the answer ends with it, or None."""
        self.tokens.append(token)
        if token in self.eos or (self.stop is not None and self.stop.ends(0, token)):
            return "stop"
        return "length" if len(self.tokens) == self.request.max_new_tokens else None


class StepGate:
    """Keeps steps out of the blocks of `closed`, and those blocks out of steps.

    Args:
        lock: guards the attributes, and wakes up whoever waits for them.
    """

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._holders: list[threading.Thread] = []
        self._stepper: threading.Thread | None = None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Wait for the end of the current step; the next one waits for the end of the block."""
        caller = threading.current_thread()
        if caller is self._stepper:
            raise RuntimeError("pause() would wait for itself; do not call it in on_update")
        with self._lock:
            self._holders.append(caller)
        try:
            with self._lock:
                self._lock.wait_for(lambda: self._stepper is None)
            yield
        finally:
            with self._lock:
                self._holders.remove(caller)
                self._lock.notify_all()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wait until no block of `closed` is left; the next one waits for the end of this one."""
        self.check()
        with self._lock:
            self._lock.wait_for(lambda: not self._holders)
            self._stepper = threading.current_thread()
        try:
            yield
        finally:
            with self._lock:
                self._stepper = None
                self._lock.notify_all()

    def check(self) -> None:
        """RuntimeError inside a block of `closed`, where waiting for a step would never end."""
        if threading.current_thread() in self._holders:
            raise RuntimeError("the engine is paused; leave the block of pause() first")


class Piece(NamedTuple):
    """The next prompt tokens to read as one batch.

    Attributes:
        jobs: the first of the jobs in prefill.
        counts: tokens of each job.
        length: tokens and padding of each job.
    """

    jobs: list[Job]
    counts: list[int]
    length: int


def rounded_length(num_tokens: int) -> int:
    """Round up to 32, 48, 64, 96, 128, ...: two lengths per doubling."""
    num_tokens = max(num_tokens, SHORTEST)
    unit = (1 << (num_tokens - 1).bit_length()) // 4
    return -(-num_tokens // unit) * unit


def rounded_rows(num: int) -> int:
    """The largest power of two that is at most `num`."""
    return 1 << (num.bit_length() - 1)


def next_piece(
    jobs: Iterable[Job], most: int, room: int | None, *, rounds: bool = False
) -> Piece | None:
    """The next piece to read, from the first jobs; None if there are none.

    Args:
        jobs: jobs in prefill, in order.
        most: maximum number of tokens, including padding.
        room: columns of a row, which padding uses too. None if there is no limit.
        rounds: use only few numbers of rows and lengths, for which there are graphs: powers of two,
            and those of `rounded_length` where there is room.
    """
    chosen: list[Job] = []
    counts: list[int] = []

    def length_of(num: int) -> int:
        """Shortest length of a piece with the first `num` jobs."""
        longest, held = max(counts[:num]), max(job.num_read for job in chosen[:num])
        padded = min(rounded_length(longest), most) if rounds else longest
        return padded if room is None or held + padded <= room else longest

    def fits() -> bool:
        length, held = length_of(len(chosen)), max(job.num_read for job in chosen)
        return len(chosen) * length <= most and (room is None or held + length <= room)

    for job in jobs:
        chosen.append(job)
        counts.append(min(job.cuts[-1] - job.num_read, most))
        if len(chosen) > 1 and not fits():
            chosen.pop()
            break
    if not chosen:
        return None
    num = rounded_rows(len(chosen)) if rounds else len(chosen)
    return Piece(chosen[:num], counts[:num], length_of(num))
