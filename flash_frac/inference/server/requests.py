"""The fields of a request to the server, and the values that each may have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

Rule = tuple[str, Callable[[Any], bool]]


def _is_number(x: Any) -> bool:
    known = isinstance(x, int | float) and not isinstance(x, bool)
    # Neither NaN, nor infinite, nor a whole number that no float can hold.
    return known and abs(x) <= sys.float_info.max


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
# Rules for the fields of all endpoints; null counts as absent.
FIELDS: dict[str, Rule] = {
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "temperature": ("a number of at least 0", lambda x: _is_number(x) and x >= 0),
    "top_p": ("a number above 0 and at most 1", lambda x: _is_number(x) and 0 < x <= 1),
    "top_k": ("a whole number of at least 0", lambda x: type(x) is int and x >= 0),
    "min_p": ("a number of at least 0 and below 1", lambda x: _is_number(x) and 0 <= x < 1),
    # Logits divided by a much smaller number would be infinite.
    "repetition_penalty": ("a number of at least 0.01", lambda x: _is_number(x) and x >= 0.01),
    "frequency_penalty": ("a number above -1", lambda x: _is_number(x) and x > -1),
    "seed": (
        "a whole number between -2**63 and 2**63",
        lambda x: type(x) is int and abs(x) < 2**63,
    ),
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
    "generation_config": ("a JSON object as a string", _is_json_object),
}
# The field with the prompt, by endpoint.
INPUTS = {"chat": "messages", "completion": "prompt", "response": "input"}
# Fields that the engine supports, at all endpoints and by endpoint.
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
# Fields for a service's records, which do not affect the answer.
RECORDS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "prompt_cache_retention",
}
# Fields of OpenAI's API that the engine does not support, with the values that change nothing.
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
# Options of streams, with the values that this server supports.
_STREAM_OPTIONS = {"include_usage": (True, False, None), "include_obfuscation": (False, None)}
# What the server itself passes to the chat template.
_RESERVED = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
_RESERVED -= {"documents", "kwargs"}


def unanswerable(kind: str, body: dict[str, Any]) -> str | None:
    """A message about the first field that the engine does not support, or None.

    Example: `unanswerable("chat", {"messages": [], "n": 2})`
    """
    for field, value in body.items():
        if value is None or field in HONOURED[kind] or field in RECORDS:
            continue
        if field not in NOTHING_ASKED:
            return f"unexpected field: this endpoint does not know {field}"
        if value not in NOTHING_ASKED[field]:
            known = " or ".join(json.dumps(known) for known in NOTHING_ASKED[field])
            hint = "; use repetition_penalty" if field.endswith("_penalty") else ""
            return f"this server supports {field} only as {known}{hint}"
    if body.get("top_logprobs") and not body.get("logprobs"):
        return "top_logprobs needs logprobs: true"
    for name, value in (body.get("stream_options") or {}).items():
        if value not in _STREAM_OPTIONS.get(name, ()):
            return (
                f"this server supports stream_options only with include_usage, true or false, "
                f"got {name}: {_shown(value)}"
            )
    return None


def request_problem(kind: str, body: dict[str, Any], tokenizer: Any) -> str | None:
    """A message that says what is wrong with a request, or None.

    Args:
        kind: a key of INPUTS.
        body: the request.
        tokenizer: the model's tokenizer, which needs a chat template except for completions.

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
        return f"prompt must be a non-empty text or a list of token ids, got {_shown(given)}"
    if kind == "response" and not (isinstance(given, str | list) and given):
        return f"input must be a text or a list of messages, got {_shown(given)}"
    if kind == "chat" or (kind == "response" and isinstance(given, list)):
        problem = _in_messages(name, given)
        if problem is not None:
            return problem
    return wrong_value(body)


def wrong_value(body: dict[str, Any]) -> str | None:
    """A message about the first field of FIELDS with a wrong value, or None.

    Example: `wrong_value({"top_p": 3})`
    """
    for field, (wanted, holds) in FIELDS.items():
        value = body.get(field)
        if value is not None and not holds(value):
            return f"{field} must be {wanted}, got {_shown(value)}"
    taken = sorted(_RESERVED & set(body.get("chat_template_kwargs") or ()))
    if taken:
        return f"chat_template_kwargs must not set {', '.join(taken)}: the server does"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _are_calls(x: Any) -> bool:
    """Whether x is a list of tool calls, in the form of chat completions."""
    return isinstance(x, list) and all(
        isinstance(call, dict)
        and isinstance(function := call.get("function"), dict)
        and isinstance(function.get("arguments", ""), str | dict)
        for call in x
    )


def _in_messages(name: str, messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"{name} must be a list with at least one message, got {_shown(messages)}"
    for n, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"{name}[{n}] must be an object with role and content, got {_shown(message)}"
        # Tool calls and their results, which the server also reads, have other fields.
        if "role" in message or name == "messages":
            if not isinstance(message.get("role"), str):
                return f"{name}[{n}].role must be a text, got {_shown(message.get('role'))}"
            if not isinstance(message.get("content"), str | list) and "tool_calls" not in message:
                return f"{name}[{n}].content must be a text, got {_shown(message.get('content'))}"
        if (calls := message.get("tool_calls")) is not None and not _are_calls(calls):
            return (
                f"{name}[{n}].tool_calls must be a list of objects, each with the object function, "
                f"got {_shown(calls)}"
            )
    return None


def is_callers_mistake(error: Exception) -> bool:
    """Whether the caller caused an error: a wrong value, or messages that a template rejects."""
    return isinstance(error, ValueError) or "jinja2" in type(error).__module__
