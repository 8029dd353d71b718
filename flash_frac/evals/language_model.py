"""An adapter from any Hugging Face causal language model to lm-evaluation-harness.

It is registered as "frac" when `flash_frac.evals` is imported. Unlike lm-eval's own "hf", it never
truncates silently, finds batch sizes differently, and generates with our engine for Frac models,
which serves all requests at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from flash_frac.beginning import beginning
from flash_frac.extras import require
from flash_frac.inference import Engine, Request
from flash_frac.inference.generation_settings import settings_of
from flash_frac.inference.sampling import SamplingSettings
from flash_frac.models import FracForCausalLM
from flash_frac.models.loading import find_checkpoint, load_model, reason_of

HFLM: Any = require("lm_eval.models.huggingface", "eval", "FracLM").HFLM
_harness: Any = require("lm_eval.models.utils", "eval", "FracLM")

# Prompt tokens that the engine prefills at a time.
PIECE = 8192
# Tokens per batch on a CPU, where running out of memory kills the process without an error.
CPU_TOKENS = 8192


class _Asked(NamedTuple):
    """A generation request.

    Attributes:
        text, options: lm-eval's prompt and options, the key under which it caches the answer.
        context: token ids of the text, truncated to fit.
        until: texts that end the answer.
        sampling: sampling settings; None if only `model.generate` supports them.
    """

    text: str
    options: dict[str, Any]
    context: list[int]
    until: list[str]
    max_new_tokens: int
    sampling: SamplingSettings | None


class FracLM(HFLM):
    """lm-eval's model of a checkpoint, which raises an error for requests that are too long.

    Frac models generate with an `Engine` of `batch_size` slots. Generation options that it lacks
    (such as beam search), and mixed precision, fall to `model.generate`, in batches.

    Args:
        pretrained: folder, hub id, or a model in memory (then with `tokenizer`).
        max_length: maximum number of tokens of context and answer.
        truncate: cut off the beginning of longer requests and count them in `num_truncated`;
            otherwise they are an error.
        device: by default a GPU if there is one.
        strict: refuse a checkpoint with missing, unexpected or non-finite tensors, where
            transformers only warns.
        quantize: "int8" or "fp8" for weights of 8 bits; needs `strict`.
        options: any other argument of lm-eval's HFLM, such as batch_size ("auto" finds one).

    Example:
        >>> import lm_eval, flash_frac.evals
        >>> lm_eval.simple_evaluate(model="frac", model_args="pretrained=DIR", tasks=["piqa"])
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        max_length: int | None = None,
        truncate: bool = False,
        device: str | None = None,
        strict: bool = False,
        quantize: str | None = None,
        **options: Any,
    ) -> None:
        if quantize is not None and not strict:
            raise ValueError(
                "quantize needs strict=True; else pass quantization_config, as lm-eval takes it"
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        options = {"backend": "causal"} | options
        self.strict, self.quantize = strict, quantize
        super().__init__(pretrained, max_length=max_length, device=device, **options)
        self.truncate = truncate
        self.num_truncated = self.tokens_read = 0
        self.model.eval()
        is_frac = isinstance(self.model, FracForCausalLM)
        self._has_engine = is_frac and self.mixed_precision_dtype is None

    def _get_config(self, pretrained: str, **options: Any) -> None:
        try:
            super()._get_config(pretrained, **options)
        except ValueError as error:
            raise ValueError(f"{pretrained} cannot be loaded: {reason_of(error)}") from error

    def _create_model(self, pretrained: str, **options: Any) -> None:
        if not self.strict:
            return super()._create_model(pretrained, **options)
        # One device only; lm-eval's other ways to load are for its direct callers.
        trusted = bool(options["trust_remote_code"])
        found = find_checkpoint(pretrained, revision=options["revision"], trust_remote_code=trusted)
        model = load_model(found, dtype=options["dtype"], quantize=self.quantize)
        self._model = model.to(self.device)

    def allow(self, max_length: int) -> None:
        """Set the maximum number of tokens per request, and reset the counts of tokens read
        (`tokens_read`, without padding and generated tokens) and of truncated requests."""
        self._max_length = max_length
        self.num_truncated = self.tokens_read = 0

    @property
    def prefix_token_id(self) -> int:
        """The token before a text whose first token is scored: the one with which the tokenizer
        starts a text or, if there is none, eos, which precedes a text in training."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        return (beginning(self.tokenizer) or [self.tokenizer.eos_token_id])[-1]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        # The prefix token already starts the text; a second bos token would be scored.
        asked, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = asked

    def _fit(self, lengths: Sequence[int], room: int) -> None:
        """Count the tokens; raise ValueError if a request is too long and `truncate` is off."""
        too_long = [length for length in lengths if length > room]
        if too_long and not self.truncate:
            raise ValueError(
                f"{len(too_long)} of {len(lengths)} requests have more tokens (up to "
                f"{max(too_long)}) than the {room} that max_length = {self.max_length} leaves: "
                "raise --max-length (max_length), or cut their beginnings with --truncate "
                "(truncate=True)"
            )
        self.num_truncated += len(too_long)
        self.tokens_read += sum(min(length, room) for length in lengths)

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
        answers = [len(answer) for _, _, answer in requests]
        if max(answers, default=0) > self.max_length:
            raise ValueError(
                f"an answer has {max(answers)} tokens, more than max_length = {self.max_length}, "
                "and answers are never truncated: raise --max-length (max_length)"
            )
        # The last token is predicted but never read.
        self._fit([len(c) + len(a) - 1 for _, c, a in requests], self.max_length)
        return super()._loglikelihood_tokens(requests, *args, **options)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        longest = 0
        for new in {_new_tokens(self, request) for request in requests}:
            same = [r.args[0] for r in requests if _new_tokens(self, r) == new]
            lengths = [len(self.tok_encode(text)) for text in same]
            self._fit(lengths, self.max_length - new)
            longest = max(longest, min(max(lengths) + new, self.max_length))
        if self._has_engine:
            asked = [self._asked(request) for request in requests]
            if all(each.sampling is not None for each in asked):
                return self._answer(asked, longest, disable_tqdm)
        size = self.batch_size_per_gpu
        if size == "auto":
            self.batch_size_per_gpu = self._generation_batch_size(longest, len(requests))
        try:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = size

    def _asked(self, request: Any) -> _Asked:
        text, given = request.args
        options = _harness.normalize_gen_kwargs(given, self.max_gen_toks)
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        until = _harness.handle_stop_sequences(options.pop("until", None), eos=eos)
        new = options.pop("max_gen_toks")
        context = self.tok_encode(text, left_truncate_len=self.max_length - new)
        sampling = self._sampling(options)
        return _Asked(text, given, context or [self.prefix_token_id], until, new, sampling)

    def _sampling(self, options: dict[str, Any]) -> SamplingSettings | None:
        """Sampling settings for options of `generate`; None if the engine does not support them."""
        config = copy.deepcopy(self.model.generation_config)
        if not options.get("do_sample"):
            options = {name: x for name, x in options.items() if name != "temperature"}
        try:
            known = "max_length" not in options and not config.update(**options)
            return settings_of(config).sampling if known else None
        except ValueError:
            return None

    def _answer(self, asked: Sequence[_Asked], longest: int, quiet: bool) -> list[str]:
        """Answer all requests with the engine, longest first: a lack of memory then shows early."""
        engine = self._engine(longest, len(asked))
        answers: list[list[int]] = [[] for _ in asked]
        bar = tqdm(total=len(asked), disable=quiet or self.rank != 0, desc="generate_until")
        ids, done = {}, [False] * len(asked)
        for n in sorted(range(len(asked)), key=lambda n: -len(asked[n].context)):
            ids[engine.submit(self._request(asked[n]))] = n

        while not all(done):
            for update in engine.step():
                if update.finished == "error":
                    raise RuntimeError(f"a request could not be answered: {update.error}")
                answers[ids[update.id]].extend(update.tokens)
                done[ids[update.id]] = update.finished is not None
                bar.update(update.finished is not None)
        bar.close()
        return [self._text(each, tokens) for each, tokens in zip(asked, answers, strict=True)]

    def _engine(self, longest: int, num_requests: int) -> Engine:
        """An engine for requests of up to `longest` tokens, with as many slots as memory allows."""
        auto = self.batch_size_per_gpu == "auto"
        most = self.max_batch_size if auto else int(self.batch_size_per_gpu)
        most = max(1, min(most, num_requests))

        def make(slots: int) -> Engine:
            return Engine(
                self.model,
                slots=slots,
                max_length=max(longest, 2),
                piece=PIECE,
                max_waiting=num_requests,
                tokenizer=self.tokenizer,
            )

        if not auto or self.device.type != "cuda":
            return make(_cpu_batch_size(longest, most) if auto else most)
        search = require("accelerate", "eval", "batch_size='auto'").find_executable_batch_size

        @search(starting_batch_size=most)
        def attempt(slots: int) -> Engine:
            engine = make(slots)
            list(engine.stream(Request(prompt=[1] * max(1, longest - 2), max_new_tokens=2)))
            return engine

        return attempt()

    def _request(self, asked: _Asked) -> Request:
        assert asked.sampling is not None
        # eos is a token id; as a stop string, it would have to be searched in the text.
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        draws = asked.sampling.temperature > 0
        return Request(
            prompt=asked.context,
            max_new_tokens=asked.max_new_tokens,
            sampling=asked.sampling,
            # lm-eval seeds torch, so these seeds are reproducible.
            seed=int(torch.randint(2**62, ())) if draws else 0,
            eos_token_ids=[self.eot_token_id],
            stop=[text for text in asked.until if text and text != eos],
        )

    def _text(self, asked: _Asked, tokens: list[int]) -> str:
        """The text of an answer, post-processed as lm-eval does it."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tok_decode(tokens)
        text = _harness.postprocess_generated_text(
            generation=text.lstrip() if isinstance(end, int) else text,
            stop=asked.until,
            think_end_token=end if isinstance(end, str) else None,
        )
        self.cache_hook.add_partial("generate_until", (asked.text, asked.options), text)
        return text

    def _generation_batch_size(self, length: int, num_requests: int) -> int:
        """The largest batch size for `model.generate` with prompts of this length."""
        most = max(1, min(self.max_batch_size, num_requests))
        if self.device.type != "cuda":
            return _cpu_batch_size(length, most)
        return self._try_batch_sizes(length, most)

    def _try_batch_sizes(self, length: int, most: int) -> int:
        """Try smaller batch sizes until memory suffices."""
        search = require("accelerate", "eval", "batch_size='auto'").find_executable_batch_size

        @search(starting_batch_size=most)
        def attempt(batch_size: int) -> int:
            ids = torch.ones(batch_size, max(1, length - 2), dtype=torch.long, device=self.device)
            mask = torch.ones_like(ids)
            self._model_generate(ids, ids.shape[1] + 2, [], attention_mask=mask)
            return batch_size

        return attempt()

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        if self.device.type == "cuda":
            return super()._detect_batch_size(requests, pos)
        length = self.max_length
        if requests:
            length = len(requests[pos][1]) + len(requests[pos][2])
        return _cpu_batch_size(length, self.max_batch_size)


def _new_tokens(lm: FracLM, request: Any) -> int:
    return _harness.normalize_gen_kwargs(request.args[1], lm.max_gen_toks)["max_gen_toks"]


def _cpu_batch_size(length: int, most: int) -> int:
    return max(1, min(most, CPU_TOKENS // max(length, 1)))
