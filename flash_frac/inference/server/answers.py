"""Between the engine's thread and the event loop of a server: answers as they come.

The engine never waits for the loop. It leaves its updates in a queue, and wakes the loop up if that
is not awake; the loop takes all of them at once. What came for a client since its last event goes
out as one event, so that a loop that falls behind sends fewer and longer ones. The loop also leaves
time for the engine, with which it shares Python's lock: it looks for updates the less often the
more clients there are.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import Any

from flash_frac.inference.scheduling import Request, Update
from flash_frac.inference.server.metrics import Metrics

# What an event costs the loop, roughly, and the share of the time that it may take for them.
SECONDS_PER_EVENT, LOOP_SHARE = 40e-6, 0.5


class Answer:
    """What has come for one request, and what its handler has not taken yet.

    Attributes:
        tokens, logprobs, top: of the answer, as `Update` has them, not taken yet.
        num_tokens: of the answer so far.
        finished, error: as `Update` has them.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[Any] = []
        self.num_tokens = 0
        self.finished: str | None = None
        self.error: str | None = None
        self.begin = self.last = time.monotonic()
        self._news = asyncio.Event()

    def add(self, update: Update) -> None:
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.top += update.top
        self.num_tokens += len(update.tokens)
        if update.finished is not None:
            self.finished, self.error = update.finished, update.error
        self._news.set()

    def leave(self, *unused: object) -> None:
        """The client has gone; whoever waits is told."""
        if self.finished is None:
            self.finished = "gone"
            self._news.set()

    async def wait(self) -> None:
        """Until something has come since the last time."""
        await self._news.wait()
        self._news.clear()

    async def wait_for_end(self) -> None:
        while self.finished is None:
            await self.wait()

    def take(self) -> tuple[list[int], list[float], list[Any]]:
        """Tokens, their logprobs and the likeliest ones since the last time."""
        new = (self.tokens, self.logprobs, self.top)
        self.tokens, self.logprobs, self.top = [], [], []
        return new


class Answers:
    """Asks the engine on behalf of an event loop.

    Example:
        >>> async with answers.ask(request) as answer:
        ...     await answer.wait_for_end()
    """

    def __init__(self, engine: Any, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        # One thread appends and the other takes from the left, which needs no lock.
        self._updates: deque[tuple[Answer, Update]] = deque()
        self._num_open, self._next_look = 0, 0.0
        self._awake = False

    def ask(self, request: Request) -> _Asked:
        """An answer for as long as it is needed; leaving it early cancels the request."""
        return _Asked(self, request)

    def _begin(self, request: Request) -> tuple[Answer, int]:
        answer, loop = Answer(), asyncio.get_running_loop()
        id = self.engine.submit(request, partial(self._from_engine, loop, answer))
        self._num_open += 1
        return answer, id

    def _end(self, answer: Answer, id: int) -> None:
        self._num_open -= 1
        if answer.finished in (None, "gone"):
            self.engine.cancel(id)

    def _from_engine(self, loop: asyncio.AbstractEventLoop, answer: Answer, update: Update) -> None:
        """In the engine's thread: no more than this, since a step has one for every slot."""
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
        # In this order: what comes from now on wakes the loop again.
        self._awake = False
        self._next_look = loop.time() + self._num_open * SECONDS_PER_EVENT / LOOP_SHARE
        now = time.monotonic()
        while self._updates:
            answer, update = self._updates.popleft()
            # Once for what came together.
            if update.tokens and answer.last != now:
                self.metrics.tokens(answer, now)
            answer.add(update)


class _Asked:
    """The context of `Answers.ask`."""

    def __init__(self, answers: Answers, request: Request) -> None:
        self._answers, self._request = answers, request

    async def __aenter__(self) -> Answer:
        self._answer, self._id = self._answers._begin(self._request)
        return self._answer

    async def __aexit__(self, *error: object) -> None:
        self._answers._end(self._answer, self._id)
