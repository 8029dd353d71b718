"""The text of a streamed answer, without the stop text that ends it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream
from transformers.utils import logging

from flash_frac.inference.text import BROKEN, CONTEXT, Decode, TextTail, text_decoder

logger = logging.get_logger(__name__)


class _Steps(Protocol):
    def step(self, ids: list[int]) -> str | None: ...


class ShownText:
    """Turns tokens, any number at a time, into the text that a client may see.

    A stop text and everything after it are cut off. So text that may be the start of one is held
    back until more tokens come.

    Example:
        >>> shown = ShownText(tokenizer, ["User:"])
        >>> print(shown.add([17, 4]) + shown.add([99]) + shown.end())
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = text_decoder(tokenizer), tuple(stops)
        core = getattr(tokenizer, "backend_tokenizer", None)
        self._steps: _Steps = (
            _AllAgain(self._decode) if core is None else _Quick(core, self._decode)
        )
        self.ids: list[int] = []
        # All decoded text, its end that is held back, and whether a stop text was found.
        self._pieces: list[str] = []
        self._held, self.stopped = "", False

    def add(self, ids: Sequence[int]) -> str:
        """The text to show after these tokens, which may be empty."""
        self.ids += ids
        if self.stopped:
            return ""
        piece = self._steps.step(list(ids))
        return "" if piece is None else self._show(piece, hold=True)

    def end(self) -> str:
        """The rest of the text, after the last token."""
        if self.stopped:
            return ""
        # The last bytes may be an incomplete character, which can only be shown now.
        whole, known = self._decode(self.ids), "".join(self._pieces)
        return self._show(whole.removeprefix(known) if whole.startswith(known) else "", hold=False)

    def _show(self, piece: str, *, hold: bool) -> str:
        self._pieces.append(piece)
        fresh, self._held = self._held + piece, ""
        places = [place for stop in self._stops if (place := fresh.find(stop)) >= 0]
        if places:
            fresh, self.stopped = fresh[: min(places)], True
        elif hold and self._stops:
            shown = len(fresh) - max(_begun(fresh, stop) for stop in self._stops)
            fresh, self._held = fresh[:shown], fresh[shown:]
        return fresh


def _begun(text: str, stop: str) -> int:
    """Number of characters at the end of a text that start the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class _Quick:
    """Uses the tokenizer's own decode stream, which looks only at the last few tokens.

    Tokenizers with single bytes as tokens (Llama's) show a character otherwise once bytes that are
    no text follow it. Their decode stream then raises; `TextTail` goes on from there.
    """

    def __init__(self, core: Any, decode: Decode) -> None:
        self._core, self._stream = core, DecodeStream(skip_special_tokens=True)
        # The last tokens whose text was returned, and those whose bytes are held back.
        self._decode, self._known, self._held = decode, [], []
        self._tail: TextTail | None = None

    def step(self, ids: list[int]) -> str | None:
        if self._tail is None:
            self._held += ids
            try:
                piece = self._stream.step(self._core, ids)
            # Rust raises a bare Exception.
            except Exception as error:
                if "Invalid prefix" not in str(error):
                    raise
                logger.debug(f"decoding otherwise from here: {error}")
                self._tail, ids = TextTail().skip(self._known, self._decode), self._held
            else:
                if piece is not None:
                    self._known, self._held = (self._known + self._held)[-CONTEXT:], []
                return piece
        pieces = []
        for id in ids:
            piece, self._tail = self._tail.take(id, self._decode)
            pieces.append(piece)
        return "".join(pieces)


class _AllAgain:
    """For tokenizers in Python: decodes everything again for each piece."""

    def __init__(self, decode: Any) -> None:
        self._decode, self._ids, self._shown = decode, [], ""

    def step(self, ids: list[int]) -> str | None:
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith(BROKEN) or not text.startswith(self._shown):
            return None
        fresh, self._shown = text[len(self._shown) :], text
        return fresh


def named_token(tokenizer: Any, id: int) -> tuple[str, bytes]:
    """A token's name in logprobs and its bytes; bytes that are no text are named bytes:\\xd3.

    Example: `named_token(tokenizer, 17) == (" the", b" the")`
    """
    text = tokenizer.decode([id])
    if BROKEN not in text:
        return text, text.encode()
    found = _bytes_of(tokenizer.convert_ids_to_tokens(id))
    if found is None:
        return text, text.encode()
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found


def _bytes_of(token: str) -> bytes | None:
    """The bytes of a token in the vocabulary, written as Llama's or as GPT-2's tokenizers do."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(match[1])
    letters = _letters()
    return bytes(letters[x] for x in token) if set(token) <= set(letters) else None


@cache
def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}
