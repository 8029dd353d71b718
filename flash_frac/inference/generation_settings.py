"""Translate transformers' configurations into engine settings; reject unsupported fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import GenerationConfig

from flash_frac.inference.sampling import SamplingSettings

# Fields of a GenerationConfig that the engine supports, and others that change no token here.
_HONOURED = {
    *("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "stop_strings"),
    *("repetition_penalty", "eos_token_id", "num_return_sequences", "max_length"),
}
_WITHOUT_EFFECT = {
    *("pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config"),
    *("disable_compile", "continuous_batching_config", "renormalize_logits"),
    *("return_dict_in_generate", "prefill_chunk_size"),
    # Settings of assisted generation, which only matter if a call passes an assistant.
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
}
# Values of other fields that change nothing, besides None and False.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "length_penalty"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "min_length"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    "min_new_tokens": 0,
}
# Fields of a ContinuousBatchingConfig that the engine supports or can safely ignore.
_BATCHING_HONOURED = {
    *("max_batch_tokens", "max_requests_per_batch", "max_queue_size", "return_logprobs", "seed"),
    *("allow_block_sharing", "auto_switch_to_flash", "per_request_processors"),
    *("drop_unsupported_processors", "disable_nccl_graph_mixing", "cpu_group_timeout"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A GenerationConfig as engine settings."""

    sampling: SamplingSettings
    max_new_tokens: int | None
    max_length: int | None
    eos_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    num_answers: int


def settings_of(config: GenerationConfig) -> Settings:
    """Translate a GenerationConfig; a ValueError names fields that the engine does not support.

    Example: `settings_of(GenerationConfig(do_sample=True, top_p=0.9)).sampling.top_p == 0.9`
    """
    named = ((name, value) for name, value in vars(config).items() if not name.startswith("_"))
    asked = {name: value for name, value in named if value is not None and value is not False}
    others = set(asked) - _HONOURED - _WITHOUT_EFFECT
    refused = sorted(name for name in others if asked[name] != _NEUTRAL.get(name))
    if refused:
        raise ValueError(
            f"generation_config may only set {', '.join(sorted(_HONOURED))}, got "
            f"{', '.join(f'{name}={asked[name]!r}' for name in refused)}; use model.generate"
        )
    if asked.get("max_length", 1) < 1:
        raise ValueError(f"max_length must be at least 1, got {asked['max_length']}")
    names = ("top_k", "top_p", "min_p") if asked.get("do_sample") else ()
    settings = {name: asked[name] for name in (*names, "repetition_penalty") if name in asked}
    if asked.get("do_sample"):
        settings["temperature"] = asked.get("temperature", 1.0)
        if settings["temperature"] == 0 and {"top_k", "top_p", "min_p"} & set(settings):
            raise ValueError(
                "generation_config has do_sample=True and temperature=0, which always takes the "
                "most likely token; set do_sample=False, or a higher temperature"
            )
    stop = asked.get("stop_strings", ())
    return Settings(
        sampling=SamplingSettings(**settings),
        max_new_tokens=asked.get("max_new_tokens"),
        max_length=asked.get("max_length"),
        eos_token_ids=end_tokens(config.eos_token_id),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        num_answers=asked.get("num_return_sequences", 1),
    )


def end_tokens(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Tokens that end an answer; transformers uses negative ids for none."""
    known = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    return tuple(n for n in known if n >= 0)


def changed_settings(settings: SamplingSettings, changes: dict[str, Any]) -> SamplingSettings:
    """Settings of one request; a ValueError names unknown fields. A `seed` may be among them.

    Example: `changed_settings(GREEDY, {"temperature": 0.7, "seed": 1}).temperature == 0.7`
    """
    known = {field.name for field in fields(SamplingSettings)}
    unknown = sorted(set(changes) - known - {"seed"})
    if unknown:
        raise ValueError(
            f"add_request accepts the settings {', '.join(sorted(known))} and seed, "
            f"got {', '.join(unknown)}"
        )
    return settings.changed({name: changes[name] for name in known & set(changes)})


def longest_request(config: Any, hints: Any) -> int | None:
    """Tokens of the longest request, if hints give it and attention layers need it; else None."""
    if "attention" not in (config.mixer_types or ()):
        return None
    prompt, new = (getattr(hints, f"max_{kind}_length", 0) for kind in ("prompt", "generated"))
    return prompt + new if prompt and new else None


def check_batching(config: Any) -> None:
    """Raise a ValueError that names the ContinuousBatchingConfig options that we do not support.

    Example: `check_batching(ContinuousBatchingConfig(max_queue_size=8))`
    """
    if config is None:
        return
    usual = type(config)()
    refused = [
        option.name
        for option in fields(config)
        if option.name not in _BATCHING_HONOURED
        and getattr(config, option.name) != getattr(usual, option.name)
    ]
    if refused:
        raise ValueError(
            f"continuous_batching_config must leave {', '.join(refused)} at the default: our "
            "engine has no paging, compilation or offloading; it supports max_requests_per_batch "
            "(slots), max_batch_tokens (prompt tokens between two steps) and max_queue_size"
        )
