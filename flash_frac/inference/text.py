"""Text and tokens: from a caller's input to ids, and from a stream of ids to text.

Letters: B sequences, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from flash_frac.beginning import beginning
from flash_frac.models import FracForCausalLM

Inputs: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor
Decode: TypeAlias = Callable[[Sequence[int]], str]

# Earlier tokens on which a token's text may depend; maximum bytes of a character.
CONTEXT, LONGEST_LETTER = 8, 4
# What a tokenizer shows for invalid or incomplete bytes.
BROKEN = "\ufffd"


def to_ids(
    inputs: Inputs,
    *,
    lengths: Sequence[int],
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Tensor, list[int]]:
    """Ids (B, T), padded on the left with zeros, and the number of tokens of each sequence.

    `lengths` are those of the B sequences so far: at 0, a text starts as the tokenizer starts one.

    Example: `to_ids([[5, 6], [7]], ...)` gives [[5, 6], [0, 7]] and [2, 1].
    """
    if isinstance(inputs, Tensor):
        ids = inputs[None] if inputs.ndim == 1 else inputs
        if ids.ndim != 2:
            raise ValueError(f"inputs must have shape (T,) or (B, T), got {tuple(inputs.shape)}")
        counts = [ids.shape[1]] * ids.shape[0]
    else:
        rows = [torch.as_tensor(row) for row in _rows(inputs, tokenizer, lengths)]
        # torch turns an empty list into a float tensor.
        rows = [row if row.numel() else row.long() for row in rows]
        counts = [row.numel() for row in rows]
        ids = torch.zeros(len(rows), max(counts), dtype=torch.long)
        for row, out in zip(rows, ids, strict=True):
            if row.ndim != 1 or row.is_floating_point():
                raise ValueError(f"inputs must be integer token ids, got {inputs!r}")
            out[ids.shape[1] - row.numel() :] = row
    if ids.shape[0] != len(lengths):
        raise ValueError(
            f"inputs must be for {len(lengths)} sequences, the batch_size of the stream, got "
            f"{ids.shape[0]}; to feed all of them the same, repeat it in a list"
        )
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"inputs must be integer token ids, got {ids.dtype}")
    if ids.numel():
        # On a GPU, an id out of range would crash the process.
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"inputs must be in [0, {vocab_size}), got ids from {low} to {high}; the "
                f"vocabulary has {vocab_size}"
            )
    return ids.long(), counts


def _rows(
    inputs: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase | None,
    lengths: Sequence[int],
) -> Sequence[Sequence[int]]:
    texts = [inputs] if isinstance(inputs, str) else inputs
    if any(isinstance(text, str) for text in texts):
        if tokenizer is None:
            raise ValueError(
                "inputs must be ids, got text; for text, use FracStream(model, tokenizer)"
            )
        encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)  # pyright: ignore
        rows: Any = encoded["input_ids"]
        start = beginning(tokenizer) if 0 in lengths else []
        return [
            # A text that already starts with the bos token gets no second one.
            start + row if row and n == 0 and row[: len(start)] != start else row
            # The caller checks the number of texts.
            for row, n in zip(rows, [*lengths, *[1] * len(rows)], strict=False)
        ]
    nested = len(inputs) > 0 and isinstance(inputs[0], (Sequence, Tensor))
    return inputs if nested else [inputs]  # pyright: ignore[reportReturnType]


def end_ids(
    eos: bool | int | Sequence[int],
    model: FracForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
) -> list[int]:
    """Tokens that end a sequence: the given ids or, for True, those of the model."""
    if eos is False:
        return []
    if eos is True:
        known: Any = getattr(model.generation_config, "eos_token_id", None)
        if known is None and tokenizer is not None:
            known = tokenizer.eos_token_id
        return [] if known is None else end_ids(known, model, tokenizer)
    return [eos] if isinstance(eos, int) else list(eos)


def text_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """A function from ids to the text that a reader sees."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return lambda ids: str(tokenizer.decode(list(ids), **options))


