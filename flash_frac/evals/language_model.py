"""Any causal language model of Hugging Face, as lm-evaluation-harness wants it.

Registered as "frac" when `flash_frac.evals` is imported. It differs from lm-eval's own "hf" in that
nothing is cut off in silence, in how a batch size is found, and in that Frac models generate by
`flash_frac.inference`, which needs a memory that does not grow with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_frac.beginning import beginning
from flash_frac.extras import require
from flash_frac.inference import Generator, StopStrings
from flash_frac.models import FracForCausalLM
from flash_frac.models.loading import find_checkpoint, load_model, reason_of

HFLM: Any = require("lm_eval.models.huggingface", "eval", "FracLM").HFLM

# Tokens of a batch on a CPU, where too many end the process instead of raising an error.
CPU_TOKENS = 8192


class FracLM(HFLM):
    """lm-eval's model of a checkpoint, with requests that are too long an error.

    Args:
        pretrained: folder, hub id, or a model in memory (then with `tokenizer`).
        max_length: tokens of context and answer that the model is given at most.
        truncate: cut the beginning off requests that are longer, and count them in
            `num_truncated`, where otherwise they are an error.
        device: a GPU if there is one, by default.
        strict: refuse a checkpoint with missing, unexpected or non-finite tensors, where
            transformers warns.
        options: any other argument of lm-eval's HFLM, such as batch_size ("auto" searches one).

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
        **options: Any,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        options = {"backend": "causal"} | options
        self.strict = strict
        super().__init__(pretrained, max_length=max_length, device=device, **options)
        self.truncate = truncate
        self.num_truncated = self.tokens_read = 0
        is_frac = isinstance(self.model, FracForCausalLM)
        self._generator = Generator(self.model.eval()) if is_frac else None

    def _get_config(self, pretrained: str, **options: Any) -> None:
        try:
            super()._get_config(pretrained, **options)
        except ValueError as error:
            raise ValueError(f"{pretrained} cannot be loaded: {reason_of(error)}") from error

    def _create_model(self, pretrained: str, **options: Any) -> None:
        if not self.strict:
            return super()._create_model(pretrained, **options)
        # One device; lm-eval's other ways to load are for those who call it themselves.
        trusted = bool(options["trust_remote_code"])
        found = find_checkpoint(pretrained, trust_remote_code=trusted)
        self._model = load_model(found, dtype=options["dtype"]).to(self.device)

    def allow(self, max_length: int) -> None:
        """Give the model so many tokens at most from now on, and count from zero what it reads
        (`tokens_read`, without padding and what it generates) and what is cut."""
        self._max_length = max_length
        self.num_truncated = self.tokens_read = 0

    @property
    def prefix_token_id(self) -> int:
        """The token before a text whose first token is scored: what the tokenizer begins texts with
        or, if that is nothing, eos, which ended the text before in training."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        return (beginning(self.tokenizer) or [self.tokenizer.eos_token_id])[-1]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        # The prefix is the beginning; the tokenizer would add another, to be scored.
        asked, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = asked

    def _fit(self, lengths: Sequence[int], room: int) -> None:
        """ValueError if a request has more tokens than there is room for, unless cuts are asked."""
        too_long = [length for length in lengths if length > room]
        if too_long and not self.truncate:
            raise ValueError(
                f"{len(too_long)} of {len(lengths)} requests have more tokens than the {room} that "
                f"max_length = {self.max_length} leaves them, up to {max(too_long)}: raise "
                "--max-length (max_length), or cut their beginnings by --truncate (truncate=True)"
            )
        self.num_truncated += len(too_long)
        self.tokens_read += sum(min(length, room) for length in lengths)

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **options: Any) -> Any:
        answers = [len(answer) for _, _, answer in requests]
        if max(answers, default=0) > self.max_length:
            raise ValueError(
                f"an answer has {max(answers)} tokens, more than max_length = {self.max_length}, "
                "and answers are not cut: raise --max-length (max_length)"
            )
        # The last token is predicted, but never read.
        self._fit([len(c) + len(a) - 1 for _, c, a in requests], self.max_length)
        return super()._loglikelihood_tokens(requests, *args, **options)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        longest = 0
        for new in {_new_tokens(self, request) for request in requests}:
            same = [r.args[0] for r in requests if _new_tokens(self, r) == new]
            lengths = [len(self.tok_encode(text)) for text in same]
            self._fit(lengths, self.max_length - new)
            longest = max(longest, min(max(lengths) + new, self.max_length))
        asked = self.batch_size_per_gpu
        if asked == "auto":
            self.batch_size_per_gpu = self._generation_batch_size(longest, len(requests))
        try:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = asked

    def _generation_batch_size(self, length: int, num_requests: int) -> int:
        """The largest batch, of at most so many, whose prompts of this length can be read."""
        most = max(1, min(self.max_batch_size, num_requests))
        if self.device.type != "cuda":
            return _cpu_batch_size(length, most)
        return self._try_batch_sizes(length, most)

    def _try_batch_sizes(self, length: int, most: int) -> int:
        """By trial: fewer rows, as long as the memory does not suffice."""
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

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Tensor:
        if self._generator is None or options.get("do_sample"):
            return super()._model_generate(context, max_length, stop, **options)
        # The end of a text is a token of its own; as a string it would have to be looked for.
        eos = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        texts = [text for text in stop if text != eos]
        return self._generator.generate(
            context,
            max_new_tokens=max_length - context.shape[1],
            attention_mask=options.get("attention_mask"),
            eos_token_id=self.eot_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
            stop=StopStrings(self.tokenizer, texts) if texts else None,
        )


def _new_tokens(lm: FracLM, request: Any) -> int:
    return request.args[1].get("max_gen_toks", lm.max_gen_toks)


def _cpu_batch_size(length: int, most: int) -> int:
    return max(1, min(most, CPU_TOKENS // max(length, 1)))
