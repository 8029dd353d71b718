"""What the engine is asked for, what it answers, and in which order prompts are read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from flash_frac.inference.prefixes import PrefixStats
from flash_frac.inference.sampling import GREEDY, SamplingSettings
from flash_frac.inference.text import StopStrings

# Tokens of the shortest piece of a prompt that is recorded; shorter ones are padded.
SHORTEST = 32

Finished: TypeAlias = Literal["stop", "length", "cancelled", "error"]


class QueueFull(RuntimeError):
    """As many requests are waiting as the engine was made for; try again later."""


class EngineStopped(RuntimeError):
    """The engine takes no requests any more: it was stopped, or a step has failed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: ids of its tokens, at least one.
        max_new_tokens: how many tokens to add at most.
        sampling: how tokens are chosen; the most likely ones by default.
        seed: random seed for sampling; None for another one each time.
        eos_token_ids: tokens that end the answer; the one that came is its last.
        stop: texts that end the answer once its text holds one of them.
        logprobs: also return log-probabilities of the chosen tokens, and of this many of the most
            likely ones at each step; None for none of both.
        boundaries: numbers of tokens of the prompt after which a message ends. Other prompts are
            likely to begin alike up to there, so that prefix states are kept.

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
        prompt = self.prompt.tolist() if isinstance(self.prompt, torch.Tensor) else self.prompt
        object.__setattr__(self, "prompt", tuple(prompt))
        if not self.prompt or not all(type(x) is int for x in self.prompt):
            shown = str(self.prompt[:8]) if self.prompt else "none"
            raise ValueError(f"prompt must be ids of tokens, at least one, got {shown}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be None or at least 0, got {self.logprobs}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits with a sign, got {self.seed}")
        if isinstance(self.stop, str):
            raise ValueError(
                f"stop must be a list of texts, got {self.stop!r}; use [{self.stop!r}]"
            )


class Update(NamedTuple):
    """What has become of a request since the last update.

    Attributes:
        id: what `Engine.submit` returned.
        tokens: new ones; those that end the answer are among them.
        logprobs: of each new token, if the request asks for them: natural logarithms of the model's
            probabilities, before temperature and other settings.
        top: for each new token, the most likely tokens and their logprobs, the likeliest first.
        finished: why this is the last update, or None. "stop": a token or text that ends the
            answer; "length": max_new_tokens; "cancelled"; "error".
        error: what went wrong, of "error".
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finished: Finished | None = None
    error: str | None = None


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing, and what it has done since it was made.

    Attributes:
        slots: sequences that fit at once.
        running, reading, waiting: requests that have a slot, whose prompt is read, in the queue.
        finished: requests that have ended, by reason.
        prompt_tokens, new_tokens: read, and generated.
        steps: decoding steps.
        nbytes: bytes of the rows of all sequences, claimed when the engine was made.
        prefixes: what the prefix states have to say, if there are some.
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
    """A request under way.

    Attributes:
        prompt: ids of its tokens.
        tokens: the answer so far.
        num_read: tokens that the job's row has read, of the prompt and then of the answer.
        cuts: numbers of tokens after which reading stops for a moment, the last one first; the
            first element is the length of the prompt.
        row: where it is: a row of the staging cache while the prompt is read, then a slot.
        finished: whether the last update is out.
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
        self.num_read, self.row, self.finished = 0, -1, False
        self.cuts = [len(self.prompt)]

    @property
    def num_unread(self) -> int:
        """Tokens of the prompt that are to be read."""
        return len(self.prompt) - self.num_read

    def cut_at(self, positions: Iterable[int]) -> None:
        """Stop reading at these numbers of tokens, and at the end of the prompt."""
        end = len(self.prompt)
        found = {n for n in positions if self.num_read < n < end}
        self.cuts = sorted({*found, end}, reverse=True)

    def read(self) -> np.ndarray:
        """The tokens that the job's row has read, as far as they are known."""
        if self.num_read <= len(self.prompt):
            return self.prompt[: self.num_read]
        new = self.tokens[: self.num_read - len(self.prompt)]
        return np.concatenate([self.prompt, np.array(new, np.int64)])

    def take(self, token: int) -> Finished | None:
        """Add a token to the answer; why the answer ends with it, or None."""
        self.tokens.append(token)
        if token in self.eos or (self.stop is not None and self.stop.ends(0, token)):
            return "stop"
        return "length" if len(self.tokens) == self.request.max_new_tokens else None


class Piece(NamedTuple):
    """What is read next, side by side.

    Attributes:
        jobs: the first of those whose prompts are read.
        counts: tokens of each.
        length: tokens and padding of each.
    """

    jobs: list[Job]
    counts: list[int]
    length: int


def rounded_length(num_tokens: int) -> int:
    """Of 32, 48, 64, 96, 128, ... the first that is not less: two for every doubling."""
    num_tokens = max(num_tokens, SHORTEST)
    unit = (1 << (num_tokens - 1).bit_length()) // 4
    return -(-num_tokens // unit) * unit


def rounded_rows(num: int) -> int:
    """The largest power of two that is not more."""
    return 1 << (num.bit_length() - 1)


def next_piece(
    jobs: Iterable[Job], most: int, room: int | None, *, rounds: bool = False
) -> Piece | None:
    """The jobs, from the first on, whose prompts are read next; None if there are none.

    Args:
        jobs: those that are read, in order.
        most: tokens at most, padding included.
        room: columns of a row; padding needs some, too. None if there is no limit.
        rounds: take few different numbers of rows and lengths, for which there are graphs: powers
            of two, and those of `rounded_length` where there is room.
    """
    chosen: list[Job] = []
    counts: list[int] = []

    def length_of(num: int) -> int:
        """Of a piece of the first jobs, as short as it can be."""
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