@dataclass(frozen=True)
class TextTail:
    """The end of a sequence as text; a multi-byte character is shown once it is complete.

    It is plain data, so marks of a stream can share, compare and save it.

    Attributes:
        ids: the last tokens, from the start of a character on.
        shown: number of characters of their text already shown.
        waiting: tokens received since something was shown.

    Example:
        >>> tail = TextTail()
        >>> for token in tokens:
        ...     piece, tail = tail.take(token, text_decoder(tokenizer))
        ...     print(piece, end="")
    """

    ids: tuple[int, ...] = ()
    shown: int = 0
    waiting: int = 0

    def skip(self, ids: Sequence[int], decode: Decode) -> TextTail:
        """The tail after ids that are not shown."""
        kept = (*self.ids, *ids)[-CONTEXT:]
        # Either end may split a character. One bad byte makes some decoders reject its neighbours.
        for begin, begun in product(range(LONGEST_LETTER), repeat=2):
            text = decode(kept[begin : max(begin, len(kept) - begun)])
            if BROKEN not in text:
                return TextTail(kept[begin:], len(text), begun)
        text = decode(kept)
        return TextTail(kept, len(text) - text.endswith(BROKEN))

    def take(self, token: int, decode: Decode) -> tuple[str, TextTail]:
        """The text to show after one more token, and the new tail."""
        ids, waiting = (*self.ids, token), self.waiting + 1
        text = decode(ids)
        broken, silent = text.endswith(BROKEN), len(text) <= self.shown
        if (broken and waiting < LONGEST_LETTER) or (silent and waiting < CONTEXT):
            return "", TextTail(ids, self.shown, waiting)
        if silent or (broken and not decode((token,))):
            # Drop special tokens, because there may be any number of them.
            return "", self
        if broken:
            # Too many bytes for a character: all but the last are invalid; the last may start one.
            kept = ids[-LONGEST_LETTER:]
            return text[self.shown : -1], TextTail(kept, len(decode(kept)) - 1, waiting)
        if len(ids) <= CONTEXT:
            return text[self.shown :], TextTail(ids, len(text))
        kept = ids[-waiting:]
        return text[self.shown :], TextTail(kept, len(decode(kept)))


def skip_each(
    tails: Sequence[TextTail], ids: Tensor, counts: Sequence[int], decode: Decode
) -> tuple[TextTail, ...]:
    """The tails of B sequences after the last `counts` of ids (B, T), which are not shown."""
    rows = zip(ids[:, -CONTEXT:].tolist(), counts, strict=True)
    ends = (row[-count:] if count else [] for row, count in rows)
    return tuple(tail.skip(end, decode) for tail, end in zip(tails, ends, strict=True))


def take_each(
    tails: list[TextTail], tokens: Sequence[int], alive: Sequence[int], decode: Decode
) -> list[str]:
    """The text to show after a token of each live sequence; updates their tails."""
    shown = [""] * len(tails)
    for row in (n for n, lives in enumerate(alive) if lives):
        shown[row], tails[row] = tails[row].take(tokens[row], decode)
    return shown


class StopStrings:
    """Watches new tokens for texts that end a sequence, such as "\\n\\n"; prompts do not count.

    Example: `generator.generate(ids, max_new_tokens=99, stop=StopStrings(tokenizer, ["User:"]))`
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        if isinstance(texts, str) or not texts or not all(texts):
            raise ValueError(f"texts must be a list of non-empty texts, got {texts!r}")
        self.tokenizer, self.texts = tokenizer, list(texts)
        self._longest = max(map(len, texts))
        # Special tokens are not shown, so they complete no text but one that contains them.
        named = getattr(tokenizer, "added_tokens_decoder", {})
        self._hidden = {
            id
            for id, token in named.items()
            if token.special and not any(token.content in text for text in texts)
        }
        self.watch(0)

    def watch(self, batch_size: int) -> None:
        """Watch new sequences."""
        self._tails, self._ends = [TextTail()] * batch_size, [""] * batch_size

    def ends(self, row: int, token: int) -> bool:
        """Whether a sequence ends with one of the texts after this token."""
        piece, self._tails[row] = self._tails[row].take(token, self._decode)
        return self.completes(row, piece)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([id for id in ids if id not in self._hidden])

    def completes(self, row: int, piece: str) -> bool:
        """Whether a sequence ends with one of the texts after this piece."""
        self._ends[row] = self._ends[row][-self._longest :] + piece
        return any(text in self._ends[row] for text in self.texts)
