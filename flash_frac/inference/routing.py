"""Route calls of `model.generate` to a `Generator` where possible.

transformers' loop launches the kernels of every token from Python, which takes longer than the GPU
needs to run them. A `Generator` replays them from CUDA graphs. It handles a greedy or sampling call
of a model that can be recorded (see `graphs.Recorder`) if it supports every option of the call. Any
other call, and every call with `cache_implementation="dynamic"`, uses transformers' loop.
Letters: B batch, T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from flash_frac.inference.generator import Generator
from flash_frac.inference.graphs import Recorder
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.models import FracForCausalLM
from flash_frac.models.boundaries import find_boundaries
from flash_frac.models.generation import KEPT
from flash_frac.models.inputs import UNUSED

logger = logging.get_logger(__name__)

# Fields of a GenerationConfig that may have any value: they act only through the ids, logits
# processors and stopping criteria of a call. All others, including those of later releases of
# transformers, must have their defaults.
UNDERSTOOD = frozenset(
    {
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "max_length",
        "max_new_tokens",
        "max_time",
        "stop_strings",
        "num_return_sequences",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
    }
)
# Our and transformers' names of sampling settings, in the order in which they apply.
PROCESSORS: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# Arguments that `generate` passes to the model, and those that the model ignores.
INPUTS = {"attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"}
INPUTS |= {*UNUSED}
# Attention that computes the same as `Generator`; functions registered by others may not.
ATTENTION = {"eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"}
# Seeds below this leave room for one per sequence.
MOST_SEEDS = 2**62
# Held while a model gets its `_Kept`.
_MAKING = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of `generate`, as transformers prepares it for its own loop.

    Attributes:
        input_ids: (B, T), one row for each returned sequence.
        inputs: arguments of the model.
    """

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    synced_gpus: bool
    streamer: Any
    inputs: dict[str, Any]

    @property
    def num_new(self) -> int:
        """Maximum number of new tokens; 0 if there is no limit."""
        return (self.criteria.max_length or 0) - self.input_ids.shape[1]

    def end_ids(self) -> list[int] | None:
        """Tokens that end a sequence; None if none are set."""
        found: list[Any] = [x for x in self.criteria if hasattr(x, "eos_token_id")]
        return [n for x in found for n in x.eos_token_id.flatten().tolist()] if found else None

    def pad_id(self) -> int | None:
        """The padding token: the one that is set, or else the first end token."""
        named: Any = self.config.pad_token_id
        if named is None:
            named = self.config.eos_token_id
        return None if named is None else int(torch.as_tensor(named).flatten()[0])

    def mask(self) -> Tensor | None:
        """(B, T), 0 at padding; None without padding."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None or bool((mask != 0).all()) else mask


def generate(model: FracForCausalLM, call: Call) -> Tensor | None:
    """Return the ids (B, T + new) of a call, or None if transformers' loop must run it.

    The choice and its reason are logged at level DEBUG.
    """
    reason = reason_of_model(model)
    if reason is not None:
        # The model may have moved to another device; free the memory of its Generator.
        KEPT.pop(model, None)
    settings = settings_of(call)
    if reason is None and torch.is_autocast_enabled(model.lm_head.weight.device.type):
        reason = "autocast is on"
    reason = reason or reason_of_call(call, settings)
    if reason is not None or settings is None:
        logger.debug("generate: transformers' loop, because %s", reason)
        return None
    with _MAKING:
        kept: _Kept = KEPT.setdefault(model, _Kept(type(model)))
    try:
        with kept.lend(model) as generator:
            if generator is None:
                logger.debug("generate: transformers' loop, because another call is running")
                return None
            logger.debug("generate: a Generator")
            return _run(generator, call, settings)
    except torch.OutOfMemoryError:
        KEPT.pop(model, None)
        if call.streamer is not None:
            raise
        logger.warning(
            "generate: not enough memory for a Generator, which reserves %d tokens per sequence; "
            "trying transformers' loop. cache_implementation='dynamic' selects it directly.",
            call.num_new,
        )
    return None


class _Kept:
    """A Generator for one model that does not keep the model alive.

    The Generator holds a stand-in of the same class, which has the model's attributes during a call
    and is empty between calls.
    """

    def __init__(self, kind: type[FracForCausalLM]) -> None:
        self._twin = object.__new__(kind)
        self._generator: Generator | None = None
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, model: FracForCausalLM) -> Iterator[Generator | None]:
        """Yield the Generator to one call at a time, and None to concurrent calls."""
        if not self._lock.acquire(blocking=False):
            yield None
            return
        vars(self._twin).update(vars(model))
        try:
            if self._generator is None:
                self._generator = Generator(self._twin)
            yield self._generator
        finally:
            vars(self._twin).clear()
            self._lock.release()


def reason_of_model(model: FracForCausalLM) -> str | None:
    """Why a Generator cannot run this model in its current state, or None if it can."""
    head = getattr(model.lm_head, "weight", None)
    if not isinstance(head, Tensor):
        return "lm_head has no weight"
    if model.training:
        return "the model is in training mode"
    if model.model.context_group is not None:
        return "the model splits sequences across ranks"
    if model.config.attention_layers and model.config._attn_implementation not in ATTENTION:
        return f"attn_implementation is {model.config._attn_implementation!r}"
    recorder = Recorder(model)
    recorder.look()
    if recorder.bindings is None:
        return f"the model cannot be recorded on {head.device} in its current state"
    if any(vars(x).get("_compiled_call_impl") is not None for x in model.modules()):
        return "a part of the model is compiled"
    return None


def reason_of_call(call: Call, settings: SamplingSettings | None) -> str | None:
    """Why a Generator cannot run a call, or None if it can."""
    ids = call.input_ids
    if torch.compiler.is_compiling() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    ):
        return "the call itself is being recorded"
    if call.synced_gpus:
        return "synced_gpus is set"
    if (field := unusual_field(call.config)) is not None:
        return f"of {field}"
    if settings is None:
        return f"of its logits processors {[type(x).__name__ for x in call.processors]}"
    if ids.ndim != 2 or ids.numel() == 0 or call.num_new < 1:
        return f"input_ids have shape {tuple(ids.shape)}, and the longest is {call.num_new} more"
    if call.end_ids() is not None and call.pad_id() is None:
        return "there is no pad_token_id"
    return _reason_of_inputs(call, settings)


def unusual_field(config: GenerationConfig) -> str | None:
    """The first field that is not in UNDERSTOOD and does not have its default."""
    defaults = {**vars(GenerationConfig()), **GenerationConfig._get_default_generation_params()}
    for name, value in vars(config).items():
        if name.startswith("_") or name in UNDERSTOOD or value is None:
            continue
        plain = isinstance(value, bool | int | float | str) and name in defaults
        # Some models' configurations have False where the default is None.
        if not plain or value != (defaults[name] or False):
            return f"{name}={value!r}"
    return None


def settings_of(call: Call) -> SamplingSettings | None:
    """Settings equivalent to a call's logits processors; None if there are none."""
    kinds = [type(x) for x in call.processors]
    if kinds != [kind for kind in PROCESSORS if kind in kinds]:
        return None
    drawn = bool(call.config.do_sample)
    if not drawn and not {*kinds} <= {RepetitionPenaltyLogitsProcessor}:
        return None
    values: dict[str, Any] = {"temperature": 1.0} if drawn else {}
    for processor in call.processors:
        if (
            getattr(processor, "filter_value", -math.inf) != -math.inf
            or getattr(processor, "min_tokens_to_keep", 1) != 1
            or getattr(processor, "prompt_ignore_length", None)
        ):
            return None
        ours, theirs = PROCESSORS[type(processor)]
        values[ours] = getattr(processor, theirs)
    try:
        return SamplingSettings(**values)
    except ValueError:
        # transformers allows values at the limits of ranges that we reject.
        return None


