"""From a request over HTTP to one of the engine: the tokens of its prompt, and its settings."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers.utils import logging

from flash_frac.inference.sampling import SamplingSettings
from flash_frac.inference.scheduling import Request

logger = logging.get_logger(__name__)

# Tokens of an answer whose length a client leaves open.
DEFAULT_NEW_TOKENS = 1024
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Prompt(NamedTuple):
    """Tokens, and the numbers of tokens after which a message ends."""

    ids: list[int]
    boundaries: tuple[int, ...] = ()


def read_prompt(
    kind: str, body: dict[str, Any], tokenizer: Any, template_options: dict[str, Any]
) -> Prompt:
    """The tokens that a request asks to continue.

    Args:
        kind: of `requests.INPUTS`.
        body: a request in which `request_problem` has found nothing.
        template_options: for the chat template, unless the request has its own.

    Example: `read_prompt("completion", {"prompt": "Once upon"}, tokenizer, {}).ids`
    """
    if kind == "completion":
        given = body["prompt"]
        return Prompt(given if isinstance(given, list) else list(tokenizer(given)["input_ids"]))
    messages = body["messages"] if kind == "chat" else _messages_of_response(body)
    options = {**template_options, **(body.get("chat_template_kwargs") or {})}
    if body.get("tools"):
        options["tools"] = body["tools"]
    plain = [_plain(n, message) for n, message in enumerate(messages)]
    text = tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=True, **options
    )
    # As apply_chat_template does it: a template writes its own beginning.
    wanted = bool(getattr(tokenizer, "is_fast", False)) and len(plain) > 1
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=wanted)
    if not wanted:
        return Prompt(list(encoded["input_ids"]))
    ends = _message_ends(plain, text, tokenizer, options)
    offsets = [end for _, end in encoded["offset_mapping"]]
    # Tokens that end at that letter or before it.
    boundaries = sorted({bisect_right(offsets, end) for end in ends})
    return Prompt(list(encoded["input_ids"]), tuple(n for n in boundaries if n))


def _messages_of_response(body: dict[str, Any]) -> list[dict[str, Any]]:
    given, system = body["input"], body.get("instructions")
    said = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [{"role": "system", "content": system}, *said] if system else list(said)


def _plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: its content a text, arguments of calls an object."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"message {number} must be text: this model reads nothing else")
        content = "".join(parts)  # pyright: ignore[reportArgumentType,reportCallIssue]
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _message_ends(
    messages: Sequence[dict[str, Any]], text: str, tokenizer: Any, options: dict[str, Any]
) -> list[int]:
    """Letters of a chat's text after which its first message ends, and all but the last.

    These are the ends that other chats share: a system prompt, and the chat with another question.
    """
    ends = []
    for number in sorted({1, len(messages) - 1}):
        try:
            begun = tokenizer.apply_chat_template(
                messages[:number], tokenize=False, add_generation_prompt=False, **options
            )
        except Exception as error:
            # A template may refuse a chat that is cut there; then no state is kept there.
            logger.debug(f"no boundary after message {number}: {error}")
            continue
        if text.startswith(begun):
            ends.append(len(begun))
    return ends


class Defaults(NamedTuple):
    """What holds where a client says nothing: `generation_config` of the model."""

    sampling: SamplingSettings
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    max_length: int | None


def make_request(body: dict[str, Any], prompt: Prompt, defaults: Defaults) -> Request:
    """The engine's request; ValueError names what is wrong.

    Example: `make_request({"max_tokens": 5}, Prompt([7]), defaults).max_new_tokens == 5`
    """
    if body.get("generation_config") is not None:
        said = {name: value for name, value in body.items() if value is not None}
        body = _of_generation_config(body["generation_config"]) | said
    named = (body.get(name) for name in _LENGTHS)
    length = next((number for number in named if number is not None), None)
    if length is None:
        length = defaults.max_new_tokens
        if defaults.max_length is not None:
            length = max(1, min(length, defaults.max_length - len(prompt.ids)))
    stop = body.get("stop") or ()
    return Request(
        prompt=prompt.ids,
        max_new_tokens=length,
        sampling=sampling_of(body, defaults.sampling),
        seed=body.get("seed"),
        eos_token_ids=() if body.get("ignore_eos") else defaults.eos_token_ids,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=_logprobs(body),
        boundaries=prompt.boundaries,
    )


def sampling_of(body: dict[str, Any], default: SamplingSettings) -> SamplingSettings:
    """The settings of a request; what narrows a draw without a temperature means one of 1.

    Example: `sampling_of({"top_p": 0.9}, GREEDY).temperature == 1.0`
    """
    named = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    draws = any(name in named for name in ("top_k", "top_p", "min_p"))
    if draws and "temperature" not in named and default.temperature == 0:
        named["temperature"] = 1.0
    return replace(default, **named)


def _logprobs(body: dict[str, Any]) -> int | None:
    """How many of the likeliest tokens beside the chosen one; None for no logprobs at all."""
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    return (body.get("top_logprobs") or 0) if wanted is True else wanted


def _of_generation_config(text: str) -> dict[str, Any]:
    """Fields of a request from the `generation_config` that `transformers chat` sends."""
    from transformers import GenerationConfig

    from flash_frac.inference.generation_settings import settings_of

    try:
        settings = settings_of(GenerationConfig(**json.loads(text)))
    except TypeError as error:
        raise ValueError(f"generation_config has a value of another type: {error}") from error
    found: dict[str, Any] = {name: getattr(settings.sampling, name) for name in _SAMPLING}
    if settings.max_new_tokens is not None:
        found["max_tokens"] = settings.max_new_tokens
    return found | ({"stop": list(settings.stop)} if settings.stop else {})
