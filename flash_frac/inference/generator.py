"""Fast generation: the prompt in one parallel pass, then tokens from a CUDA graph.

The kernels of a token are recorded once and replayed, and the chosen token goes from one replay to
the next without the host. Models that cannot be recorded (see `graphs.Recorder`), on a CPU for
instance, run the same calls one by one. Attention layers have their keys and values in buffers; a
graph reads the part that is in use, rounded up, and another is recorded where that ends.
Letters: B batch, T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_frac.inference.graphs import Recorder
from flash_frac.inference.sampling import GREEDY, SamplingSettings, choose
from flash_frac.inference.state import check_model, empty_cache, num_real, pieces, read_tokens
from flash_frac.inference.text import StopStrings
from flash_frac.models import FracForCausalLM

# The prompt is read in pieces of at most this many tokens, in memory that does not grow with it.
PIECE = 16384
# Longer pieces keep a GPU busy while the host prepares the next kernels, and need no graph.
LONGEST_RECORDED = 4096
# Tokens of an answer for which there is memory at first.
FIRST_TOKENS = 256
# How many replays pass between two looks at whether all sequences have ended.
LOOK_EVERY = 32


class Generator:
    """Generates with one model, keeping the state of one batch and the graphs recorded for it.

    A new batch size makes new states and graphs, and so does any change of the model but one of its
    weights in place. A length of prompt, up to LONGEST_RECORDED, is recorded when it comes up for
    the second time. Attention is torch's scaled_dot_product_attention or, for a token on a GPU,
    a kernel of ours, whatever the model's attn_implementation.

    Args:
        model: on any device, in eval mode.
        max_length: tokens of prompt and answer for which attention layers get buffers at once, and
            beyond which calls are refused. None: as many as a call needs, rounded up; a longer one
            later gets new buffers, and graphs are recorded again.

    Example:
        >>> generator = Generator(model)
        >>> ids = generator.generate(input_ids, max_new_tokens=100)
    """

    def __init__(self, model: FracForCausalLM, *, max_length: int | None = None) -> None:
        check_model(model)
        if model.training:
            raise ValueError("model must be in eval mode; call model.eval()")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be None or at least 1, got {max_length}")
        self.model, self.max_length = model, max_length
        self._recorder = Recorder(model)
        self._session: _Session | None = None

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Read prompts (B, T) from an empty state; logits (B, V) float32 of the token after each.

        Args:
            attention_mask: (B, T), 0 at padding, which goes to the left.
        """
        return self._read(input_ids, attention_mask, 0).logits.clone()

    def _read(self, ids: Tensor, mask: Tensor | None, num_new: int) -> _Session:
        """Read prompts (B, T) from an empty state, with room for this many tokens after them."""
        mask = _check_prompts(ids, mask)
        needed = ids.shape[1] + num_new
        if self.max_length is not None and needed > self.max_length:
            raise ValueError(
                f"max_length ({self.max_length}) must be at least {needed}, for prompts of "
                f"{ids.shape[1]} tokens and {num_new} after them; make the Generator with that, "
                "or None"
            )
        session = self._open(ids.shape[0])
        session.reset(needed)
        for piece in pieces(ids, mask, PIECE):
            session.read(*piece)
        return session

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        sampling: SamplingSettings = GREEDY,
        seed: int | None = None,
        stop: StopStrings | None = None,
    ) -> Tensor:
        """Continue prompts.

        Args:
            input_ids: (B, T), shorter prompts padded on the left.
            max_new_tokens: how many tokens to add at most.
            attention_mask: (B, T), 0 at padding; None if there is none.
            eos_token_id: ends a sequence; when all have ended, generation stops. None: never.
            pad_token_id: fills the rest of sequences that have ended; by default eos_token_id.
            sampling: how tokens are chosen; the most likely ones by default.
            seed: random seed for sampling; None for another one each time.
            stop: texts that end a sequence; padding follows them.

        Returns:
            (B, T + new) the prompts and what follows them.

        Example:
            >>> sampling = SamplingSettings(temperature=0.8, top_p=0.95)
            >>> generator.generate(ids, max_new_tokens=100, sampling=sampling, seed=0)
        """
        if stop is not None and eos_token_id is None and pad_token_id is None:
            pad_token_id = self.model.config.pad_token_id or 0
        session = self._begin(
            input_ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id, sampling, seed
        )
        ends = eos_token_id is not None or stop is not None
        every = LOOK_EVERY if stop is None else 1
        if stop is not None:
            session.end(stop.begin(session.token))
        for count in range(1, max_new_tokens):
            if ends and count % every == 0 and session.all_ended():
                break
            session.advance()
            if stop is not None:
                session.end(stop.add(session.token))
        new = session.chosen[:, : int(session.position)]
        if eos_token_id is not None and stop is None:
            # Up to the last end of a sequence: what was chosen between two looks is padding.
            found = new == eos_token_id
            lengths = torch.where(found.any(1), found.int().argmax(1) + 1, new.shape[1])
            new = new[:, : int(lengths.max())]
        return torch.cat([input_ids, new.to(input_ids.device)], 1)

    @torch.no_grad()
    def stream(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        sampling: SamplingSettings = GREEDY,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """The tokens (B,) of `generate` as they come. Another call on this generator ends it.

        Example: `for token in generator.stream(ids, max_new_tokens=100): print(token)`
        """
        session = self._begin(
            input_ids, max_new_tokens, attention_mask, eos_token_id, pad_token_id, sampling, seed
        )
        turn = session.turn
        for count in range(max_new_tokens):
            if session.turn != turn or session is not self._session:
                raise RuntimeError("the generator was used again while this stream was running")
            if count:
                session.advance()
            yield session.token[:, 0].clone()
            if eos_token_id is not None and session.all_ended():
                return

    def _begin(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        attention_mask: Tensor | None,
        eos: int | None,
        pad: int | None,
        sampling: SamplingSettings,
        seed: int | None,
    ) -> _Session:
        """Read the prompts and choose their first tokens."""
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        session = self._read(input_ids, attention_mask, max_new_tokens)
        session.begin(max_new_tokens, eos, pad, sampling, seed)
        if sampling.repetition_penalty != 1:
            session.mark_seen(input_ids, attention_mask)
        session.choose()
        return session

    def _open(self, batch: int) -> _Session:
        self._recorder.look()
        if self._session is None or not self._session.fits(batch):
            self._session = None
            # Tensors made in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self._session = _Session(self._recorder, batch, self.max_length)
        return self._session


def _check_prompts(ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask, or None if nothing is padding; ValueError if it does not fit."""
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"input_ids must have shape (B, T) and a token, got {tuple(ids.shape)}")
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have shape {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    if not bool((mask[:, -1] != 0).all()):
        raise ValueError(
            "attention_mask must be 1 at the last token of every prompt; pad on the left"
        )
    return None if bool((mask != 0).all()) else mask


class _Session:
    """The state of a batch, and what goes in and out of its graphs."""

    def __init__(self, recorder: Recorder, batch: int, max_length: int | None) -> None:
        self.recorder, self.model, self.batch = recorder, recorder.model, batch
        self.bindings = recorder.bindings
        head = self.model.lm_head.weight
        self.device = head.device
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        # Not by the head's new_zeros, which a quantised weight does not have.
        self.logits = torch.zeros(batch, head.shape[0], dtype=torch.float32, device=head.device)
        self.ended = torch.zeros(batch, 1, dtype=torch.bool, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.chosen = self.token.new_zeros(batch, FIRST_TOKENS)
        self.ends: tuple[int | None, int | None] = (None, None)
        self.sampling, self.turn = GREEDY, 0
        self.random = torch.Generator(self.device)
        self.seen = torch.zeros_like(self.logits, dtype=torch.bool)
        self.cache = empty_cache(self.model, batch)
        if max_length is not None:
            self.cache.reserve(max_length, size=max_length)
        self._bind()

    def fits(self, batch: int) -> bool:
        """Whether this memory still suits the model, which only a recorded one is known to do."""
        same = self.bindings is not None and self.bindings is self.recorder.bindings
        return same and self.batch == batch

    def _bind(self) -> None:
        # All tensors of a session live as long as its cache; the list of chosen ones may grow.
        self.recorder.bind(self.cache, self.chosen, self.cache.full)

    def reset(self, num_tokens: int) -> None:
        """Begin with an empty state, and room for this many tokens."""
        self.cache.clear()
        if self.cache.reserve(num_tokens):
            self._bind()
        self.turn += 1

    def read(self, *inputs: Tensor) -> None:
        """Take ids (B, T), and a mask, into the state; keep the logits after the last."""
        length = inputs[0].shape[1]
        if length > LONGEST_RECORDED:
            self._forward(*inputs)
        else:
            kind = ("prompt", self.batch, length, len(inputs), self.cache.signature(length))
            self.recorder.run(kind, self._forward, inputs)
        self.cache.took(num_real(*inputs))

    def begin(
        self,
        num_tokens: int,
        eos: int | None,
        pad: int | None,
        sampling: SamplingSettings,
        seed: int | None,
    ) -> None:
        """Make ready for a generation: the tokens chosen go to `chosen`, which holds as many."""
        self.ends, self.sampling = (eos, pad), sampling
        if self.chosen.shape[1] < num_tokens:
            # Powers of two, because graphs are recorded again when it grows.
            with torch.inference_mode(False):
                size = 1 << (num_tokens - 1).bit_length()
                self.chosen = self.token.new_zeros(self.batch, size)
            self._bind()
        if seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(seed)
        self.ended.zero_()
        self.position.zero_()
        self.seen.zero_()

    def mark_seen(self, ids: Tensor, mask: Tensor | None) -> None:
        """Let the repetition penalty apply to the tokens (B, T) of the prompts."""
        real = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
        counts = torch.zeros_like(self.seen, dtype=torch.long)
        counts.scatter_add_(1, ids.to(self.device), real.to(self.device))
        self.seen.copy_(counts > 0)

    def end(self, ended: Tensor) -> None:
        """End the sequences where `ended` (B,) is True."""
        self.ended.logical_or_(ended.to(self.device)[:, None])

    def advance(self) -> None:
        """One more token."""
        # A graph holds the values of the settings.
        kind = ("token", self.batch, self.ends, self.sampling, self.cache.signature(1))
        self.recorder.run(kind, self._step, random=self.random)
        self.cache.took([1] * self.batch)

    def all_ended(self) -> bool:
        return bool(self.ended.all())

    def _forward(self, ids: Tensor, mask: Tensor | None = None) -> None:
        self.logits.copy_(read_tokens(self.model, self.cache, ids, mask))

    def _step(self) -> None:
        self._forward(self.token)
        self.choose()

    def choose(self) -> None:
        """The next token, from the logits to the list of chosen ones and to the model's input."""
        token = choose(self.logits, self.sampling, seen=self.seen, generator=self.random)[:, None]
        eos, pad = self.ends
        filler = eos if pad is None else pad
        if filler is not None:
            token = torch.where(self.ended, filler, token)
        if eos is not None:
            self.ended.logical_or_(token == eos)
        if self.sampling.repetition_penalty != 1:
            self.seen.scatter_(1, token, True)
        self.token.copy_(token)
        self.chosen.index_copy_(1, self.position, token)
        self.position += 1
