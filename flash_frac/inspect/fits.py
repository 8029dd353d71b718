"""Fit a power law a n^-b and an exponential a exp(-n / c) to a response.

Both are straight lines, of log R over log n and over n, fitted by least squares at the lags where R
is above 2^-24 of its largest value: float32 sums lose anything smaller. With lags evenly spaced on
a log axis, every decade counts the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Fraction of the largest response; float32 sums lose anything smaller, so it is not fitted.
FLOOR = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The longest range of lags for which a law fitted to that range alone is within the factor.

    Attributes:
        first, last: its ends; decades: log10(last / first).
        amplitude, exponent: parameters of that law, as in `Fit`.
    """

    first: int
    last: int
    decades: float
    amplitude: float
    exponent: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One law, and where it holds.

    Attributes:
        kind: "power" or "exponential".
        amplitude: a.
        exponent: b of a power law, or the rate 1 / c of an exponential; negative if R grows.
        timescale: c in tokens, of a decaying exponential; None otherwise.
        rms_log: root mean square of log(R / fit) over lags.
        first, last: the longest range of lags, by last / first, in which R and the law always agree
            within the given factor; both None if there is none.
        decades: log10(last / first); 0 if there is none.
        stretch: the longest range that the same kind of law fits on its own, which is more telling
            than the range above if a law holds only over some lags. None if it fits no three lags.
    """

    kind: str
    amplitude: float
    exponent: float
    timescale: float | None
    rms_log: float
    first: int | None
    last: int | None
    decades: float
    stretch: Stretch | None

    def __call__(self, lags: np.ndarray) -> np.ndarray:
        """The law at these lags."""
        lags = np.asarray(lags, np.float64)
        steps = np.log(lags) if self.kind == "power" else lags
        return self.amplitude * np.exp(-self.exponent * steps)


def fit_power_law(lags: np.ndarray, response: np.ndarray, *, factor: float = 1.25) -> Fit | None:
    """The best a n^-b, from lags (L,) of 1 or more and R (L,); None with fewer than 3 usable lags.

    Example: `fit_power_law(lags, 2.0 * lags**-0.5).exponent` is 0.5.
    """
    return _fit("power", lags, response, factor)


def fit_exponential(lags: np.ndarray, response: np.ndarray, *, factor: float = 1.25) -> Fit | None:
    """The best a exp(-n / c); arguments and result as in `fit_power_law`.

    Example: `fit_exponential(lags, np.exp(-lags / 30)).timescale` is 30.
    """
    return _fit("exponential", lags, response, factor)


def better(power: Fit | None, exponential: Fit | None) -> str | None:
    """The kind of the law that is closer, by `rms_log`; None if there are none."""
    if power is None or exponential is None:
        return None
    return min(power, exponential, key=lambda fit: fit.rms_log).kind


def _fit(kind: str, lags: np.ndarray, response: np.ndarray, factor: float) -> Fit | None:
    lags, response = np.asarray(lags, np.float64), np.asarray(response, np.float64)
    if lags.shape != response.shape or lags.ndim != 1 or not (lags >= 1).all():
        raise ValueError(
            f"lags must be a list of numbers of 1 or more, as long as response, got shapes "
            f"{lags.shape} and {response.shape}; omit lag 0"
        )
    if not factor > 1:
        raise ValueError(f"factor must be above 1, such as 1.25, got {factor}")
    there = response > FLOOR * max(response.max(), 1e-290)
    if there.sum() < 3:
        return None
    steps = np.log(lags) if kind == "power" else lags
    x, y = steps[there], np.log(response[there])
    centre = x.mean()
    slope = ((x - centre) * (y - y.mean())).sum() / ((x - centre) ** 2).sum()
    log_amplitude = y.mean() - slope * centre
    misses = np.full(len(lags), np.inf)
    misses[there] = np.abs(y - log_amplitude - slope * x)
    first, last = _longest(lags, misses <= np.log(factor))
    return Fit(
        kind=kind,
        amplitude=float(np.exp(log_amplitude)),
        exponent=float(-slope),
        timescale=float(-1 / slope) if kind == "exponential" and slope < 0 else None,
        rms_log=float(np.sqrt((misses[there] ** 2).mean())),
        first=first,
        last=last,
        decades=float(np.log10(last / first)) if first and last else 0.0,
        stretch=_stretch(lags[there], x, y, float(np.log(factor))),
    )


def _stretch(lags: np.ndarray, x: np.ndarray, y: np.ndarray, most: float) -> Stretch | None:
    """The longest range of three or more lags whose own line has errors of at most `most`."""
    best = None
    for start in range(len(x) - 2):
        if best and lags[-1] / lags[start] <= best.last / best.first:
            break
        # Fit lines from here to each later point at once; centred for precision.
        dx, dy = x[start:] - x[start], y[start:] - y[start]
        count = np.arange(1, len(dx) + 1)
        mean_x, mean_y = np.cumsum(dx) / count, np.cumsum(dy) / count
        spread = np.maximum(np.cumsum(dx * dx) - count * mean_x**2, 1e-300)
        slope = (np.cumsum(dx * dy) - count * mean_x * mean_y) / spread
        misses = np.abs(dy - mean_y[:, None] - slope[:, None] * (dx - mean_x[:, None]))
        inside = (np.tril(misses).max(1) <= most) & (count >= 3)
        if not inside.any():
            continue
        j = int(np.flatnonzero(inside)[-1])
        ratio = lags[start + j] / lags[start]
        if best is None or ratio > best.last / best.first:
            log_amplitude = y[start] + mean_y[j] - slope[j] * (x[start] + mean_x[j])
            best = Stretch(
                first=int(lags[start]),
                last=int(lags[start + j]),
                decades=float(np.log10(ratio)),
                amplitude=float(np.exp(log_amplitude)),
                exponent=float(-slope[j]),
            )
    return best


def _longest(lags: np.ndarray, inside: np.ndarray) -> tuple[int | None, int | None]:
    """Ends of the run of lags inside the factor with the largest last / first."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], inside.astype(int), [0]])))
    runs = [(lags[start], lags[stop - 1]) for start, stop in edges.reshape(-1, 2)]
    if not runs:
        return None, None
    first, last = max(runs, key=lambda run: run[1] / run[0])
    return int(first), int(last)
