"""Pass answers from the engine's thread to the event loop of a server.

The engine never waits for the loop. It puts updates in a queue and wakes the loop if needed; the
loop takes all of them at once. All updates for a client since its last event go out as one event,
so a loop that falls behind sends fewer and longer ones. The loop also leaves time for the engine,
with which it shares Python's GIL: the more events it had to send, the later it takes the next
updates.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeAlias

from flash_frac.inference.scheduling import Request, Update
from flash_frac.inference.server.metrics import Metrics

# Approximate cost of an event, in seconds, and the maximum fraction of time spent on events.
SECONDS_PER_EVENT, LOOP_SHARE = 40e-6, 0.5

Part: TypeAlias = tuple[list[int], list[float], list[Any]]


class Answer:
    """The answer to one request so far, and the part that its handler has not taken yet.

    Args:
        streams: wake the handler for each part, not only at the end.

    Attributes:
        tokens, logprobs, top: the part not taken yet, as in `Update`.
        num_tokens: number of tokens so far.
        num_cached: as in `Update`.
        finished, error: as in `Update`.
    """

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Any] = []
        self.num_tokens = self.num_cached = 0
        self.finished: str | None = None
        self.error: str | None = None
        self.begin = self.last = time.monotonic()
        self._news = asyncio.Event()

    def add(self, update: Update) -> None:
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.top += update.top
        self.num_tokens += len(update.tokens)
        self.num_cached = update.num_cached or self.num_cached
        if update.finished is not None:
            self.finished, self.error = update.finished, update.error
        if self.streams or self.finished is not None:
            self._news.set()

    def leave(self, *unused: object) -> None:
        """Note that the client has left, and wake the handler."""
        if self.finished is None:
            self.finished = "gone"
            self._news.set()

    async def wait(self) -> None:
        """Wait until something new has come."""
        await self._news.wait()
        self._news.clear()

    async def wait_for_end(self) -> None:
        while self.finished is None:
            await self.wait()

    async def parts(self) -> AsyncIterator[Part]:
        """Yield each new part until the end, as soon as the handler has dealt with the last one."""
        # The answer may end while the handler sends a part; what came meanwhile is a part too.
        while self.finished is None or self.tokens:
            await self.wait()
            yield self.take()

    def take(self) -> Part:
        """Return the new tokens, their logprobs and the likeliest tokens."""
        new = (self.tokens, self.logprobs, self.top)
        self.tokens, self.logprobs, self.top = [], [], []
        return new


class Answers:
    """Sends requests to the engine on behalf of an event loop.

    Example:
        >>> async with answers.ask(request) as answer:
        ...     await answer.wait_for_end()
    """

    def __init__(self, engine: Any, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        # One thread appends and the other pops from the left, so no lock is needed.
        self._updates: deque[tuple[Answer, Update]] = deque()
        self._next_look = 0.0
        self._awake = False

    def ask(self, request: Request, *, streams: bool = True) -> _Asked:
        """Submit a request and give its answer; leaving the block early cancels the request."""
        return _Asked(self, request, Answer(streams=streams))

    def _begin(self, request: Request, answer: Answer) -> int:
        loop = asyncio.get_running_loop()
        return self.engine.submit(request, partial(self._from_engine, loop, answer))

    def _end(self, answer: Answer, id: int) -> None:
        if answer.finished in (None, "gone"):
            self.engine.cancel(id)

    def _from_engine(self, loop: asyncio.AbstractEventLoop, answer: Answer, update: Update) -> None:
        """Queue an update, in the engine's thread; it must be cheap: one call per slot and step."""
        self._updates.append((answer, update))
        if not self._awake:
            self._awake = True
            loop.call_soon_threadsafe(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        pause = self._next_look - loop.time()
        if pause > 0:
            loop.call_later(pause, self._take, loop)
        else:
            self._take(loop)

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        # Reset this first, so that later updates wake the loop again.
        self._awake = False
        # Answers to send an event of. Requests that wait, or are answered whole, cost nothing.
        streams: set[Answer] = set()
        begun, now = loop.time(), time.monotonic()
        while self._updates:
            answer, update = self._updates.popleft()
            # Measure once for updates that came together.
            if update.tokens and answer.last != now:
                self.metrics.tokens(answer, now)
            answer.add(update)
            if answer.streams:
                streams.add(answer)
        self._next_look = begun + len(streams) * SECONDS_PER_EVENT / LOOP_SHARE


class _Asked:
    """The context of `Answers.ask`."""

    def __init__(self, answers: Answers, request: Request, answer: Answer) -> None:
        self._answers, self._request, self._answer = answers, request, answer

    async def __aenter__(self) -> Answer:
        self._id = self._answers._begin(self._request, self._answer)
        return self._answer

    async def __aexit__(self, *error: object) -> None:
        self._answers._end(self._answer, self._id)
