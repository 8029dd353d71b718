"""Streams: the entire past of one or more sequences as an object of fixed size.

A Frac model keeps what it has read in a recurrent state and a convolution window per layer. A
`FracStream` holds them with the logits of the next token. You can feed it, generate from it, copy
it, roll it back, advance it in time and save it, at a cost independent of the tokens read so far.

A stream shares the engine's cache, recorder, reading and sampling code, so a seed gives the same
samples as in an engine. It does not use `Slots`, for three reasons. Its logits may be changed
before a token is chosen, whereas a slot's step chooses in the graph. A failed step must leave no
trace, so it writes to a second copy of the state. The KV cache grows, and marks share it.
Letters: B sequences, T time, V vocabulary, H heads, M modes, D head channels, I = H D, K taps.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flash_frac.inference.graphs import Recorder
from flash_frac.inference.sampling import SamplingSettings, SlotSettings, choose_each, no_numbers
from flash_frac.inference.state import (
    StreamMark,
    check_model,
    empty_cache,
    find_mark,
    let_pass,
    padding_mask,
    read_one,
    read_pieces,
    states_of,
)
from flash_frac.inference.storage import read_mark, write_mark
from flash_frac.inference.text import (
    Inputs,
    StopStrings,
    TextTail,
    end_ids,
    skip_each,
    take_each,
    text_decoder,
    to_ids,
)
from flash_frac.layers import MixerState
from flash_frac.models import FracForCausalLM
from flash_frac.models.buffers import BufferedCache


class FracStream:
    """Read and generate B sequences piece by piece, with a state to save, fork and roll back.

    A call that fails or is interrupted leaves the stream unchanged: it works on a second copy of
    the state, which replaces the first when the call succeeds.

    Args:
        model: on any device; calls run in eval mode and restore its mode afterwards.
        tokenizer: for text input and output; without one, a stream reads and yields ids.
        batch_size: B.

    Example:
        >>> stream = FracStream(model, tokenizer).feed(book)
        >>> for text in stream.generate(max_new_tokens=100):
        ...     print(text, end="")
        >>> stream.save("book.stream")
    """

    def __init__(
        self,
        model: FracForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 1,
    ) -> None:
        check_model(model)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        head = model.lm_head.weight
        seen = torch.zeros(batch_size, head.shape[0], dtype=torch.bool, device=head.device)
        tails = () if tokenizer is None else (TextTail(),) * batch_size
        cache = empty_cache(model, batch_size)
        self._set(StreamMark(cache, None, seen, (0,) * batch_size, tails), model, tokenizer)

    def _set(self, now: StreamMark, model: FracForCausalLM, tokenizer: Any) -> None:
        self.model, self.tokenizer, self._now = model, tokenizer, now
        self._spare: BufferedCache | None = None
        self._marks: list[StreamMark] = []
        self._recorder = Recorder(model)
        self._decode = None if tokenizer is None else text_decoder(tokenizer)

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self._now.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence."""
        return self._now.lengths

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(self._now.lengths)

    @property
    def logits(self) -> Tensor | None:
        """(B, V) float32 of the next token; None before the first one and after `advance`."""
        return self._now.logits

    @property
    def state(self) -> list[MixerState]:
        """States of frac and delta layers; clone them, because the next call overwrites them."""
        return states_of(self._now.cache)

    @property
    def nbytes(self) -> int:
        """Bytes of the state. The stream holds it twice, and once more for each mark.

        The KV cache of attention layers, which grows with every token, is held once.
        """
        return self._now.cache.nbytes

    def feed(self, inputs: Inputs) -> FracStream:
        """Read more tokens; the result does not depend on how a sequence is split into calls.

        Text is tokenized separately for each call. The first text of a sequence starts as the
        tokenizer starts a text, with or without a bos token (docs/training.md); ids are read as is.

        Args:
            inputs: a text, a list of ids or a tensor (T,); for B > 1 a list of B texts or of B
                lists, which may differ in length, or a tensor (B, T).
        """
        ids, counts = to_ids(
            inputs,
            lengths=self.lengths,
            vocab_size=self.model.config.vocab_size,
            tokenizer=self.tokenizer,
        )
        if ids.shape[1] == 0:
            return self
        if min(counts) == 0 and self.logits is None:
            raise ValueError(
                f"inputs must hold tokens for every sequence, got {counts} of them, because the "
                "logits of the next token are unknown; feed a token to each first"
            )
        tails = self._now.tails
        if self._decode is not None:
            tails = skip_each(tails, ids, counts, self._decode)
        self._recorder.look()
        self._read(ids, counts, tails)
        return self

    def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        eos: bool | int | Sequence[int] = True,
        stop: Sequence[str] = (),
    ) -> Generator[Any, None, bool]:
        """Continue token by token. The state holds exactly what has been yielded.

        You may leave the loop at any time, use the stream, and call `generate` again.

        Args:
            max_new_tokens: maximum number of new tokens; None for no limit.
            temperature, top_k, top_p, min_p, repetition_penalty: see `SamplingSettings`; the
                penalty applies to all tokens of the stream.
            seed: random seed of this call; None takes one from torch's default generator. Each
                sequence samples independently, as in `Generator.generate`.
            eos: whether the model's end token ends a sequence, or which ids do. The state includes
                them.
            stop: texts that end a sequence; they are yielded, and the state includes them.

        Raises:
            RuntimeError: the logits of a sequence are not finite (NaN or infinite).

        Yields:
            With a tokenizer, text: a str (a list of B for B > 1). An incomplete character is held
            back until it is complete, even across calls. Without a tokenizer, ids (B,); a sequence
            that has ended gets padding, which its state does not read.

        Returns:
            The generator's return value: whether the model ended all sequences before the limit.
        """
        sampling = SamplingSettings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        return self.sample(sampling, max_new_tokens=max_new_tokens, seed=seed, eos=eos, stop=stop)

    def sample(
        self,
        sampling: SamplingSettings,
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        eos: bool | int | Sequence[int] = True,
        stop: Sequence[str] = (),
    ) -> Generator[Any, None, bool]:
        """Like `generate`, with settings in one object.

        Example: `stream.sample(SamplingSettings(temperature=0.8), max_new_tokens=100)`
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be None or at least 1, got {max_new_tokens}")
        if isinstance(stop, str) or not all(stop) or (stop and self.tokenizer is None):
            raise ValueError(f"stop must be a list of texts and needs a tokenizer, got {stop!r}")
        settings = SlotSettings.empty(self.batch_size, self._known_logits().device)
        if seed is None and sampling.temperature > 0:
            seed = int(torch.randint(2**63 - 1, ()))
        settings.set_all(sampling, seed)
        ends = end_ids(eos, self.model, self.tokenizer)
        stops = StopStrings(self.tokenizer, stop) if stop else None
        return self._tokens(settings, max_new_tokens, ends, stops)

    def _tokens(
        self, settings: SlotSettings, limit: int | None, ends: list[int], stops: StopStrings | None
    ) -> Generator[Any, None, bool]:
        pad = self.model.config.pad_token_id
        filling = pad if pad is not None else next(iter(ends), 0)
        alive, number = [1] * self.batch_size, 0
        if stops is not None:
            stops.watch(self.batch_size)
        self._recorder.look()
        while number != limit and any(alive):
            # Copy `seen`, because sampling writes to it and marks share it.
            ids, _ = choose_each(self._known_logits(), settings, seen=self._now.seen.clone())
            if not all(alive):
                ids = ids.where(torch.tensor(alive, device=ids.device) != 0, filling)
            tokens, shown, tails = ids.tolist(), [""] * len(alive), list(self._now.tails)
            if min(tokens) < 0:
                raise no_numbers(tokens.index(-1))
            if self._decode is not None:
                shown = take_each(tails, tokens, alive, self._decode)
            # Read the token before it is yielded, because the caller may leave the loop there.
            self._read(ids[:, None], alive, tuple(tails))
            alive = [int(n and x not in ends) for n, x in zip(alive, tokens, strict=True)]
            if stops is not None:
                done = [stops.completes(row, piece) for row, piece in enumerate(shown)]
                alive = [int(n and not x) for n, x in zip(alive, done, strict=True)]
            number += 1
            if self.tokenizer is None:
                yield ids
            elif any(shown):
                yield shown[0] if len(shown) == 1 else shown
        return not any(alive)

    def mark(self) -> StreamMark:
        """Save a snapshot for `rollback`; marks may be nested, like savepoints in SQL."""
        self._marks.append(self._now.without_tokens())
        return self._marks[-1]

    def rollback(self, mark: StreamMark | None = None) -> FracStream:
        """Restore a mark, by default the last, bit for bit; drop the marks after it."""
        del self._marks[find_mark(self._marks, mark) + 1 :]
        self._commit(self._draft(self._marks[-1]))
        return self

    def release(self, mark: StreamMark | None = None) -> FracStream:
        """Drop a mark, by default the last, and those after it; the stream does not change."""
        del self._marks[find_mark(self._marks, mark) :]
        return self

    def fork(self) -> FracStream:
        """An independent copy of the stream, with its marks."""
        fork = self._at(self._now.fork(), self.model, self.tokenizer)
        fork._marks = list(self._marks)
        return fork

    def select(self, index: int | Sequence[int] | slice | Tensor) -> FracStream:
        """A stream of the sequences at `index`, in that order, without marks."""
        try:
            rows = torch.arange(self.batch_size)[[index] if isinstance(index, int) else index]
        except IndexError as error:
            raise ValueError(
                f"index must choose among {self.batch_size} sequences, got {index}"
            ) from error
        if rows.numel() == 0:
            raise ValueError(f"index must choose at least one sequence, got {index}")
        now = self._now.select(rows.tolist())
        return self._at(now, self.model, self.tokenizer)

    @staticmethod
    def cat(streams: Sequence[FracStream]) -> FracStream:
        """Join streams of one model into one stream of all their sequences, without marks.

        The logits of the next token are known only if all streams know them.
        """
        kinds = {(id(stream.model), id(stream.tokenizer)) for stream in streams}
        if len(kinds) != 1:
            raise ValueError(
                "streams must be at least one, and share one model and one tokenizer, got "
                f"{len(streams)} streams of {len(kinds)} pairs of model and tokenizer"
            )
        model, tokenizer = streams[0].model, streams[0].tokenizer
        now = StreamMark.cat([stream._now for stream in streams])
        return FracStream._at(now, model, tokenizer)

    def advance(self, gap: float) -> FracStream:
        """Let the time of `gap` tokens pass without input, in closed form.

            S_m <- exp(gap log_decay_m) S_m

        where log_decay is each head's value for a zero input, and nothing is written. The window
        shifts by floor(gap) zeros. `advance(a)` then `advance(b)` gives the same recurrent state as
        `advance(a + b)`. Unless gap is 0, the logits of the next token are unknown until another
        token is fed.

        Delta layers fade like one mode. Attention layers keep their keys, values and positions,
        which do not fade; a warning names these layers once.
        """
        # Comparing with the largest float works for integers of any size.
        if not (isinstance(gap, int | float) and 0 <= gap <= sys.float_info.max):
            raise ValueError(f"gap must be a finite number of tokens, 0 or more, got {gap!r:.40}")
        if gap == 0:
            return self
        draft = self._draft()
        let_pass(self.model, draft.cache, gap)
        self._commit(replace(draft, logits=None))
        return self

    def save(self, path: str | Path) -> None:
        """Write the stream, without its marks, to a file, atomically."""
        write_mark(Path(path), self._now, self.model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: FracForCausalLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> FracStream:
        """Load a stream that `save` wrote onto the model's device; the model must be the same.

        Example: `FracStream.load("book.stream", model, tokenizer).feed("The end?")`
        """
        check_model(model)
        now = read_mark(Path(path), model, text=tokenizer is not None)
        return cls._at(now, model, tokenizer)

    @classmethod
    def _at(cls, now: StreamMark, model: FracForCausalLM, tokenizer: Any) -> FracStream:
        """A stream at `now`, without marks."""
        stream = object.__new__(cls)
        stream._set(now, model, tokenizer)
        return stream

    def _draft(self, mark: StreamMark | None = None) -> StreamMark:
        """A copy of the current state, or of a mark, in the memory of the last draft."""
        spare, self._spare = self._spare, None
        draft = (mark or self._now).copy(spare)
        # Marks hold no keys and values; theirs are the first ones of this stream.
        draft.cache.full = self._now.cache.full
        return draft

    def _commit(self, now: StreamMark) -> None:
        # The stream is valid after each line, in case an interrupt comes between two.
        before = self._now.cache
        self._now = now
        self._spare = before

    def _read(self, ids: Tensor, counts: Sequence[int], tails: tuple[TextTail, ...]) -> None:
        """Read the last `counts` tokens of each row of ids (B, T); T > 0."""
        cache, logits = self._step(ids, padding_mask(ids, counts))
        self._commit(self._now.after(ids, counts, tails, cache, logits))

    def _step(self, ids: Tensor, mask: Tensor | None) -> tuple[BufferedCache, Tensor]:
        """The cache after ids (B, T), and logits (B, V); a single token uses a CUDA graph.

        Two caches alternate, so there is one graph for each direction. A failed call drops the
        spare cache, because it is left incomplete.
        """
        source, (spare, self._spare) = self._now.cache, (self._spare, None)
        if spare is None or ids.shape[1] > 1:
            after = self._now.copy(spare).cache
            return after, read_pieces(self.model, after, ids, mask)
        return spare, read_one(self._recorder, source, spare, ids, mask)

    def _known_logits(self) -> Tensor:
        if self._now.logits is None:
            raise ValueError(
                "generate needs the logits of the next token, which are unknown before the first "
                "token and after advance; feed at least one token"
            )
        return self._now.logits
