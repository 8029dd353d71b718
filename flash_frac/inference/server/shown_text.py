"""The text of an answer while its tokens come, without the stop text that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from flash_frac.inference.text import BROKEN, text_decoder


class _Steps(Protocol):
    def step(self, ids: list[int]) -> str | None: ...


class ShownText:
    """Takes tokens, any number at a time, and gives the text that a client may see.

    A stop text and what follows it are cut off, so that an end that may be the beginning of one is
    held back until more has come.

    Example:
        >>> shown = ShownText(tokenizer, ["User:"])
        >>> print(shown.add([17, 4]) + shown.add([99]) + shown.end())
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = text_decoder(tokenizer), tuple(stops)
        core = getattr(tokenizer, "backend_tokenizer", None)
        self._steps: _Steps = _AllAgain(self._decode) if core is None else _Quick(core)
        self.ids: list[int] = []
        # All that was decoded, its end that is not shown yet, and whether a stop text was met.
        self._pieces: list[str] = []
        self._held, self.stopped = "", False

    def add(self, ids: Sequence[int]) -> str:
        """What there is to show now that these tokens have come; which may be nothing."""
        self.ids += ids
        if self.stopped:
            return ""
        piece = self._steps.step(list(ids))
        return "" if piece is None else self._show(piece, hold=True)

    def end(self) -> str:
        """The rest, once all tokens have come."""
        if self.stopped:
            return ""
        # The last bytes may be no letter, which shows only now.
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
    """Letters at the end of a text that begin the stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class _Quick:
    """By the tokenizer's own stream, which looks at the last few tokens only."""

    def __init__(self, core: Any) -> None:
        self._core, self._stream = core, DecodeStream(skip_special_tokens=True)

    def step(self, ids: list[int]) -> str | None:
        return self._stream.step(self._core, ids)


class _AllAgain:
    """For tokenizers in Python: all is decoded again for each piece."""

    def __init__(self, decode: Any) -> None:
        self._decode, self._ids, self._shown = decode, [], ""

    def step(self, ids: list[int]) -> str | None:
        self._ids += ids
        text = self._decode(self._ids)
        if text.endswith(BROKEN) or not text.startswith(self._shown):
            return None
        fresh, self._shown = text[len(self._shown) :], text
        return fresh
