"""The engine: continuous batching on one model, in memory allocated when the engine is built.

A request waits in a queue, its prompt is read in pieces, and then it has a slot until it ends. A
step reads at most one piece of prompts and then decodes one token for every slot in use, with one
CUDA graph for each number of rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from transformers.utils import logging

from flash_frac.inference.graphs import check_positions
from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.runner import Runner, Token
from flash_frac.inference.scheduling import (
    EngineStats,
    EngineStopped,
    Finished,
    Job,
    QueueFull,
    Request,
    StepGate,
    Update,
    in_words,
)
from flash_frac.inference.state import check_model
from flash_frac.models import FracForCausalLM

logger = logging.get_logger(__name__)

# Default tokens of prompt and answer that the KV cache of full-attention layers can hold.
MAX_LENGTH = 4096


class Engine:
    """Decodes many requests concurrently; they join and leave at any step.

    One thread runs it: the caller's, which calls `step`, or its own, between `start` and `stop`.
    `submit`, `cancel`, `stream` and `stats` may be called from any thread. Greedy tokens equal
    those of `model.generate`, whatever else is running.

    Args:
        model: on any device, in eval mode.
        slots: maximum number of concurrent sequences.
        max_length: maximum tokens of prompt and answer. None means no limit for a model without
            full-attention layers, and MAX_LENGTH for others; their KV cache has this length.
        piece: maximum number of prompt tokens read between two decode steps.
        max_waiting: maximum requests without a slot; beyond it, `submit` raises `QueueFull`.
        tokenizer: for requests with stop texts.
        prefixes: prefix cache; a prompt that starts like an earlier one is read from where they
            differ.
        late: copy tokens to the host one step late, while the device computes the next; None means
            only on GPUs.

    Attributes:
        failed: the error that stopped the engine for good, or None.
        warmed_up: whether `warm_up` has run.
        gate: keeps steps out of the blocks of `pause`.

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
        check_positions(model)
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
        if prefixes is not None:
            prefixes.check_memory()
        self.failed: BaseException | None = None
        self._ids = itertools.count()
        # Other threads touch only the queue and the set of cancelled ids, under this lock.
        self._lock = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: set[int] = set()
        self._thread: threading.Thread | None = None
        self._stopping = self._dropping = self.warmed_up = False
        self._idle, self.gate = True, StepGate(self._lock)
        self._updates: list[Update] = []
        self._finished: dict[Finished, int] = dict.fromkeys(
            ("stop", "length", "cancelled", "error"), 0
        )
        self._submitted = self._new_tokens = 0

    def submit(self, request: Request, on_update: Callable[[Update], object] | None = None) -> int:
        """Queue a request and return the id of its updates.

        Args:
            on_update: called with each update, in the engine's thread.

        Raises:
            ValueError: the request can never be answered.
            QueueFull: too many requests are waiting.
            EngineStopped: the engine was stopped or has failed.

        Example: `id = engine.submit(Request(prompt=ids, max_new_tokens=9), print)`
        """
        request.check(self.model.config.vocab_size, self.max_length)
        if request.stop and self.tokenizer is None:
            raise ValueError("stop needs a tokenizer; pass one to Engine, or leave stop out")
        job = Job(next(self._ids), request, on_update, self.tokenizer)
        with self._lock:
            self._check_alive()
            if self._stopping:
                raise EngineStopped("the engine is stopped and accepts no requests; call start()")
            # Requests get free slots only at the next step.
            if self._submitted - sum(self._finished.values()) >= self.slots + self.max_waiting:
                raise QueueFull(
                    f"all {self.slots} slots are taken and {self.max_waiting} requests are waiting "
                    "(max_waiting); try again later"
                )
            self._submitted += 1
            self._waiting.append(job)
            self._lock.notify_all()
        return job.id

    def _check_alive(self) -> None:
        if self.failed is not None:
            raise EngineStopped(f"the engine has failed: {in_words(self.failed)}; build a new one")

    def cancel(self, id: int) -> None:
        """End a request at the next step, with the tokens it has; do nothing if it has ended."""
        with self._lock:
            self._cancelled.add(id)
            self._lock.notify_all()

    def stream(self, request: Request) -> Iterator[Update]:
        """Yield the updates of one request as they come; leaving the loop cancels it.

        If the engine has no thread of its own, the caller's thread runs the steps.

        Example: `for update in engine.stream(request): print(update.tokens)`
        """
        followed = self._follow(request)
        # Enter its `try`, or closing it before the first update does nothing.
        next(followed)
        return followed

    def _follow(self, request: Request) -> Iterator[Update]:
        """Submit a request and yield an empty update, then its own."""
        updates: SimpleQueue[Update] = SimpleQueue()
        id, finished = self.submit(request, updates.put), False
        try:
            yield Update(id)
            while not finished:
                self.gate.check()
                while self._thread is None and updates.empty():
                    self.step()
                update = updates.get()
                finished = update.finished is not None
                yield update
        finally:
            if not finished:
                self.cancel(id)

    def stats(self) -> EngineStats:
        """Current load and totals."""
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
        """Run the engine in its own thread."""
        with self._lock:
            self._check_alive()
            if self._thread is not None:
                raise RuntimeError("the engine is already running; call stop() first")
            self._stopping = self._dropping = False
            self._thread = threading.Thread(target=self._work, name="flash-frac", daemon=True)
        self._thread.start()
        return self

    def stop(self, *, drain: bool = True) -> None:
        """Accept no more requests, and return when none are left.

        Args:
            drain: finish the current requests; otherwise cancel them.
        """
        self.gate.check()
        with self._lock:
            self._stopping, self._dropping = True, not drain
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        elif self.failed is None:
            self.run_until_idle()

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: object, *unused: object) -> None:
        self.stop(drain=kind is None)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run no steps inside the block, for example to change weights in place.

        Requests go on afterwards. If weights have changed, cached prefixes are dropped.

        Example: `with engine.pause(): model.load_state_dict(weights)`
        """
        with self.gate.closed():
            self._check_alive()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._idle = True  # The next step looks at the weights.
            yield

    def _work(self) -> None:
        """Main loop of the engine's thread."""
        try:
            self.warm_up()
            while self._wait_for_work():
                self.step()
        except Exception as error:
            logger.error(f"the engine has failed: {in_words(error)}", exc_info=error)

    def _wait_for_work(self) -> bool:
        """Wait until there is work; return False if there is none and the engine is stopping."""
        with self._lock:
            while not self._has_work():
                if self._stopping:
                    return False
                self._lock.wait()
        return True

    def _has_work(self) -> bool:
        return bool(self._waiting or self._cancelled or self._runner.has_work)

    def warm_up(self) -> None:
        """Record the CUDA graphs of all numbers of rows; `start` calls this."""
        with self._guarded():
            self._runner.warm_up()
        self.warmed_up = True

    def run_until_idle(self) -> list[Update]:
        """Run steps until every request has ended; return all updates."""
        updates = []
        while self._has_work():
            updates += self.step()
        return updates

    def step(self) -> list[Update]:
        """Read at most one piece of prompts, and decode one token for each slot in use.

        An error ends all requests and the engine.
        """
        if self._thread not in (None, threading.current_thread()):
            raise RuntimeError("the engine runs in its own thread; call stop() before step()")
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
        """Run the block on the engine's device; an error ends the engine."""
        with self.gate.step():
            try:
                with torch.no_grad(), torch.cuda.device_of(self.model.lm_head.weight):
                    yield
            except BaseException as error:
                # BaseException, because an interrupt may also leave rows half written.
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
        """Start to read prompts in request order, while there is room."""
        while self._waiting and self._runner.has_room:
            with self._lock:
                job = self._waiting.popleft()
            self._runner.begin(job)

    def _give(self, found: Token) -> None:
        """Pass a token to its job."""
        job = found.job
        if job.finished:
            return
        error: str | None = None
        try:
            finished = job.take(found.token) if found.token >= 0 else "error"
        except Exception as problem:
            # The tokenizer may raise anything.
            finished, error = "error", in_words(problem)
        if finished == "error":
            count = len(job.request.prompt) + len(job.tokens)
            error = error or f"the logits after {count} tokens are not finite (NaN or infinite)"
            self._runner.leave(job)
            self._end(job, "error", error)
            return
        self._new_tokens += 1
        asked = job.request.logprobs is not None
        logprobs, tops = ((found.logprob,), (found.top,)) if asked else ((), ())
        update = Update(job.id, (found.token,), logprobs, tops, finished, num_cached=job.num_cached)
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
            # A failing callback ends only its own request.
            logger.error(f"on_update of request {job.id} has failed", exc_info=error)
            job.on_update = None
            self.cancel(job.id)

    def _fail(self, error: BaseException) -> None:
        """End the engine and all its requests with an error."""
        with self._lock:
            self.failed = error
            jobs = [*self._waiting, *self._runner.jobs]
            self._waiting.clear()
        for job in jobs:
            if not job.finished:
                self._end(job, "error", f"the engine has failed: {in_words(error)}")
