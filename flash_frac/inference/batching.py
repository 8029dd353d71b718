"""transformers' continuous batching over our engine: `generate_batch`, and its server's option.

`FracForCausalLM.init_continuous_batching` returns `EngineManager`, which has the methods of
transformers' own manager and returns its `GenerationOutput`. What asks for more than the engine can
do is refused by name. Keys and values are not paged, so options of pages are refused as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from random import Random
from threading import Condition, Thread
from typing import Any, TypeAlias

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from flash_frac.inference.engine import Engine
from flash_frac.inference.generation_settings import check_batching, end_tokens, settings_of
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.inference.scheduling import QueueFull, Request, Update
from flash_frac.models import FracForCausalLM

Handler: TypeAlias = tuple[Callable[[Any], object], asyncio.AbstractEventLoop]
# The attribute of a model with the manager that outlives its session.
KEPT = "_cached_continuous_batching_manager"
# Rows of the engine where nothing says how many requests come.
SLOTS = 64
# What a queue without a bound is to the engine, and how long to wait for room in one with a bound.
UNBOUNDED, PATIENCE = 2**31, 10.0


@dataclass
class _Running:
    """A request under way, as transformers describes it."""

    request_id: str
    prompt: list[int]
    streaming: bool
    timestamps: list[float] | None
    created: float = field(default_factory=time.perf_counter)
    begun: float = -1
    ended: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, update: Update) -> GenerationOutput | None:
        """The output after an update, if there is one to deliver."""
        now = time.perf_counter()
        self.begun = now if self.begun < 0 else self.begun
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.ended = update.finished is not None
        if self.timestamps is not None:
            self.timestamps += [now] * len(update.tokens)
        if not self.ended and not self.streaming:
            return None
        failed = update.finished in ("error", "cancelled")
        ended = RequestStatus.FAILED if failed else RequestStatus.FINISHED
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt,
            generated_tokens=self.tokens[:],
            logprobs=self.logprobs[:],
            error=(update.error or "the request was cancelled") if failed else None,
            status=ended if self.ended else RequestStatus.DECODING,
            created_time=self.created,
            lifespan=(self.begun, now if self.ended else -1),
            timestamps=None if self.timestamps is None else self.timestamps[:],
        )


class EngineManager:
    """Takes requests and returns results, as transformers' ContinuousBatchingManager does.

    Results go to the handler of their request, if there is one, and else wait for `get_result` or
    one of the loops. A request that is cancelled ends with an output whose status is FAILED.

    Args:
        model: in eval mode from here on.
        generation_config: how tokens are chosen, unless a request says otherwise.
        continuous_batching_config: transformers' own; its options of pages must not be set.
        workload_hints: how many requests come, and how long they are.

    Attributes:
        engine: what runs them.

    Example:
        >>> with model.init_continuous_batching() as manager:
        ...     name = manager.add_request([5, 6, 7], max_new_tokens=20)
        ...     print(manager.get_result(name).generated_tokens)
    """

    def __init__(
        self,
        model: FracForCausalLM,
        generation_config: GenerationConfig,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> None:
        check_batching(continuous_batching_config)
        self.generation_config = generation_config
        self.continuous_batching_config = continuous_batching_config
        self.settings = settings_of(generation_config)
        if self.settings.stop:
            raise ValueError(
                "generation_config must have no stop_strings: they need a tokenizer, which is not "
                "given here; use eos_token_id, model.generate, or frac serve"
            )
        option = partial(_option, continuous_batching_config)
        self._logprobs = 0 if option("return_logprobs", False) else None
        self._seeds = None if option("seed", None) is None else Random(option("seed", None))
        self.model: Any = model.eval()
        self.engine = Engine(
            model,
            slots=option("max_requests_per_batch", 0) or self._slots_for(workload_hints),
            max_length=_longest(model, workload_hints),
            max_waiting=option("max_queue_size", 0) or UNBOUNDED,
            **({"piece": piece} if (piece := option("max_batch_tokens", 0)) else {}),
        )
        self.warmed_up = self._started = False
        self._ending: Thread | None = None
        self._counter = 0
        self._changed = Condition()
        # Under its lock: results that nobody has taken, handlers, ids of the engine by name.
        self._results: deque[GenerationOutput] = deque()
        self._handlers: dict[str, Handler] = {}
        self._ids: dict[str, int] = {}

    def _slots_for(self, hints: Any) -> int:
        expected = getattr(hints, "num_requests", 0) * self.settings.num_answers
        return min(SLOTS, expected or SLOTS)

    @property
    def fatal_error(self) -> BaseException | None:
        """The error after which the engine answers no more; None so far."""
        return self.engine.failed

    @property
    def background_thread_status(self) -> EngineManager:
        """The manager itself, which has the `fatal_error` that transformers' server looks for."""
        return self

    def warmup(self) -> None:
        """Record graphs before the first request."""
        if not self._started:
            self.engine.warm_up()
        self.warmed_up = True

    def is_running(self) -> bool:
        """Whether requests are answered now."""
        return self._started and self.fatal_error is None

    def start(self) -> None:
        """Begin to answer requests, in a thread."""
        if not self._started:
            self.join()
            self.engine.start()
            self._started = True

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Answer no more requests.

        Args:
            block: wait until all requests have ended, or `timeout` seconds.
            keep_for_next_session: the model's next manager is this one.
            hard_stop: end requests now, with what they have.
        """
        if not self._started:
            return
        self._started = False
        self._ending = Thread(target=self.engine.stop, kwargs={"drain": not hard_stop}, daemon=True)
        self._ending.start()
        if block:
            self.join(timeout=timeout)
        if keep_for_next_session:
            setattr(self.model, KEPT, self)
        with self._changed:
            self._changed.notify_all()

    def join(self, stop_trigger_time: float = 0, timeout: float | None = None) -> None:
        """Wait until all requests have ended, after `stop`."""
        if self._ending is not None:
            self._ending.join(timeout)

    def destroy(self) -> None:
        """End the manager."""
        self.stop(hard_stop=True)

    def __enter__(self) -> EngineManager:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **sampling: Any,
    ) -> str:
        """Ask for an answer; the name that its outputs have.

        Args:
            input_ids: the prompt.
            request_id: a name; by default one is made.
            max_new_tokens: by default that of the generation_config; one of both must be there.
            streaming: an output for each token, with all tokens so far, and not only the last.
            record_timestamps: whether outputs have a time for each token.
            eos_token_id: what ends the answer; by default that of the generation_config.
            sampling: fields of `SamplingSettings` that differ for this request, or `seed`.
        """
        limit = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit is None:
            raise ValueError(
                "max_new_tokens must be given, here or in the generation_config: the state of a "
                "Frac model never fills up, so that nothing else would end an answer"
            )
        if request_id is None:
            request_id = self._names(1)[0]
        request = Request(
            prompt=list(input_ids),
            max_new_tokens=limit,
            sampling=_changed(self.settings.sampling, sampling),
            eos_token_ids=(
                self.settings.eos_token_ids if eos_token_id is None else end_tokens(eos_token_id)
            ),
            logprobs=self._logprobs,
        )
        for n in range(self.settings.num_answers):
            # transformers' names for the further answers to a prompt.
            name = request_id if n == 0 else f"{request_id}__child#{n - 1}"
            seed = sampling.get("seed", self._seeds.getrandbits(62) if self._seeds else None)
            self._submit(name, replace(request, seed=seed), streaming, record_timestamps)
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """`add_request` for each prompt; their names."""
        names = self._names(len(inputs))
        for name, ids in zip(names, inputs, strict=True):
            self.add_request(ids, name, max_new_tokens, streaming, record_timestamps, **sampling)
        return names

    def _names(self, number: int) -> list[str]:
        with self._changed:
            first = self._counter
            self._counter += number
        return [f"req_{n}" for n in range(first, first + number)]

    def _submit(self, name: str, request: Request, streaming: bool, timed: bool) -> None:
        running = _Running(name, list(request.prompt), streaming, [] if timed else None)
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                id = self.engine.submit(request, partial(self._take, running))
                break
            except QueueFull:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.01)
        with self._changed:
            if not running.ended:
                self._ids[name] = id

    def _take(self, running: _Running, update: Update) -> None:
        """An update, in the thread of the engine."""
        output = running.take(update)
        with self._changed:
            if running.ended:
                self._ids.pop(running.request_id, None)
            if output is not None and not self._hand_over(output):
                self._results.append(output)
                self._changed.notify_all()

    def _hand_over(self, output: GenerationOutput) -> bool:
        """Give an output to the handler of its request; whether there is one."""
        handler = self._handlers.get(output.request_id)
        if handler is None:
            return False
        if output.status >= RequestStatus.FINISHED:
            del self._handlers[output.request_id]
        callback, loop = handler
        # A loop that is closed has nobody who waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, output)
        return True

    def cancel_request(self, request_id: str) -> None:
        """End a request with what it has; nothing happens if it has ended."""
        with self._changed:
            id = self._ids.get(request_id)
        if id is not None:
            self.engine.cancel(id)

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], object]
    ) -> None:
        """Call a function, in the event loop that runs now, with each output of a request."""
        with self._changed:
            self._handlers[request_id] = (callback, asyncio.get_running_loop())
            waiting = [output for output in self._results if output.request_id == request_id]
            for output in waiting:
                self._results.remove(output)
                self._hand_over(output)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next output, of a request if it is named; None after `timeout` seconds, or when none
        can come any more."""

        def find() -> GenerationOutput | None:
            known = (x for x in self._results if request_id in (None, x.request_id))
            return next(known, None)

        with self._changed:
            self._changed.wait_for(lambda: find() or not self.is_running(), timeout)
            if (output := find()) is not None:
                self._results.remove(output)
            return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the manager is stopped."""
        while self.is_running() or self._results:
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request as they come."""
        while self.is_running() or self._results:
            output = self.get_result(request_id, timeout=0.1)
            if output is not None:
                yield output
                if output.status >= RequestStatus.FINISHED:
                    return


