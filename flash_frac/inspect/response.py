"""The impulse response of a layer's memory, measured along a text, and how far it reaches.

At token k + n, a head keeps Γ[k + n, k] u_k of token k, with

    Γ[k + n, k] = Σ_m read_{k+n,m} exp(Σ_{s=k+1}^{k+n} log_decay_{s,m}) write_{k,m}

and its response at lag n is R(n), the mean of Γ[k + n, k] over source tokens k. Unlike the kernel
at mean controls, R includes all effects of tokens on reads, writes and decays.
Letters: B batch, T time, H heads, M modes, L lags.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from flash_frac.ops import Controls

# Keeps logs finite where a response has died out.
_NOTHING = 1e-300
# Source tokens per step, few enough for the CPU cache.
_BLOCK = 256


class Horizon(NamedTuple):
    """Reach of a response in tokens: the lags below which half and 90% of Σ |R(n)| lie.

    The weight of lag n is spread over [n, n + 1), so fractional lags are defined, and a response
    only at lag 0 has a half of 0.5. `mean` is Σ n |R(n)| / Σ |R(n)|. `last_half` is the share of
    the sum in the farther half of all lags: if it is not small, a longer text would give a longer
    horizon.
    """

    half: float
    ninety: float
    mean: float
    last_half: float


def log_spaced_lags(num_tokens: int, *, num_lags: int = 64, min_sources: int = 32) -> np.ndarray:
    """Lag 0 and about `num_lags` integers, evenly spaced on a log axis where possible.

    The largest is the last lag with `min_sources` source tokens in a text, or half the length of a
    short text.

    Example: `log_spaced_lags(4096)` goes from 0, 1, 2, 3 to 4064.
    """
    if num_tokens < 4:
        raise ValueError(f"num_tokens must be at least 4, got {num_tokens}; use a longer text")
    if num_lags < 4:
        raise ValueError(f"num_lags must be at least 4, got {num_lags}")
    last = num_tokens - min(min_sources, num_tokens // 2)
    lags = np.arange(1, 2)
    # Small lags round to the same integers, so request more until enough are left.
    for wanted in range(num_lags, 3 * num_lags):
        lags = np.unique(np.geomspace(1, last, wanted).round().astype(np.int64))
        if len(lags) >= min(num_lags, last):
            break
    return np.concatenate([[0], lags])


def source_positions(num_tokens: int, lag: int, max_sources: int) -> np.ndarray:
    """Source tokens k of the mean R(lag): all with k + lag < T, or `max_sources` spread evenly.

    Example: `source_positions(100, 40, 3)` is [0, 30, 59].
    """
    count = num_tokens - lag
    if count <= max_sources:
        return np.arange(count)
    return np.linspace(0, count - 1, max_sources).round().astype(np.int64)


@torch.no_grad()
def impulse_response(
    controls: Controls, lags: np.ndarray, *, max_sources: int = 4096
) -> np.ndarray:
    """R(n) of each head, (H, L) float64.

    Args:
        controls: read, write and log_decay, (B, T, H, M) each; sums are in float64.
        lags: (L,) integers in [0, T).
        max_sources: maximum source tokens per row and lag in the mean; it limits the work to
            B L max_sources H M exponentials.

    Example: `impulse_response(mixer.controls(inner_x, u), log_spaced_lags(u.shape[1]))`
    """
    num_rows, num_tokens, num_heads, _ = controls.read.shape
    lags = np.asarray(lags)
    if lags.ndim != 1 or not ((lags >= 0) & (lags < num_tokens)).all():
        raise ValueError(f"lags must be integers in [0, T = {num_tokens}), got {lags}")
    if max_sources < 1:
        raise ValueError(f"max_sources must be at least 1, got {max_sources}")
    response = np.zeros((num_heads, len(lags)))
    # Row by row, to limit memory. In numpy, because in many small steps torch's threads would
    # mostly wait for each other.
    for row in range(num_rows):
        one_read, one_write, decay = (x[row].double().cpu().numpy() for x in controls)
        total = np.cumsum(decay, 0)
        for i, lag in enumerate(lags.tolist()):
            sources = source_positions(num_tokens, lag, max_sources)
            for k in np.array_split(sources, -(-len(sources) // _BLOCK)):
                # A difference of sums, because a ratio of exponentials would overflow.
                kept = total[k + lag] - total[k]
                np.exp(kept, out=kept)
                kept *= one_write[k]
                kept *= one_read[k + lag]
                response[:, i] += kept.sum((0, 2)) / (len(sources) * num_rows)
    return response


def cumulative_weight(lags: np.ndarray, response: np.ndarray) -> np.ndarray:
    """The share of Σ |R(n)| over n < N, for N = 0, 1, ... to one beyond the largest lag.

    Zeros for a zero response. Between the lags (L,), which start with 0 and 1, |R| is interpolated
    as a power law at every integer; the sums are over all integers.

    Example: `cumulative_weight(lags, response)[17]` is the share of the lags up to 16.
    """
    below = np.concatenate([[0.0], np.cumsum(_every_weight(lags, response))])
    return below / (below[-1] or 1.0)


def _every_weight(lags: np.ndarray, response: np.ndarray) -> np.ndarray:
    """|R| at every integer up to the largest lag."""
    lags, weight = np.asarray(lags), np.abs(response)
    if len(lags) < 2 or lags[0] != 0 or lags[1] != 1 or not (np.diff(lags) > 0).all():
        raise ValueError(f"lags must increase from 0 and 1, got {lags}")
    every = np.arange(1, lags[-1] + 1)
    if not weight.any():
        return np.zeros(len(every) + 1)
    logs = np.log(np.maximum(weight[1:], _NOTHING))
    between = np.exp(np.interp(np.log(every), np.log(lags[1:]), logs))
    return np.concatenate([weight[:1], between])


def horizon(lags: np.ndarray, response: np.ndarray) -> Horizon:
    """Reach of a response (L,) at lags 0, 1, ... (L,), up to the largest lag.

    Example: `horizon(np.arange(5000), 0.99 ** np.arange(5000.0)).half` is 68.97.
    """
    full = _every_weight(lags, response)
    if not np.any(response):
        return Horizon(0.0, 0.0, 0.0, 0.0)
    below = np.concatenate([[0.0], np.cumsum(full)])
    wanted = np.array([0.5, 0.9]) * below[-1]
    half, ninety = np.interp(wanted, below, np.arange(len(below))).tolist()
    mean = float((full * np.arange(len(full))).sum() / below[-1])
    return Horizon(half, ninety, mean, float(1 - below[len(full) // 2] / below[-1]))
