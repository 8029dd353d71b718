"""Fast generation: the prompt in one parallel pass, then tokens from a CUDA graph.

The state of a Frac model has a fixed size, so that a token costs the same kernels at the same
addresses whatever came before. They are recorded once and replayed, and the chosen token goes from
one replay to the next without the host. On a CPU the same calls run one by one, and so they do for
hybrid models, whose keys and values grow with every token.
Letters: B batch, T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flash_frac.inference.sampling import GREEDY, SamplingSettings, choose
from flash_frac.inference.text import StopStrings
from flash_frac.models import FracCache, FracForCausalLM

# The prompt is taken in pieces of at most so many tokens, in memory that does not grow with it.
PIECE = 16384
# Longer pieces keep a GPU busy while the host prepares the next kernels, and need no graph.
LONGEST_RECORDED = 4096
# Of so many lengths the graphs are kept; then the one recorded first goes.
MOST_RECORDED = 32
# How many replays pass between two looks at whether all sequences have ended.
LOOK_EVERY = 32


class Generator:
    """Generates with one model, keeping the state of one batch and the graphs recorded for it.

    A new batch size makes new states and graphs; so does moving or casting the model. A length of
    prompt, up to LONGEST_RECORDED, is recorded when it comes up for the second time.

    Args:
        model: on any device, in eval mode.

    Example:
        >>> generator = Generator(model)
        >>> ids = generator.generate(input_ids, max_new_tokens=100)
    """

    def __init__(self, model: FracForCausalLM) -> None:
        if model.training:
            raise ValueError("model must be in eval mode; call model.eval()")
        self.model = model
        self._session: _Session | None = None

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Read prompts (B, T) from an empty state; logits (B, V) float32 of the token after each.

        Args:
            attention_mask: (B, T), 0 at padding, which goes to the left.
        """
        if input_ids.ndim != 2 or input_ids.numel() == 0:
            raise ValueError(
                f"input_ids must have shape (B, T) and a token, got {tuple(input_ids.shape)}"
            )
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise ValueError(
                    f"attention_mask must have shape {tuple(input_ids.shape)}, "
                    f"got {tuple(attention_mask.shape)}"
                )
            if not bool((attention_mask[:, -1] != 0).all()):
                raise ValueError(
                    "attention_mask must be 1 at the last token of every prompt; pad on the left"
                )
            if bool((attention_mask != 0).all()):
                attention_mask = None
        session = self._open(input_ids.shape[0])
        session.reset()
        for start in range(0, input_ids.shape[1], PIECE):
            piece = slice(start, start + PIECE)
            mask = None if attention_mask is None else attention_mask[:, piece]
            session.read(input_ids[:, piece], mask)
        return session.logits.clone()

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
            seed: of the draws; None draws others each time.
            stop: texts that end a sequence behind them; what follows is padding.

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
        new = session.chosen[:, : session.num_chosen()]
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
        self.prefill(input_ids, attention_mask)
        session = self._session
        assert session is not None
        session.begin(max_new_tokens, eos, pad, sampling, seed)
        if sampling.repetition_penalty != 1:
            session.mark_seen(input_ids, attention_mask)
        session.choose_first()
        return session

    def _open(self, batch: int) -> _Session:
        if self._session is None or not self._session.fits(self.model, batch):
            self._session = None
            self._session = _Session(self.model, batch)
        return self._session


