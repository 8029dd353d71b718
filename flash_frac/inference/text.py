"""Text that comes token by token, where tokens may be parts of letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

# Tokens before a token on which its letters may depend; bytes that a letter has at most.
CONTEXT, LONGEST_LETTER = 8, 4
# What a tokenizer shows for bytes that are no letter, or not yet.
BROKEN = "\ufffd"


@dataclass(frozen=True)
class TextTail:
    """The end of a sequence as text: a letter of several bytes is shown when it is whole.

    Attributes:
        ids: the last tokens.
        shown: how many of their letters were shown.
        waiting: tokens that have come since all letters were whole.

    Example:
        >>> tail = TextTail()
        >>> for token in tokens:
        ...     piece, tail = tail.take(token, tokenizer)
        ...     print(piece, end="")
    """

    ids: tuple[int, ...] = ()
    shown: int = 0
    waiting: int = 0

    def skip(self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> TextTail:
        """The tail after ids that need not be shown."""
        kept = (*self.ids, *ids)[-CONTEXT:]
        return TextTail(kept, len(_decode(kept, tokenizer).rstrip(BROKEN)))

    def take(self, token: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, TextTail]:
        """What there is to show after one more token, and the tail after it."""
        ids, waiting = (*self.ids, token), self.waiting + 1
        text = _decode(ids, tokenizer)
        broken = text.endswith(BROKEN)
        if broken and waiting < LONGEST_LETTER:
            return "", TextTail(ids, self.shown, waiting)
        # After so many bytes, those before the last are no letters; the last may still begin one.
        held, kept = int(broken), ids[-CONTEXT:]
        after = TextTail(kept, len(_decode(kept, tokenizer)) - held, waiting * held)
        return text[self.shown : len(text) - held], after


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))
