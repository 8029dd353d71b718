"""Translate an HTTP request into an engine request: prompt tokens and settings."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers.utils import logging

from flash_frac.inference.sampling import SamplingSettings
from flash_frac.inference.scheduling import Request
from flash_frac.inference.server.requests import wrong_value
from flash_frac.models.loading import one_line

logger = logging.get_logger(__name__)

# Maximum new tokens if a request does not set a limit.
DEFAULT_NEW_TOKENS = 1024
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Prompt(NamedTuple):
    """Token ids, and the positions where messages end."""

    ids: list[int]
    boundaries: tuple[int, ...] = ()


def read_prompt(
    kind: str, body: dict[str, Any], tokenizer: Any, template_options: dict[str, Any]
) -> Prompt:
    """The prompt tokens of a request.

    Args:
        kind: a key of `requests.INPUTS`.
        body: a request that has passed `request_problem`.
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
    try:
        text = tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True, **options
        )
    # A template may fail in any way on values that it does not expect.
    except Exception as error:
        raise ValueError(f"the chat template fails on this chat: {one_line(error)}") from error
    # Like apply_chat_template: a template writes its own start token.
    wanted = bool(getattr(tokenizer, "is_fast", False)) and len(plain) > 1
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=wanted)
    if not wanted:
        return Prompt(list(encoded["input_ids"]))
    ends = _message_ends(plain, text, tokenizer, options)
    offsets = [end for _, end in encoded["offset_mapping"]]
    # Count tokens that end at or before that character.
    boundaries = sorted({bisect_right(offsets, end) for end in ends})
    return Prompt(list(encoded["input_ids"]), tuple(n for n in boundaries if n))


def _messages_of_response(body: dict[str, Any]) -> list[dict[str, Any]]:
    given, system = body["input"], body.get("instructions")
    said = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for n, item in enumerate(said):
        if "role" not in item:
            raise ValueError(f"input[{n}] must have a role: this server reads only messages")
    return [{"role": "system", "content": system}, *said] if system else list(said)


def _plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message for chat templates: content as text, arguments of tool calls as an object."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"message {number} must be text: this model reads only text")
        content = "".join(parts)  # pyright: ignore[reportArgumentType,reportCallIssue]
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(number, call) for call in message["tool_calls"]]
    return plain


def _plain_call(number: int, call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError as error:
            raise ValueError(
                f"message {number} must have tool_calls with arguments in JSON: {error}"
            ) from error
    return {**call, "function": function}


def _message_ends(
    messages: Sequence[dict[str, Any]], text: str, tokenizer: Any, options: dict[str, Any]
) -> list[int]:
    """Character positions in a chat's text: the end of the first message, and of all but the last.

    Other chats are likely to share these: the same system prompt, or the same chat so far.
    """
    ends = []
    for number in sorted({1, len(messages) - 1}):
        try:
            begun = tokenizer.apply_chat_template(
                messages[:number], tokenize=False, add_generation_prompt=False, **options
            )
        except Exception as error:
            # A template may reject a chat that ends there; then no state is cached there.
            logger.debug(f"no boundary after message {number}: {error}")
            continue
        if text.startswith(begun):
            ends.append(len(begun))
    return ends


class Defaults(NamedTuple):
    """Defaults for fields that a request leaves out, from the model's `generation_config`."""

    sampling: SamplingSettings
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    max_length: int | None
    stop: tuple[str, ...] = ()


def make_request(body: dict[str, Any], prompt: Prompt, defaults: Defaults) -> Request:
    """Build the engine's request; a ValueError says what is wrong.

    Example: `make_request({"max_tokens": 5}, Prompt([7]), defaults).max_new_tokens == 5`
    """
    if body.get("generation_config") is not None:
        said = {name: value for name, value in body.items() if value is not None}
        body = _of_generation_config(body["generation_config"]) | said
    named = (body.get(name) for name in _LENGTHS)
    length = next((number for number in named if number is not None), None)
    if length is None:
        length, limits = defaults.max_new_tokens, (body.get("max_length"), defaults.max_length)
        for most in (limit for limit in limits if limit is not None):
            length = max(1, min(length, most - len(prompt.ids)))
    stop = defaults.stop if body.get("stop") is None else body["stop"] or ()
    eos = body.get("eos_token_ids", defaults.eos_token_ids)
    return Request(
        prompt=prompt.ids,
        max_new_tokens=length,
        sampling=sampling_of(body, defaults.sampling),
        seed=body.get("seed"),
        eos_token_ids=() if body.get("ignore_eos") else eos,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=_logprobs(body),
        boundaries=prompt.boundaries,
    )


def sampling_of(body: dict[str, Any], default: SamplingSettings) -> SamplingSettings:
    """The settings of a request; top_k, top_p or min_p without a temperature imply 1.

    Example: `sampling_of({"top_p": 0.9}, GREEDY).temperature == 1.0`
    """
    return default.changed({name: body[name] for name in _SAMPLING if body.get(name) is not None})


def _logprobs(body: dict[str, Any]) -> int | None:
    """Number of likeliest tokens to report besides the chosen one; None for no logprobs."""
    wanted = body.get("logprobs")
    if wanted is None or wanted is False:
        return None
    return (body.get("top_logprobs") or 0) if wanted is True else wanted


def _of_generation_config(text: str) -> dict[str, Any]:
    """Fields of a request from the `generation_config` that `transformers chat` sends."""
    from transformers import GenerationConfig

    from flash_frac.inference.generation_settings import settings_of

    try:
        config = GenerationConfig(**json.loads(text))
        settings = settings_of(config)
    except TypeError as error:
        raise ValueError(f"generation_config has a value of the wrong type: {error}") from error
    if settings.num_answers != 1:
        raise ValueError(
            "generation_config must not set num_return_sequences: a request has one answer"
        )
    found: dict[str, Any] = {name: getattr(settings.sampling, name) for name in _SAMPLING}
    if settings.max_new_tokens is not None:
        found["max_tokens"] = settings.max_new_tokens
    elif settings.max_length is not None:
        # Not a field of requests: make_request alone reads it.
        found["max_length"] = settings.max_length
    if settings.stop:
        found["stop"] = list(settings.stop)
    if config.eos_token_id is not None:
        found["eos_token_ids"] = settings.eos_token_ids
    if (problem := wrong_value(found)) is not None:
        raise ValueError(f"generation_config: {problem}")
    return found
