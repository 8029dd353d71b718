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


def _is_json_object(x: Any) -> bool:
    try:
        return isinstance(json.loads(x), dict)
    except (TypeError, ValueError):
        return False


_COUNT: Rule = ("a whole number of at least 1", lambda x: type(x) is int and x >= 1)
# Of all endpoints; null counts as absent.
FIELDS: dict[str, Rule] = {
    "max_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": ("a number of at least 0", lambda x: _is_number(x) and x >= 0),
    "top_p": ("a number above 0 and at most 1", lambda x: _is_number(x) and 0 < x <= 1),
    "frequency_penalty": ("a number above -1", lambda x: _is_number(x) and x > -1),
    "seed": ("a whole number of 63 bits", lambda x: type(x) is int and abs(x) < 2**63),
    "stream": ("true or false", lambda x: isinstance(x, bool)),
    "stop": ("a text or a list of texts", _is_texts),
    "logit_bias": ("an object with a number for each token id", _is_bias),
    "tools": ("a list", lambda x: isinstance(x, list)),
    "chat_template_kwargs": ("an object", lambda x: isinstance(x, dict)),
    "generation_config": ("an object as JSON in a text", _is_json_object),
}
# The field that holds what a client says, by endpoint.
INPUTS = {"chat": "messages", "completion": "prompt", "response": "input"}


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
    if kind == "completion" and not (isinstance(given, str) and given):
        return f"prompt must be a text that is not empty, got {given!r}"
    if kind == "response" and not (isinstance(given, str | list) and given):
        return f"input must be a text or a list of messages, got {given!r}"
    if kind == "chat" or isinstance(given, list):
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