class _Session:
    """The state of a batch, what goes in and out of its graphs, and the graphs."""

    def __init__(self, model: FracForCausalLM, batch: int) -> None:
        weight = model.lm_head.weight
        self.model, self.batch, self.place = model, batch, (weight.data_ptr(), weight.dtype)
        self.device = weight.device
        self.records = self.device.type == "cuda" and not model.config.attention_layers
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.logits = weight.new_zeros(batch, weight.shape[0], dtype=torch.float32)
        self.ended = torch.zeros(batch, 1, dtype=torch.bool, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.chosen = self.token.new_zeros(batch, 0)
        self.ids: tuple[int | None, int | None] = (None, None)
        self.sampling, self.turn = GREEDY, 0
        self.random = torch.Generator(self.device)
        self.seen_tokens = torch.zeros_like(self.logits, dtype=torch.bool)
        self.graphs: dict[Any, Any] = {}
        self.seen: set[Any] = set()
        self.pool = torch.cuda.graph_pool_handle() if self.records else None
        self.cache = FracCache(model.config)
        # Makes the tensors of the cache.
        self.model.model(self.token, past_key_values=self.cache, use_cache=True)

    def fits(self, model: FracForCausalLM, batch: int) -> bool:
        weight = model.lm_head.weight
        return self.batch == batch and self.place == (weight.data_ptr(), weight.dtype)

    def reset(self) -> None:
        """An empty state is one of zeros, in the recurrence as in the convolution's window."""
        torch._foreach_zero_(self.cache.tensors())  # pyright: ignore[reportPrivateImportUsage]
        self.cache.forget()
        self.turn += 1

    def read(self, ids: Tensor, mask: Tensor | None) -> None:
        """Take tokens (B, T) into the state, and leave the logits after the last one."""
        key = (ids.shape[1], mask is not None)
        inputs = [x.to(self.device) for x in (ids, mask) if x is not None]
        # Recording costs about as much as running: not for a length that never comes back.
        short = ids.shape[1] <= LONGEST_RECORDED
        if self.records and short and key in self.seen:
            self._replay(key, self._forward, inputs)
        else:
            self._forward(*inputs)
        self.seen.add(key)

    def begin(
        self,
        num_tokens: int,
        eos: int | None,
        pad: int | None,
        sampling: SamplingSettings,
        seed: int | None,
    ) -> None:
        """Make ready for a generation: the tokens chosen go to `chosen` (B, num_tokens)."""
        if self.chosen.shape[1] < num_tokens or self.ids != (eos, pad) or self.sampling != sampling:
            # Graphs hold the address of the one and the values of the others.
            self.graphs.pop("step", None)
            self.chosen = self.token.new_zeros(self.batch, num_tokens)
            self.ids, self.sampling = (eos, pad), sampling
        if seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(seed)
        self.ended.zero_()
        self.position.zero_()
        self.seen_tokens.zero_()

    def mark_seen(self, ids: Tensor, mask: Tensor | None) -> None:
        """Let the repetition penalty apply to the tokens (B, T) of the prompts."""
        real = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
        counts = torch.zeros_like(self.seen_tokens, dtype=torch.long)
        counts.scatter_add_(1, ids.to(self.device), real.to(self.device))
        self.seen_tokens.copy_(counts > 0)

    def choose_first(self) -> None:
        self._choose()

    def end(self, ended: Tensor) -> None:
        """End the sequences where `ended` (B,) is True."""
        self.ended.logical_or_(ended.to(self.device)[:, None])

    def advance(self) -> None:
        """One more token."""
        if self.records:
            self._replay("step", self._step, [])
        else:
            self._step()

    def all_ended(self) -> bool:
        return bool(self.ended.all())

    def num_chosen(self) -> int:
        return int(self.position)

    def _forward(self, ids: Tensor, mask: Tensor | None = None) -> None:
        output = self.model(
            ids,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits.copy_(output.logits[:, -1])

    def _step(self) -> None:
        self._forward(self.token)
        self._choose()

    def _choose(self) -> None:
        """The next token, from the logits to the list of chosen ones and to the model's input."""
        token = choose(
            self.logits, self.sampling, seen=self.seen_tokens, generator=self.random
        ).unsqueeze(1)
        eos, pad = self.ids
        filler = eos if pad is None else pad
        if filler is not None:
            token = torch.where(self.ended, filler, token)
        if eos is not None:
            self.ended.logical_or_(token == eos)
        if self.sampling.repetition_penalty != 1:
            self.seen_tokens.scatter_(1, token, True)
        self.token.copy_(token)
        self.chosen.index_copy_(1, self.position, token)
        self.position += 1

    def _replay(self, key: Any, function: Callable[..., None], inputs: list[Tensor]) -> None:
        if key not in self.graphs:
            if len(self.graphs) > MOST_RECORDED:
                del self.graphs[next(k for k in self.graphs if k != "step")]
            static = [x.clone() for x in inputs]
            self.graphs[key] = (self._record(function, static), static)
        graph, static = self.graphs[key]
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        graph.replay()

    def _record(self, function: Callable[..., None], inputs: list[Tensor]) -> torch.cuda.CUDAGraph:
        """Run a function once, so that nothing is compiled meanwhile, and record it."""
        kept, random = [x.clone() for x in self._written()], self.random.get_state()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        # Replays then draw on from where the numbers are.
        graph.register_generator_state(self.random)
        with torch.cuda.device(self.device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # One pool for all: what a replay leaves is outside it, in the session's own tensors.
            with torch.cuda.graph(graph, pool=self.pool, stream=stream):
                function(*inputs)
        for x, before in zip(self._written(), kept, strict=True):
            x.copy_(before)
        self.random.set_state(random)
        return graph

    def _written(self) -> list[Tensor]:
        return [
            *self.cache.tensors(),
            self.token,
            self.logits,
            self.ended,
            self.position,
            self.chosen,
            self.seen_tokens,
        ]
