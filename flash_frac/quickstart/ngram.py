"""A byte-level n-gram model, a baseline that shows what a network learns beyond counting.

It uses Witten-Bell interpolation: with c(h w) the count of byte w after history h, c(h) their sum
and t(h) the number of different bytes seen after h,

    P(w | h) = (c(h w) + t(h) P(w | h')) / (c(h) + t(h))

where h' is h without its first byte; before the empty history, every byte has 1/256. The more
different bytes follow a history, the more weight shorter histories get. Each P(. | h) sums to one.
"""

from __future__ import annotations

import numpy as np


class ByteNgram:
    """A byte n-gram model of one text. Letters: n order, N bytes of text.

    Args:
        text: (N,) bytes to count, at least `order` of them.
        order: n, 1 to 3; a byte is predicted from the n - 1 before it. The table has 256^n counts.

    Example:
        >>> trigram = ByteNgram(training_text)
        >>> print(trigram.bits_per_byte(other_text))
    """

    def __init__(self, text: bytes | np.ndarray, *, order: int = 3) -> None:
        if order not in (1, 2, 3):
            raise ValueError(
                f"order must be 1, 2 or 3 (the table has 256^order counts), got {order!r}"
            )
        data = _bytes(text)
        if len(data) < order:
            raise ValueError(f"text must have at least {order} bytes, got {len(data)}")
        self.order = order
        self._counts = [_count(data, n) for n in range(1, order + 1)]
        self._seen = [table.sum(-1) for table in self._counts]
        self._kinds = [np.count_nonzero(table, -1) for table in self._counts]

    def probabilities(self, history: bytes) -> np.ndarray:
        """P(. | history), (256,) float64; only the last n - 1 bytes of the history count.

        Example: `ByteNgram(b"abracadabra").probabilities(b"ab").argmax() == ord("r")`
        """
        data = _bytes(history)[max(0, len(history) - self.order + 1) :]
        codes = data[None].repeat(256, 0)
        every = np.concatenate([codes, np.arange(256, dtype=np.uint8)[:, None]], 1)
        return self._interpolate(every)

    def log2_probabilities(self, text: bytes | np.ndarray) -> np.ndarray:
        """log2 P of each byte of a text given those before it, (N,) float64.

        The first byte has no history and the second a short one.
        """
        data = _bytes(text)
        short = range(1, min(self.order, len(data) + 1))
        chances = [np.zeros(0), *(self._interpolate(data[None, :k]) for k in short)]
        if len(data) >= self.order:
            windows = np.lib.stride_tricks.sliding_window_view(data, self.order)
            chances.append(self._interpolate(windows))
        return np.log2(np.concatenate(chances))

    def bits_per_byte(self, text: bytes | np.ndarray) -> float:
        """Mean of -log2 P over the bytes of a text."""
        if len(text) == 0:
            raise ValueError("text must hold at least one byte, got none")
        return float(-self.log2_probabilities(text).mean())

    def _interpolate(self, grams: np.ndarray) -> np.ndarray:
        """P of the last byte of each row (rows, k) given the k - 1 before it, k <= n."""
        last = grams[:, -1]
        result = np.full(len(grams), 1 / 256)
        for k in range(grams.shape[1]):
            history = tuple(grams[:, grams.shape[1] - 1 - k : -1].T)
            count, seen = self._counts[k][(*history, last)], self._seen[k][history]
            kinds = self._kinds[k][history]
            # After an unseen history, only the shorter one counts.
            total = np.maximum(seen + kinds, 1)
            known = (count + kinds * result) / total
            result = np.where(seen > 0, known, result)
        return result


def _bytes(text: bytes | np.ndarray) -> np.ndarray:
    if isinstance(text, np.ndarray):
        if text.dtype != np.uint8 or text.ndim != 1:
            raise ValueError(
                f"text must be bytes or a 1-d uint8 array, got {text.dtype} of shape {text.shape}"
            )
        return text
    return np.frombuffer(text, np.uint8)


def _count(data: np.ndarray, n: int) -> np.ndarray:
    """The counts of all n-grams, shape (256,) * n."""
    codes = np.zeros(len(data) - n + 1, np.int32)
    for k in range(n):
        codes = codes * 256 + data[k : len(data) - n + 1 + k]
    return np.bincount(codes, minlength=256**n).astype(np.int32).reshape((256,) * n)
