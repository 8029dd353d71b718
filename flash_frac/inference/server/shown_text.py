"""The text of a streamed answer, without the stop text that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from flash_frac.inference.text import BROKEN, text_decoder


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
        self._steps: _Steps = _AllAgain(self._decode) if core is None else _Quick(core)
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
    """Uses the tokenizer's own decode stream, which looks only at the last few tokens."""

    def __init__(self, core: Any) -> None:
        self._core, self._stream = core, DecodeStream(skip_special_tokens=True)

    def step(self, ids: list[int]) -> str | None:
        return self._stream.step(self._core, ids)


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
