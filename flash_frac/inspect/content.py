"""Memory of content-based layers: how much of each earlier token a head's output contains.

The output of every mixer is linear in the values that tokens write. At token t, a head's output is

    y_t = Σ_s Γ[t, s] v_s

with Γ the weights of attention, or of the delta rule

    Γ[t, s] = q_t^T (Π_{r = s + 1}^{t} a_r (1 - beta_r k_r k_r^T)) beta_s k_s,

which may be negative, so |Γ| is used. Rows of Γ at some tokens t, spread evenly over the text, give
the same response as for a Frac layer: R(n), the mean of Γ[t, t - n].
Letters: B batch, T time, H heads, D channels, L lags, Q tokens t.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flash_frac.inspect.records import Distances
from flash_frac.inspect.response import source_positions
from flash_frac.layers import DeltaMixer
from flash_frac.models.attention import Attention
from flash_frac.ops import delta_scan

# Maximum number of elements of Γ in memory.
_PIECE = 2**24
# Distances of `Distances.beyond`, up to the length of the text.
BEYOND = (16, 64, 256, 1024, 4096, 16384, 65536)


class ByDistance(NamedTuple):
    """Γ by distance: sums (H, T) over the tokens t with a token that far back, and counts (T,)."""

    sums: np.ndarray
    counts: np.ndarray

    def response(self, lags: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """R at the lags, (H, L), each a mean over the distances around it; token pairs (L,).

        Distances are grouped by the nearest lag on a log axis, because single ones are noisy.
        """
        lags = np.asarray(lags)
        inner = np.ceil(np.sqrt(lags[1:-1] * lags[2:])).astype(int)
        begins = np.concatenate([[0, 1], inner])
        last = int(lags[-1]) + 1
        sums = np.add.reduceat(self.sums[:, :last], begins, axis=1)
        counts = np.add.reduceat(self.counts[:last], begins)
        return sums / counts, counts.tolist()

    def distances(self) -> tuple[list[float], list[Distances]]:
        """Bin edges, and the distances of each head, followed by those of their mean."""
        every = np.concatenate([self.sums, self.sums.mean(0, keepdims=True)])
        num_tokens = every.shape[1]
        begins = [0, *(2**n for n in range(max(1, (num_tokens - 1).bit_length())))]
        found = [_distances(weights / weights.sum(), begins) for weights in every]
        return [float(edge) for edge in (*begins, 2 * begins[-1])], found


def _distances(weights: np.ndarray, begins: list[int]) -> Distances:
    below = np.concatenate([[0.0], np.cumsum(weights)])
    return Distances(
        shares=np.add.reduceat(weights, begins).tolist(),
        median=float(np.interp(0.5, below, np.arange(len(below)))),
        mean=float((weights * np.arange(len(weights))).sum()),
        beyond={str(n): float(weights[n:].sum()) for n in BEYOND if n < len(weights)},
    )


def attention_by_distance(
    attention: Attention, q: Tensor, k: Tensor, *, max_queries: int
) -> ByDistance:
    """Γ of an attention layer, from the queries (B, H, T, D) and keys of a text.

    They include positions and temperature; the window is the layer's.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    num_tokens, window = q.shape[2], attention.sliding_window or q.shape[2]
    positions = _positions(num_tokens, max_queries)
    token = torch.arange(num_tokens, device=q.device)
    pieces = _pieces(positions, q.shape[1] * num_tokens)

    def rows() -> Iterator[tuple[int, Tensor]]:
        for q_row, k_row in zip(q.to(wide), k.to(wide), strict=True):
            # Query heads that share a key head are adjacent.
            groups = q_row.unflatten(0, (len(k_row), -1))
            for piece in pieces:
                scores = groups[:, :, piece] @ k_row[:, None].mT * attention.scaling
                back = token[piece, None] - token
                hidden = (back < 0) | (back >= window)
                weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).flatten(0, 1)
                yield from zip(piece, weights.unbind(1), strict=True)

    return _by_distance(rows(), len(q), q.shape[1], positions, num_tokens)


def delta_by_distance(mixer: DeltaMixer, x: Tensor, *, max_queries: int) -> ByDistance:
    """|Γ| of a delta layer, from its input (B, T, E).

    With Q value channels, an output gradient of 1 in channel i only at token t_i makes Γ[t_i, s]
    the gradient of value s: one backward pass gives Q rows.
    """
    parts = mixer.scan_inputs(x)
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = [tensor.detach().to(dtype) for tensor in (*parts[:2], *parts[3:5])]
    num_tokens, num_heads = x.shape[1], mixer.num_heads
    positions = _positions(num_tokens, max_queries)
    pieces = _pieces(positions, num_heads * num_tokens)

    def rows() -> Iterator[tuple[int, Tensor]]:
        for row in range(len(x)):
            for piece in pieces:
                # Tokens after the last position are in none of the rows.
                q, k, beta, log_decay = (x[row : row + 1, : piece[-1] + 1] for x in wide)
                v = q.new_zeros(*q.shape[:3], len(piece), requires_grad=True)
                with torch.enable_grad():
                    y = delta_scan(q, k, v, beta, log_decay, backend="torch").y
                slope = torch.zeros_like(y)
                slope[0, piece, :, range(len(piece))] = 1
                (found,) = torch.autograd.grad(y, v, slope)
                yield from zip(piece, found[0].abs().permute(2, 1, 0), strict=True)

    return _by_distance(rows(), len(x), num_heads, positions, num_tokens)


def _positions(num_tokens: int, max_queries: int) -> list[int]:
    if max_queries < 1:
        raise ValueError(f"max_queries must be at least 1, got {max_queries}")
    return source_positions(num_tokens, 0, max_queries).tolist()


def _pieces(positions: list[int], size: int) -> list[list[int]]:
    """Split positions into pieces of bounded size; each position has `size` elements of Γ."""
    step = min(64, max(1, _PIECE // size))
    return [positions[i : i + step] for i in range(0, len(positions), step)]


def _by_distance(
    rows: Iterator[tuple[int, Tensor]],
    num_rows: int,
    num_heads: int,
    positions: list[int],
    num_tokens: int,
) -> ByDistance:
    """Sums over rows of Γ; each row (H, T) belongs to a token t and counts up to t itself."""
    sums = None
    for t, weights in rows:
        if sums is None:
            sums = weights.new_zeros(num_heads, num_tokens, dtype=torch.float64)
        sums[:, : t + 1] += weights[:, : t + 1].flip(-1)
    assert sums is not None
    have = np.searchsorted(np.array(positions), np.arange(num_tokens))
    return ByDistance(sums.cpu().numpy(), num_rows * (len(positions) - have))