def _reason_of_inputs(call: Call, settings: SamplingSettings) -> str | None:
    given = {name for name, value in call.inputs.items() if value is not None}
    if not given <= INPUTS:
        return f"of {', '.join(sorted(given - INPUTS))}"
    cache = call.inputs.get("past_key_values")
    if not getattr(cache, "is_never_seen", False):
        return "past_key_values is the caller's"
    if call.inputs.get("logits_to_keep", 1) != 1:
        return "of logits_to_keep"
    mask = call.mask()
    if mask is not None:
        real = mask != 0
        if real.shape != call.input_ids.shape or not bool(real[:, -1].all()):
            return "attention_mask is not 1 at the last token of every prompt"
        if bool((real[:, :-1] & ~real[:, 1:]).any()):
            return "attention_mask has padding that is not on the left"
        if settings.repetition_penalty != 1:
            return "transformers also applies repetition_penalty to padding"
    # Raises the same error as the model.
    positions = call.inputs.get("position_ids")
    find_boundaries(None, positions, mask=mask, continues=True)
    return None


def _run(generator: Generator, call: Call, settings: SamplingSettings) -> Tensor:
    """Return the ids (B, T + new) from calls of the Generator."""
    device, mask = generator.model.lm_head.weight.device, call.mask()
    seed = 0
    if settings.temperature != 0:
        # As in transformers' loop, torch.manual_seed determines the samples.
        seed = int(torch.randint(MOST_SEEDS, (), device=device))
    options = {
        "input_ids": call.input_ids.to(device).long(),
        "attention_mask": None if mask is None else mask.to(device),
        "max_new_tokens": call.num_new,
        "sampling": settings,
        "seed": seed,
    }
    ends, pad = call.end_ids(), call.pad_id()
    if not _is_watched(call, ends, pad, generator.model.config.vocab_size):
        made = generator.generate(
            **options, eos_token_id=ends[0] if ends else None, pad_token_id=pad
        )
        new = made[:, call.input_ids.shape[1] :].to(call.input_ids.device)
        return torch.cat([call.input_ids, new], 1)
    return _watch(generator.stream(**options), call, pad if ends is not None else None)


def _is_watched(call: Call, ends: list[int] | None, pad: int | None, vocab_size: int) -> bool:
    """Whether each token needs checks that the Generator does not make itself."""
    if call.streamer is not None or len(ends or ()) > 1:
        return True
    kinds = [type(x) for x in call.criteria]
    plain = kinds in ([MaxLengthCriteria], [MaxLengthCriteria, EosTokenCriteria])
    # The Generator may read tokens after an end.
    return not plain or any(not 0 <= n < vocab_size for n in (*(ends or ()), pad or 0))


def _watch(tokens: Any, call: Call, pad: int | None) -> Tensor:
    """The ids (B, T + new) up to where the call's criteria end all sequences.

    Args:
        tokens: (B,) each, from a Generator's stream.
        pad: fills sequences that have ended; None lets them continue as long as others do.
    """
    ids = call.input_ids
    unfinished = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
    with closing(tokens):
        for token in tokens:
            token = token.to(ids.device)
            if pad is not None:
                token = torch.where(unfinished, token, pad)
            ids = torch.cat([ids, token[:, None]], 1)
            unfinished &= ~call.criteria(ids, None)  # pyright: ignore[reportArgumentType]
            if call.streamer is not None:
                call.streamer.put(token.cpu())
            if not bool(unfinished.any()):
                break
    if call.streamer is not None:
        call.streamer.end()
    return ids
