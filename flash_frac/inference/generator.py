"""Batch generation: all sequences start together and decode step by step.

It shares the engine's rows and decode step (`slots.Slots`): one CUDA graph for each number of rows,
sampling settings in tensors, and on a GPU, tokens that are copied while the next step runs. Because
the batch is fixed, prompts are read in the slots themselves, in one parallel pass. Models that
cannot be recorded (see `graphs.Recorder`), such as those on a CPU, run the same calls without
graphs.
Letters: B batch, T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_frac.inference.graphs import Recorder
from flash_frac.inference.sampling import GREEDY, SamplingSettings, no_numbers
from flash_frac.inference.slots import LONGEST_RECORDED, Sent, Slots
from flash_frac.inference.state import check_model, empty_cache, num_real, pieces
from flash_frac.inference.text import StopStrings
from flash_frac.layers.checks import check_mask
from flash_frac.models import FracForCausalLM
from flash_frac.models.buffers import rounded

Eos: TypeAlias = int | Sequence[int] | None
# The prompt is read in pieces of at most this many tokens, so memory does not grow with its length.
PIECE = 16384


class Generator:
    """Generates with one model; keeps the slots and CUDA graphs of the last batch size.

    A new batch size needs new slots and graphs, and so does any change of the model other than
    in-place weight updates. A prompt length up to LONGEST_RECORDED is recorded when it occurs for
    the second time. Attention uses torch's scaled_dot_product_attention or, for one token on a GPU,
    our own kernel, whatever the model's attn_implementation.

    Args:
        model: on any device, in eval mode.
        max_length: maximum tokens of prompt and answer; the KV cache is allocated for this length
            once, and longer calls raise an error. None allocates what a call needs, rounded up; a
            longer call reallocates, and graphs are recorded again.
        late: copy tokens to the host one step late, while the device computes the next; None means
            only on GPUs.

    Example:
        >>> generator = Generator(model)
        >>> ids = generator.generate(input_ids, max_new_tokens=100)
    """

    def __init__(
        self,
        model: FracForCausalLM,
        *,
        max_length: int | None = None,
        late: bool | None = None,
    ) -> None:
        check_model(model)
        if model.training:
            raise ValueError("model must be in eval mode; call model.eval()")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be None or at least 1, got {max_length}")
        self.model, self.max_length, self.late = model, max_length, late
        self._sees_all = "attention" in (model.config.mixer_types or ())
        self._recorder = Recorder(model)
        self._slots: Slots | None = None
        # The model's recording when the slots were built, and the number of the call.
        self._bindings: object = None
        self._turn = 0

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Read prompts (B, T) from an empty state; return float32 logits (B, V) of the next token.

        Args:
            attention_mask: (B, T), 0 at padding, which must be on the left.
        """
        return self._read(input_ids, attention_mask, 0).logits.clone()

    def _read(self, ids: Tensor, mask: Tensor | None, num_new: int) -> Slots:
        """Read prompts (B, T) from an empty state, with room for `num_new` more tokens."""
        mask = _check_prompts(ids, mask)
        needed = ids.shape[1] + num_new
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(
                f"max_length ({self.max_length}) must be at least {needed}, for prompts of "
                f"{ids.shape[1]} tokens and {num_new} new ones; build the Generator with that, "
                "or None"
            )
        self._turn += 1
        slots = self._open(ids.shape[0], needed)
        slots.clear()
        counts = [0] * slots.num_rows
        for piece in pieces(ids, mask, PIECE):
            self._read_piece(slots, counts, piece)
            counts = [n + new for n, new in zip(counts, num_real(*piece), strict=True)]
        return slots

    def _open(self, batch: int, num_tokens: int) -> Slots:
        """Slots for a batch; reuse the last ones if they fit it and the model is unchanged."""
        self._recorder.look()
        bindings, slots = self._recorder.bindings, self._slots
        # Only a recorded model can be checked for changes.
        same = bindings is not None and bindings is self._bindings
        enough = slots is not None and (slots.size >= num_tokens or not self._sees_all)
        if slots is not None and same and enough and slots.num_rows == batch:
            return slots
        self._slots = slots = None
        # Free the old slots before allocating new ones.
        self._recorder.bind()
        size = self.max_length or rounded(num_tokens)
        slots = Slots(self.model, empty_cache(self.model, 1), batch, size)
        self._recorder.bind(slots)
        self._slots, self._bindings = slots, bindings
        return slots

    def _read_piece(self, slots: Slots, counts: list[int], inputs: tuple[Tensor, ...]) -> None:
        """Read ids (B, T), and a mask if any, after `counts` tokens, with or without a graph."""
        length, read = inputs[0].shape[1], partial(slots.read, None, counts)
        if length > LONGEST_RECORDED:
            read(*inputs)
            return
        kind = ("prompt", len(counts), length, len(inputs), slots.signature(counts, length))
        self._recorder.run(kind, read, inputs)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        eos_token_id: Eos = None,
        pad_token_id: int | None = None,
        sampling: SamplingSettings = GREEDY,
        seed: int | None = None,
        stop: StopStrings | None = None,
    ) -> Tensor:
        """Continue prompts.

        Args:
            input_ids: (B, T), shorter prompts padded on the left.
            max_new_tokens: maximum number of tokens to add.
            attention_mask: (B, T), 0 at padding; None without padding.
            eos_token_id: one or several tokens that end a sequence; generation stops when all have
                ended. None: never.
            pad_token_id: fills sequences that have ended; by default the first eos_token_id.
            sampling: sampling settings; greedy by default.
            seed: random seed for sampling; None for a new one each time. Each sequence samples
                independently, by seed and row; the first samples like an engine's
                `Request(seed=seed)`.
            stop: texts that end a sequence; padding follows them.

        Returns:
            (B, T + new) the prompts and their continuations.

        Raises:
            RuntimeError: the logits of a sequence are not finite (NaN or infinite).

        Example:
            >>> sampling = SamplingSettings(temperature=0.8, top_p=0.95)
            >>> generator.generate(ids, max_new_tokens=100, sampling=sampling, seed=0)
        """
        if stop is not None and not isinstance(stop, StopStrings):
            raise ValueError(f"stop must be StopStrings(tokenizer, texts), got {stop!r}")
        if stop is not None and pad_token_id is None and not _token_ids(eos_token_id):
            pad_token_id = self.model.config.pad_token_id or 0
        slots = self._begin(input_ids, max_new_tokens, attention_mask, sampling, seed)
        ends = _Ends(slots.num_rows, eos_token_id, pad_token_id, stop)
        columns = []
        for chosen in self._chosen(slots, max_new_tokens):
            columns.append(ends.take(chosen))
            if all(ends.ended):
                break
        new = torch.tensor(columns, dtype=input_ids.dtype).T
        return torch.cat([input_ids, new.to(input_ids.device)], 1)

    @torch.no_grad()
    def stream(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        eos_token_id: Eos = None,
        pad_token_id: int | None = None,
        sampling: SamplingSettings = GREEDY,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield the tokens (B,) of `generate` as they come. Another call on this generator ends it.

        On a GPU, a token is yielded while the next one is being computed.

        Example: `for token in generator.stream(ids, max_new_tokens=100): print(token)`
        """
        slots = self._begin(input_ids, max_new_tokens, attention_mask, sampling, seed)
        ends = _Ends(slots.num_rows, eos_token_id, pad_token_id, None)
        for chosen in self._chosen(slots, max_new_tokens):
            yield torch.tensor(ends.take(chosen), device=slots.device)
            if all(ends.ended):
                return

    def _begin(
        self,
        ids: Tensor,
        max_new_tokens: int,
        mask: Tensor | None,
        sampling: SamplingSettings,
        seed: int | None,
    ) -> Slots:
        """Read the prompts, and set up sampling for their sequences."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        slots = self._read(ids, mask, max_new_tokens)
        slots.settings.set_all(sampling, seed)
        if sampling.repetition_penalty != 1:
            slots.mark_seen(ids, mask)
        return slots

    def _chosen(self, slots: Slots, num_steps: int) -> Iterator[list[int]]:
        """Yield the tokens (B,) of each step; if late, while the next step runs."""
        num, turn = slots.num_rows, self._turn
        late = slots.device.type == "cuda" if self.late is None else self.late
        ahead: Sent | None = None
        for step in range(num_steps):
            if self._turn != turn:
                raise RuntimeError("the generator was used again while this stream was running")
            due = ahead or (self._advance(slots) if step else Sent(slots.choose(num)))
            ahead = self._advance(slots) if late and step + 1 < num_steps else None
            yield due.get()[0].tolist()

    def _advance(self, slots: Slots) -> Sent:
        num = slots.num_rows
        chosen = self._recorder.run(("step", num), partial(slots.advance, num))
        assert chosen is not None
        return Sent(chosen)


def _check_prompts(ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the mask, or None without padding; raise a ValueError if it does not fit."""
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"input_ids must have shape (B, T) with T ≥ 1, got {tuple(ids.shape)}")
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    check_mask(mask)
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "attention_mask must be 1 at the last token of every prompt; pad on the left"
        )
    return None if bool((mask != 0).all()) else mask


def _token_ids(eos: Eos) -> list[int]:
    """Whole numbers of Python, from one or several of any library."""
    given: Any = eos
    if hasattr(given, "tolist"):
        given = given.tolist()
    if given is None:
        return []
    try:
        given = [*given] if isinstance(given, Iterable) else [given]
        if not any(isinstance(id, bool) for id in given):
            return [operator.index(id) for id in given]
    except TypeError:
        pass
    raise ValueError(f"eos_token_id must be a token id, a list of them or None, got {eos!r}")


class _Ends:
    """Which sequences have ended.

    Args:
        batch: B.
        eos, pad, stop: as in `Generator.generate`.
    """

    def __init__(self, batch: int, eos: Eos, pad: int | None, stop: StopStrings | None) -> None:
        self.ended = [False] * batch
        ids = _token_ids(eos)
        self._eos, self._stop = frozenset(ids), stop
        self._filler = next(iter(ids), None) if pad is None else pad
        if stop is not None:
            stop.watch(batch)

    def take(self, chosen: list[int]) -> list[int]:
        """The next tokens (B,), with padding for sequences that have ended."""
        return [self._take_one(row, token) for row, token in enumerate(chosen)]

    def _take_one(self, row: int, token: int) -> int:
        if self.ended[row]:
            assert self._filler is not None
            return self._filler
        if token < 0:
            raise no_numbers(row)
        if token in self._eos or (self._stop is not None and self._stop.ends(row, token)):
            self.ended[row] = True
        return token
