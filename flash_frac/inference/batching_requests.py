"""A running request of `generate_batch` and its output, in transformers' terms."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from flash_frac.inference.scheduling import Update


@dataclass
class Running:
    """A running request.

    Example: `output = Running("req_0", [5, 6], False, None).take(update)`
    """

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
        """Record an update; return the output to deliver, if there is one."""
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
