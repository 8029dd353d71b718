"""Responses of the server: the objects and events of OpenAI's API, as plain JSON.

Each endpoint has a class that turns the text of an answer into its object (`whole`), or into events
(`opening`, `piece`, `closing`). Every client gets an event every few tokens, so everything in it
but the text is built once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

DONE = "data: [DONE]\n\n"


class Token(NamedTuple):
    """A token's name, bytes and logprob, and the likeliest tokens with theirs."""

    text: str
    bytes: bytes
    logprob: float
    top: Sequence[tuple[str, bytes, float]] = ()


class Usage(NamedTuple):
    """Token counts of a request; `cached` prompt tokens came from the prefix cache."""

    prompt: int
    answer: int
    cached: int = 0

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def event(fields: dict[str, Any]) -> str:
    """Format an event of a stream.

    Example: `event({"a": 1}) == 'data: {"a": 1}\\n\\n'`
    """
    return f"data: {json.dumps(fields)}\n\n"


class ChatBody:
    """Bodies of /v1/chat/completions.

    Example: `ChatBody("id", "my-frac").whole("Hello", "stop", Usage(3, 1), None)`
    """

    kind, of_whole, of_piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, name: str, model: str, *, with_usage: bool = False) -> None:
        self.id, self.with_usage = f"{self.kind}-{name}", with_usage
        self.fields = {"id": self.id, "created": int(time.time()), "model": model}
        self._start = json.dumps(self.fields | {"object": self.of_piece})[:-1]

    def whole(
        self, text: str, finish: str, usage: Usage, tokens: Sequence[Token] | None
    ) -> dict[str, Any]:
        """The object of a whole answer; `tokens` has the logprobs if they were requested."""
        choice = self._choice(text, tokens) | {"finish_reason": finish}
        return self.fields | {"object": self.of_whole, "choices": [choice], "usage": usage.fields()}

    def opening(self) -> str:
        return self._event('{"role": "assistant", "content": ""}', None, None)

    def piece(self, text: str, tokens: Sequence[Token] | None) -> str:
        return self._event(f'{{"content": {json.dumps(text)}}}', tokens, None)

    def closing(self, finish: str, usage: Usage) -> str:
        ended = self._event("{}", None, finish)
        if self.with_usage:
            last = {"object": self.of_piece, "choices": [], "usage": usage.fields()}
            ended += event(self.fields | last)
        return ended + DONE

    def _event(self, delta: str, tokens: Sequence[Token] | None, finish: str | None) -> str:
        logprobs = "" if tokens is None else f', "logprobs": {json.dumps(chat_logprobs(tokens))}'
        return (
            f'data: {self._start}, "choices": [{{"index": 0, "delta": {delta}{logprobs}, '
            f'"finish_reason": {json.dumps(finish)}}}]}}\n\n'
        )

    def _choice(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        logprobs = None if tokens is None else chat_logprobs(tokens)
        message = {"role": "assistant", "content": text}
        return {"index": 0, "message": message, "logprobs": logprobs}


class TextBody(ChatBody):
    """Bodies of /v1/completions."""

    kind, of_whole, of_piece = "cmpl", "text_completion", "text_completion"

    def opening(self) -> str:
        return ""

    def piece(self, text: str, tokens: Sequence[Token] | None) -> str:
        return self._event(json.dumps(text), tokens, None)

    def _event(self, delta: str, tokens: Sequence[Token] | None, finish: str | None) -> str:
        text = '""' if delta == "{}" else delta
        logprobs = "null" if tokens is None else json.dumps(text_logprobs(tokens))
        return (
            f'data: {self._start}, "choices": [{{"index": 0, "text": {text}, "logprobs": '
            f'{logprobs}, "finish_reason": {json.dumps(finish)}}}]}}\n\n'
        )

    def _choice(self, text: str, tokens: Sequence[Token] | None) -> dict[str, Any]:
        logprobs = None if tokens is None else text_logprobs(tokens)
        return {"index": 0, "text": text, "logprobs": logprobs}


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI's servers send this value instead.
    return round(max(logprob, -9999.0), 6)


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Log-probabilities in the format of chat completions."""

    def named(text: str, content: bytes, value: float) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(value), "bytes": list(content)}

    content = [
        named(*token[:3]) | {"top_logprobs": [named(*x) for x in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    """Log-probabilities in the format of completions."""
    top = [{text: _finite(value) for text, _, value in token.top} for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": top if any(top) else None,
        "text_offset": None,
    }


class ResponseBody:
    """Bodies of /v1/responses: one message with one text."""

    def __init__(self, name: str, model: str, *, with_usage: bool = True) -> None:
        self.id, self.message_id = f"resp_{name}", f"msg_{name}"
        self.fields = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": False,
            "temperature": None,
            "top_p": None,
            "tool_choice": "none",
            "tools": [],
        }
        self._text, self._events = "", 0

    def whole(
        self, text: str, finish: str, usage: Usage, tokens: Sequence[Token] | None
    ) -> dict[str, Any]:
        """The object of a whole answer."""
        ended = finish != "length"
        return self.fields | {
            "status": "completed" if ended else "incomplete",
            "incomplete_details": None if ended else {"reason": "max_output_tokens"},
            "output": [self._message(text, "completed" if ended else "incomplete")],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.answer,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.answer,
            },
        }

    def opening(self) -> str:
        begun = self.fields | {"status": "in_progress", "output": [], "usage": None}
        item = self._message(None, "in_progress")
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._part("response.content_part.added", part=_text_part(""))
        )

    def piece(self, text: str, tokens: Sequence[Token] | None) -> str:
        self._text += text
        return self._part("response.output_text.delta", delta=text, logprobs=[])

    def closing(self, finish: str, usage: Usage) -> str:
        whole = self.whole(self._text, finish, usage, None)
        (item,) = whole["output"]
        return (
            self._part("response.output_text.done", text=self._text, logprobs=[])
            + self._part("response.content_part.done", part=_text_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{whole['status']}", response=whole)
        )

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_text_part(text)]
        named = {"id": self.message_id, "type": "message", "role": "assistant"}
        return named | {"status": status, "content": content}

    def _part(self, kind: str, **fields: Any) -> str:
        where = {"item_id": self.message_id, "output_index": 0, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        numbered = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\n{event(numbered)}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


BODIES: dict[str, type[Any]] = {
    "chat": ChatBody,
    "completion": TextBody,
    "response": ResponseBody,
}


def error_fields(message: str, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients expect it.

    Example: `error_fields("the queue is full", 429)`
    """
    kinds = {429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "code": status}}
