"""What a client of the server may ask for: each field of a request, and what it must be."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Rule = tuple[str, Callable[[Any], bool]]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_texts(x: Any) -> bool:
    return isinstance(x, str) or (isinstance(x, list) and all(isinstance(y, str) for y in x))


def _is_bias(x: Any) -> bool:
    return isinstance(x, dict) and all(k.isdecimal() and _is_number(v) for k, v in x.items())


def _is_ids(x: Any) -> bool:
    return isinstance(x, list) and len(x) > 0 and all(type(y) is int for y in x)


def _is_json_object(x: Any) -> bool:
    try:
        return isinstance(json.loads(x), dict)
    except (TypeError, ValueError):
        return False


_COUNT: Rule = ("a whole number of at least 1", lambda x: type(x) is int and x >= 1)
# Of all endpoints; null counts as absent.
FIELDS: dict[str, Rule] = {
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": ("a number of at least 0", lambda x: _is_number(x) and x >= 0),
    "top_p": ("a number above 0 and at most 1", lambda x: _is_number(x) and 0 < x <= 1),
    "top_k": ("a whole number of at least 0", lambda x: type(x) is int and x >= 0),
    "min_p": ("a number of at least 0 and below 1", lambda x: _is_number(x) and 0 <= x < 1),
    "repetition_penalty": ("a number above 0", lambda x: _is_number(x) and x > 0),
    "frequency_penalty": ("a number above -1", lambda x: _is_number(x) and x > -1),
    "seed": ("a whole number of 63 bits", lambda x: type(x) is int and abs(x) < 2**63),
    "stream": ("true or false", lambda x: isinstance(x, bool)),
    "stream_options": ("an object", lambda x: isinstance(x, dict)),
    "ignore_eos": ("true or false", lambda x: isinstance(x, bool)),
    "logprobs": (
        "true, false or a whole number from 0 to 20",
        lambda x: isinstance(x, bool) or (type(x) is int and 0 <= x <= 20),
    ),
    "top_logprobs": ("a whole number from 0 to 20", lambda x: type(x) is int and 0 <= x <= 20),
    "stop": ("a text or a list of texts", _is_texts),
    "logit_bias": ("an object with a number for each token id", _is_bias),
    "tools": ("a list", lambda x: isinstance(x, list)),
    "instructions": ("a text", lambda x: isinstance(x, str)),
    "chat_template_kwargs": ("an object", lambda x: isinstance(x, dict)),
    "generation_config": ("an object as JSON in a text", _is_json_object),
}
# The field that holds what a client says, by endpoint.
INPUTS = {"chat": "messages", "completion": "prompt", "response": "input"}
# What the engine answers by, at all endpoints and by endpoint.
_ALL = {
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop"),
    *("stream", "stream_options", "ignore_eos", "generation_config"),
}
_CHAT = {"tools", "chat_template_kwargs"}
HONOURED = {
    "chat": _ALL
    | _CHAT
    | {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"},
    "completion": _ALL | {"prompt", "max_tokens", "logprobs"},
    "response": _ALL | _CHAT | {"input", "instructions", "max_output_tokens"},
}
# Fields for the records of a service, which change no answer.
RECORDS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "prompt_cache_retention",
}
# Fields of OpenAI's API that the engine cannot honour, with the values that ask for nothing.
NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "truncation": ("disabled",),
    "background": (False,),
    "include": ([],),
}


def unanswerable(kind: str, body: dict[str, Any]) -> str | None:
    """A sentence on the first field that the engine cannot honour, None if it can honour all.

    Example: `unanswerable("chat", {"messages": [], "n": 2})`
    """
    for field, value in body.items():
        if value is None or field in HONOURED[kind] or field in RECORDS:
            continue
        if field not in NOTHING_ASKED:
            return f"unexpected field: this endpoint does not know {field}"
        if value not in NOTHING_ASKED[field]:
            known = " or ".join(json.dumps(known) for known in NOTHING_ASKED[field])
            hint = "; repetition_penalty is honoured" if field.endswith("_penalty") else ""
            return f"{field} cannot be honoured by this server except as {known}{hint}"
    return None


def request_problem(kind: str, body: dict[str, Any], tokenizer: Any) -> str | None:
    """A sentence on what is wrong with a request, None if nothing is.

    Args:
        kind: of INPUTS.
        body: the request.
        tokenizer: of the model, which needs a chat template for all but a completion.

    Example: `request_problem("chat", {"messages": []}, tokenizer)`
    """
    name = INPUTS[kind]
    if body.get(name) is None:
        return f"the field {name} is missing"
    if kind != "completion" and getattr(tokenizer, "chat_template", None) is None:
        return (
            f"the model's tokenizer has no chat template, which {name} needs; send a prompt to "
            "/v1/completions, or serve a tokenizer that has one"
        )
    given = body[name]
    if kind == "completion" and not (isinstance(given, str) and given) and not _is_ids(given):
        return f"prompt must be a text that is not empty or a list of token ids, got {given!r}"
    if kind == "response" and not (isinstance(given, str | list) and given):
        return f"input must be a text or a list of messages, got {given!r}"
    if kind == "chat" or (kind == "response" and isinstance(given, list)):
        problem = _in_messages(name, given)
        if problem is not None:
            return problem
    for field, (wanted, holds) in FIELDS.items():
        value = body.get(field)
        if value is not None and not holds(value):
            return f"{field} must be {wanted}, got {value!r}"
    return None


def _in_messages(name: str, messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"{name} must be a list with at least one message, got {messages!r}"
    for n, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"{name}[{n}] must be an object with role and content, got {message!r}"
        # Calls of tools and their results, which the server reads, have other fields.
        if "role" in message or name == "messages":
            if not isinstance(message.get("role"), str):
                return f"{name}[{n}].role must be a text, got {message.get('role')!r}"
            if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
                return f"{name}[{n}].content must be a text, got {message.get('content')!r}"
    return None


def is_callers_mistake(error: Exception) -> bool:
    """A wrong value is the caller's, and so are messages that a chat template refuses."""
    return isinstance(error, ValueError) or "jinja2" in type(error).__module__
