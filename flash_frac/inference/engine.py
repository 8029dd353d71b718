"""The engine: many requests at once on one model, in memory that is claimed when it is made.

A request waits, then its prompt is read, in pieces, then it has a slot until it ends. A step reads
at most one piece of prompts, and then gives every sequence in a slot its next token, from one CUDA
graph for each number of rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from transformers.utils import logging

from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.runner import Runner, Token
from flash_frac.inference.scheduling import (
    EngineStats,
    EngineStopped,
    Finished,
    Job,
    QueueFull,
    Request,
    Update,
)
from flash_frac.inference.state import check_model
from flash_frac.models import FracForCausalLM

logger = logging.get_logger(__name__)

# Tokens of prompt and answer for which layers that see all tokens get room, by default.
MAX_LENGTH = 4096


class Engine:
    """Continues many prompts at once; requests join and leave at any step.

    One thread runs it: the caller's, which calls `step`, or its own, between `start` and `stop`.
    `submit`, `cancel`, `stream` and `stats` may be called from any thread. Greedy tokens are those
    of `model.generate`, whatever else is running.

    Args:
        model: on any device, in eval mode.
        slots: sequences at once.
        max_length: tokens of prompt and answer at most. None: no limit for a model without layers
            that see all tokens, and MAX_LENGTH for others, whose buffers have this length.
        piece: tokens of prompts that are read between two steps at most.
        max_waiting: requests that may wait for a slot; beyond it `submit` raises `QueueFull`.
        tokenizer: for requests with stop texts.
        prefixes: keeps states of prompts and answers, so that a prompt which begins like another
            one is read from there on.
        late: read tokens one step late, while the device computes the next; None: on GPUs.

    Attributes:
        failed: the error of a step, after which the engine is of no use; None so far.

    Example:
        >>> engine = Engine(model, slots=64)
        >>> request = Request(prompt=ids, max_new_tokens=100)
        >>> answer = [token for update in engine.stream(request) for token in update.tokens]
    """

    def __init__(
        self,
        model: FracForCausalLM,
        *,
        slots: int = 64,
        max_length: int | None = None,
        piece: int = 2048,
        max_waiting: int = 1024,
        tokenizer: Any = None,
        prefixes: PrefixStates | None = None,
        late: bool | None = None,
    ) -> None:
        check_model(model)
        if model.training:
            raise ValueError("model must be in eval mode; call model.eval()")
        for name, size in {"slots": slots, "piece": piece, "max_waiting": max_waiting}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if max_length is not None and max_length < 2:
            raise ValueError(f"max_length must be None or at least 2, got {max_length}")
        sees_all = "attention" in (model.config.mixer_types or ())
        if sees_all and max_length is None:
            max_length = MAX_LENGTH
        self.model, self.tokenizer, self.prefixes = model, tokenizer, prefixes
        self.slots, self.max_length, self.max_waiting = slots, max_length, max_waiting
        self._device = model.lm_head.weight.device
        self._runner = Runner(
            model,
            num_slots=slots,
            max_length=max_length if sees_all else None,
            piece=piece,
            late=self._device.type == "cuda" if late is None else late,
            prefixes=None if prefixes is None else prefixes.bind(model),
        )
        self.failed: BaseException | None = None
        self._ids = itertools.count()
        # What other threads touch, under this lock, is what waits and what is to be cancelled.
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: set[int] = set()
        self._thread: threading.Thread | None = None
        self._stopping = self._dropping = False
        self._idle = True
        self._updates: list[Update] = []
        self._finished: dict[Finished, int] = dict.fromkeys(
            ("stop", "length", "cancelled", "error"), 0
        )
        self._new_tokens = 0

    def submit(self, request: Request, on_update: Callable[[Update], object] | None = None) -> int:
        """Ask for an answer; the id that its updates have.

        Args:
            on_update: called with each update, in the thread that runs the engine.

        Raises:
            ValueError: the request can never be answered.
            QueueFull: too many requests are waiting.
            EngineStopped: the engine was stopped, or has failed.

        Example: `id = engine.submit(Request(prompt=ids, max_new_tokens=9), print)`
        """
        self._check(request)
        job = Job(next(self._ids), request, on_update, self.tokenizer)
        with self._lock:
            self._check_alive()
            if self._stopping:
                raise EngineStopped("the engine was stopped and takes no requests; call start()")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} requests are waiting (max_waiting); try again later"
                )
            self._waiting.append(job)
            self._lock.notify()
        return job.id

    def _check(self, request: Request) -> None:
        vocabulary, limit = self.model.config.vocab_size, self.max_length
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"prompt must have ids in [0, {vocabulary}), the vocabulary, got {low} to {high}"
            )
        length, num_new = len(request.prompt), request.max_new_tokens
        if limit is not None and length + num_new > limit:
            raise ValueError(
                f"prompt ({length} tokens) and max_new_tokens ({num_new}) must be at most "
                f"{limit} together, the engine's max_length; shorten one of them"
            )
        if any(not 0 <= n <= length for n in request.boundaries):
            raise ValueError(
                f"boundaries must be between 0 and the prompt's length ({length}), got "
                f"{list(request.boundaries)}"
            )
        if request.stop and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer; make the engine with one, or leave it out")

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise EngineStopped(f"the engine has failed: {_in_words(self.failed)}; make another")

    def cancel(self, id: int) -> None:
        """End a request at the next step, with what it has; nothing happens if it has ended."""
        with self._lock:
            self._cancelled.add(id)
            self._lock.notify()

    def stream(self, request: Request) -> Iterator[Update]:
        """The updates of one request as they come; leaving the loop cancels it.

        The caller's thread runs the steps if the engine has none of its own.

        Example: `for update in engine.stream(request): print(update.tokens)`
        """
        updates: SimpleQueue[Update] = SimpleQueue()
        return self._follow(self.submit(request, updates.put), updates)

    def _follow(self, id: int, updates: SimpleQueue[Update]) -> Iterator[Update]:
        finished = False
        try:
            while not finished:
                while self._thread is None and updates.empty():
                    self.step()
                update = updates.get()
                finished = update.finished is not None
                yield update
        finally:
            if not finished:
                self.cancel(id)

    def stats(self) -> EngineStats:
        """What the engine is doing, and what it has done."""
        runner = self._runner
        return EngineStats(
            slots=self.slots,
            running=runner.num_running,
            reading=len(runner.reading),
            waiting=len(self._waiting),
            finished=dict(self._finished),
            prompt_tokens=runner.num_read,
            new_tokens=self._new_tokens,
            steps=runner.num_steps,
            nbytes=runner.nbytes,
            prefixes=None if self.prefixes is None else self.prefixes.stats(),
        )

    def start(self) -> Engine:
        """Run the engine in a thread of its own."""
        with self._lock:
            self._check_alive()
            if self._thread is not None:
                raise RuntimeError("the engine was started already; call stop() before")
            self._stopping = self._dropping = False
            self._thread = threading.Thread(target=self._work, name="flash-frac", daemon=True)
        self._thread.start()
        return self

    def stop(self, *, drain: bool = True) -> None:
        """Take no requests any more, and return when there are none.

        Args:
            drain: answer those that are there; else cancel them.
        """
        with self._lock:
            self._stopping, self._dropping = True, not drain
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        elif self.failed is None:
            self.run_until_idle()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: object, *unused: object) -> None:
        self.stop(drain=kind is None)

    def _work(self) -> None:
        """What the engine's thread does."""
        try:
            self.warm_up()
            while self._wait_for_work():
                self.step()
        except Exception as error:
            logger.error(f"the engine has failed: {_in_words(error)}", exc_info=error)

    def _wait_for_work(self) -> bool:
        """Whether there is some; False if there is none and will be none."""
        with self._lock:
            while not self._has_work():
                if self._stopping:
                    return False
                self._lock.wait()
        return True

    def _has_work(self) -> bool:
        return bool(self._waiting or self._cancelled or self._runner.has_work)

    def warm_up(self) -> None:
        """Record the graphs of all numbers of rows, before the first request; `start` does it."""
        with self._guarded():
            self._runner.warm_up()

    def run_until_idle(self) -> list[Update]:
        """All updates until every request has ended."""
        updates = []
        while self._has_work():
            updates += self.step()
        return updates

    def step(self) -> list[Update]:
        """Read at most one piece of prompts, and give each sequence in a slot its next token.

        An error of the step ends all requests with it, and the engine.
        """
        if self._thread not in (None, threading.current_thread()):
            raise RuntimeError("the engine runs in a thread of its own; call stop() before step()")
        self._check_alive()
        with self._guarded():
            if self._idle:
                self._runner.look()
            self._take_cancelled()
            self._admit()
            self._runner.launch()
            for token in self._runner.collect():
                self._give(token)
            self._idle = not self._runner.has_work
        updates, self._updates = self._updates, []
        return updates

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """On the engine's device; an error ends the engine."""
        cuda = self._device.type == "cuda"
        try:
            with torch.no_grad(), torch.cuda.device(self._device) if cuda else nullcontext():
                yield
        except BaseException as error:
            # An interrupt, too, may leave rows half written.
            self._fail(error)
            raise

    def _take_cancelled(self) -> None:
        if not (self._cancelled or self._dropping):
            return
        with self._lock:
            ids, self._cancelled = self._cancelled, set()
            jobs = [*self._waiting, *self._runner.jobs]
            gone = [job for job in jobs if self._dropping or job.id in ids]
            self._waiting = deque(job for job in self._waiting if job not in gone)
        for job in gone:
            if job.row >= 0:
                self._runner.leave(job)
            self._end(job, "cancelled")

    def _admit(self) -> None:
        """Begin to read prompts, in the order of requests, as long as there is room."""
        while self._waiting and self._runner.has_room:
            with self._lock:
                job = self._waiting.popleft()
            self._runner.begin(job)

    def _give(self, found: Token) -> None:
        """Hand a token to its job."""
        job = found.job
        if job.finished:
            return
        error: str | None = None
        try:
            finished = job.take(found.token) if found.token >= 0 else "error"
        except Exception as problem:
            # A tokenizer's.
            finished, error = "error", _in_words(problem)
        if finished == "error":
            error = error or (
                f"the logits after {len(job.request.prompt) + len(job.tokens)} tokens are no "
                "numbers (NaN or infinite)"
            )
            self._runner.leave(job, clear=True)
            self._end(job, "error", error)
            return
        self._new_tokens += 1
        asked = job.request.logprobs is not None
        update = Update(
            job.id,
            (found.token,),
            (found.logprob,) if asked else (),
            (found.top,) if asked else (),
            finished,
        )
        if finished is not None:
            self._runner.leave(job, keep=True)
        self._send(job, update)

    def _end(self, job: Job, finished: Finished, error: str | None = None) -> None:
        self._send(job, Update(job.id, finished=finished, error=error))

    def _send(self, job: Job, update: Update) -> None:
        if update.finished is not None:
            job.finished = True
            self._finished[update.finished] += 1
        self._updates.append(update)
        if job.on_update is None:
            return
        try:
            job.on_update(update)
        except Exception as error:
            # Whoever cannot take updates ends alone.
            logger.error(f"on_update of request {job.id} has failed", exc_info=error)
            job.on_update = None
            self.cancel(job.id)

    def _fail(self, error: BaseException) -> None:
        """End everything with an error."""
        with self._lock:
            self.failed = error
            jobs = [*self._waiting, *self._runner.jobs]
            self._waiting.clear()
        for job in jobs:
            if not job.finished:
                self._end(job, "error", f"the engine has failed: {_in_words(error)}")


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
