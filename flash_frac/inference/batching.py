"""transformers' continuous batching on our engine: `generate_batch`, and its server's option.

`FracForCausalLM.init_continuous_batching` returns `EngineManager`, which has the methods of
transformers' own manager and returns its `GenerationOutput`. An option that the engine does not
support raises an error that names it; so do paging options, because the KV cache is not paged.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from random import Random
from threading import Condition, Thread
from typing import Any, TypeAlias

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from flash_frac.inference.batching_requests import Running
from flash_frac.inference.engine import Engine
from flash_frac.inference.generation_settings import (
    changed_settings,
    check_batching,
    end_tokens,
    longest_request,
    settings_of,
)
from flash_frac.inference.scheduling import EngineStopped, QueueFull, Request, Update
from flash_frac.models import FracForCausalLM
from flash_frac.models.generation import NO_LIMIT

Handler: TypeAlias = tuple[Callable[[Any], object], asyncio.AbstractEventLoop]
# The model attribute that keeps a manager for the next session.
KEPT = "_cached_continuous_batching_manager"
# Slots of the engine if the number of requests is unknown.
SLOTS = 64
# Length of an unbounded queue, and seconds to wait for room in a bounded one.
UNBOUNDED, PATIENCE = 2**31, 10.0


class EngineManager:
    """Takes requests and returns results, as transformers' ContinuousBatchingManager does.

    A result goes to the handler of its request if there is one; otherwise it waits for
    `get_result` or an iterator. A request that the engine refuses, and one that is cancelled, ends
    with an output of status FAILED.

    Args:
        model: is put into eval mode.
        generation_config: default sampling settings; a request may override them.
        continuous_batching_config: transformers' own; its paging options must not be set.
        workload_hints: expected number and length of requests.

    Attributes:
        engine: runs the requests.

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
        self.use(generation_config)
        self.continuous_batching_config = continuous_batching_config
        # Some releases of transformers have no such option.
        option: Any = partial(getattr, continuous_batching_config)
        self._logprobs = 0 if option("return_logprobs", False) else None
        self._seeds = None if option("seed", None) is None else Random(option("seed", None))
        self.model: Any = model.eval()
        self.engine = Engine(
            model,
            slots=option("max_requests_per_batch", 0) or self._slots_for(workload_hints),
            max_length=longest_request(model.config, workload_hints),
            max_waiting=option("max_queue_size", 0) or UNBOUNDED,
            **({"piece": piece} if (piece := option("max_batch_tokens", 0)) else {}),
        )
        self.warmed_up = self._started = False
        self._ending: Thread | None = None
        self._counter = 0
        self._changed = Condition()
        # Guarded by its lock: unclaimed results, handlers, and the engine's ids by request name.
        self._results: deque[GenerationOutput] = deque()
        self._handlers: dict[str, Handler] = {}
        self._ids: dict[str, int] = {}

    def use(self, generation_config: GenerationConfig) -> None:
        """Set the default settings of the next requests."""
        settings = settings_of(generation_config)
        if settings.stop:
            raise ValueError(
                "generation_config must have no stop_strings: they need a tokenizer, which this "
                "call does not have; use eos_token_id, model.generate, or frac serve"
            )
        self.generation_config, self.settings = generation_config, settings

    def fits(self, continuous_batching_config: Any, workload_hints: Any) -> bool:
        """Whether this manager works, with these options and room for the longest request."""
        known, longest = self.engine.max_length, longest_request(self.model.config, workload_hints)
        same = continuous_batching_config in (None, self.continuous_batching_config)
        return same and (known is None or (longest or 0) <= known) and self.fatal_error is None

    def _slots_for(self, hints: Any) -> int:
        expected = getattr(hints, "num_requests", 0) * self.settings.num_answers
        return min(SLOTS, expected or SLOTS)

    @property
    def fatal_error(self) -> BaseException | None:
        """The error that stopped the engine, or None."""
        return self.engine.failed

    @property
    def background_thread_status(self) -> EngineManager:
        """The manager itself, which has the `fatal_error` that transformers' server looks for."""
        return self

    def warmup(self) -> None:
        """Record CUDA graphs before the first request."""
        if not self._started:
            self.engine.warm_up()
        self.warmed_up = True

    def is_running(self) -> bool:
        """Whether the engine is answering requests."""
        return self._started and self.fatal_error is None

    def start(self) -> None:
        """Start to answer requests in a background thread."""
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
        """Stop answering requests.

        Args:
            block: wait until all requests have ended, at most `timeout` seconds.
            keep_for_next_session: reuse this manager in the model's next session.
            hard_stop: end running requests now, with the tokens they have.
        """
        self.engine.gate.check()
        if self._started:
            self._started = False
            drain = {"drain": not hard_stop}
            self._ending = Thread(target=self.engine.stop, kwargs=drain, daemon=True)
            self._ending.start()
        if hard_stop:
            with self._changed:
                running = [*self._ids]
            # Also those for which an earlier stop is waiting.
            for name in running:
                self.cancel_request(name)
        if block:
            self.join(timeout=timeout)
        if keep_for_next_session:
            setattr(self.model, KEPT, self)
        with self._changed:
            self._changed.notify_all()

    def join(self, stop_trigger_time: float = 0, timeout: float | None = None) -> None:
        """After `stop`, wait until all requests have ended."""
        if self._ending is not None:
            self._ending.join(timeout)

    def destroy(self) -> None:
        """Stop now, without waiting for running requests to finish."""
        self.stop(hard_stop=True)

    def pause(self) -> AbstractContextManager[None]:
        """Answer no requests inside the block, for example to change weights in place.

        Example: `with manager.pause(): model.load_state_dict(weights)`
        """
        if not self.is_running():
            raise RuntimeError("pause needs a manager that is running; call start()")
        return self.engine.pause()

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
        """Queue a prompt and return the request id of its outputs.

        Args:
            input_ids: the prompt.
            request_id: generated by default; must not be that of a running request.
            max_new_tokens: required here or in the generation_config, which is the default.
            streaming: deliver an output after each token, with all tokens so far.
            record_timestamps: record a time for each token.
            eos_token_id: token ids that end the answer; by default the generation_config's.
            sampling: fields of `SamplingSettings` to override for this request, or `seed`.
        """
        prompt, settings = list(input_ids), self.settings
        limit = settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit is None and settings.max_length is not None:
            limit = max(1, settings.max_length - len(prompt))
        if limit is None:
            raise ValueError(NO_LIMIT)
        if request_id is None:
            request_id = self._names(1)[0]
        fields = {
            "max_new_tokens": limit,
            "sampling": changed_settings(self.settings.sampling, sampling),
            "eos_token_ids": (
                self.settings.eos_token_ids if eos_token_id is None else end_tokens(eos_token_id)
            ),
            "logprobs": self._logprobs,
        }
        for n in range(self.settings.num_answers):
            # transformers' names for the further answers to a prompt.
            name = request_id if n == 0 else f"{request_id}__child#{n - 1}"
            seed = sampling.get("seed", self._seeds.getrandbits(62) if self._seeds else None)
            running = Running(name, prompt, streaming, [] if record_timestamps else None)
            self._submit(running, fields | {"seed": seed})
        return request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **sampling: Any,
    ) -> list[str]:
        """Call `add_request` for each prompt; return the request ids."""
        names = self._names(len(inputs))
        for name, ids in zip(names, inputs, strict=True):
            self.add_request(ids, name, max_new_tokens, streaming, record_timestamps, **sampling)
        return names

    def _names(self, number: int) -> list[str]:
        with self._changed:
            first = self._counter
            self._counter += number
        return [f"req_{n}" for n in range(first, first + number)]

    def _submit(self, running: Running, fields: dict[str, Any]) -> None:
        """Queue a request; like transformers, end it with status FAILED if the engine refuses it.

        An error here would end `generate_batch` without any answer.
        """
        name, give_up = running.request_id, time.monotonic() + PATIENCE
        while True:
            with self._changed:
                if name in self._ids:
                    raise ValueError(
                        f"request_id must not be that of a running request, got {name!r}"
                    )
                try:
                    request = Request(prompt=running.prompt, **fields)
                    self._ids[name] = self.engine.submit(request, partial(self._take, running))
                    return
                except ValueError as error:
                    return self._take(running, Update(-1, finished="error", error=str(error)))
                except (QueueFull, EngineStopped) as error:
                    if isinstance(error, EngineStopped) or time.monotonic() > give_up:
                        self._handlers.pop(name, None)
                        raise
            time.sleep(0.01)

    def _take(self, running: Running, update: Update) -> None:
        """Handle an update; runs in the engine's thread."""
        output = running.take(update)
        with self._changed:
            if running.ended:
                self._ids.pop(running.request_id, None)
            if output is not None and not self._hand_over(output):
                self._results.append(output)
                self._changed.notify_all()

    def _hand_over(self, output: GenerationOutput) -> bool:
        """Pass an output to the handler of its request; return whether there is one."""
        handler = self._handlers.get(output.request_id)
        if handler is None:
            return False
        if output.status >= RequestStatus.FINISHED:
            del self._handlers[output.request_id]
        callback, loop = handler
        # Nobody waits on a closed event loop.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(callback, output)
        return True

    def cancel_request(self, request_id: str) -> None:
        """End a request with the tokens it has; do nothing if it has already ended."""
        with self._changed:
            id = self._ids.get(request_id)
        if id is not None:
            self.engine.cancel(id)

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], object]
    ) -> None:
        """Call `callback` in the running event loop with each output of a request."""
        with self._changed:
            self._handlers[request_id] = (callback, asyncio.get_running_loop())
            waiting = [output for output in self._results if output.request_id == request_id]
            for output in waiting:
                self._results.remove(output)
                self._hand_over(output)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next output, of `request_id` if given. None after `timeout` seconds, or if no more
        can come."""

        def find() -> GenerationOutput | None:
            known = (x for x in self._results if request_id in (None, x.request_id))
            return next(known, None)

        if timeout is None:
            self.engine.gate.check()
        with self._changed:
            self._changed.wait_for(lambda: find() or not self.is_running(), timeout)
            if (output := find()) is not None:
                self._results.remove(output)
            return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs as they come, until the manager stops."""
        while self.is_running() or self._results:
            self.engine.gate.check()
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the outputs of one request as they come."""
        while self.is_running() or self._results:
            self.engine.gate.check()
            output = self.get_result(request_id, timeout=0.1)
            if output is not None:
                yield output
                if output.status >= RequestStatus.FINISHED:
                    return


def make_manager(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> EngineManager:
    """Return the model's kept manager, or a new one, for `init_continuous_batching`.

    A kept manager takes a new generation_config; other sizes need a new manager.
    """
    config = model.generation_config if generation_config is None else generation_config
    if continuous_batching_config is None:
        continuous_batching_config = getattr(config, "continuous_batching_config", None)
    kept: EngineManager | None = getattr(model, KEPT, None)
    if kept is not None:
        fits = kept.fits(continuous_batching_config, workload_hints)
        same = generation_config is None or settings_of(config) == kept.settings
        if kept.is_running() and not (fits and same):
            raise ValueError(
                "the kept manager is running with other settings or sizes; stop it, or call "
                "destroy_cached_continuous_batching_manager()"
            )
        if fits:
            if not same:
                kept.use(config)
            return kept
        model.destroy_cached_continuous_batching_manager()
    return EngineManager(model, config, continuous_batching_config, workload_hints)