def _option(config: Any, name: str, default: Any) -> Any:
    """An option that not every release of transformers has."""
    return getattr(config, name, default)


def _longest(model: Any, hints: Any) -> int | None:
    """Tokens of the longest request, if hints say so and buffers are made for it; else None."""
    if "attention" not in (model.config.mixer_types or ()):
        return None
    prompt, new = (getattr(hints, f"max_{kind}_length", 0) for kind in ("prompt", "generated"))
    return prompt + new if prompt and new else None


def _changed(settings: SamplingSettings, changes: dict[str, Any]) -> SamplingSettings:
    """Settings of one request; ValueError names what is no field of them."""
    known = {field.name for field in fields(SamplingSettings)}
    unknown = sorted(set(changes) - known - {"seed"})
    if unknown:
        raise ValueError(
            f"add_request must be called with settings among {', '.join(sorted(known))} and seed, "
            f"got {', '.join(unknown)}"
        )
    return replace(settings, **{name: changes[name] for name in known & set(changes)})


def make_manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> EngineManager:
    """The manager of `init_continuous_batching`: a new one, or the one that was kept."""
    if (kept := getattr(model, KEPT, None)) is not None:
        return kept
    config = model.generation_config if generation_config is None else generation_config
    if continuous_batching_config is None:
        continuous_batching_config = getattr(config, "continuous_batching_config", None)
    return EngineManager(model, config, continuous_batching_config, workload_hints)
