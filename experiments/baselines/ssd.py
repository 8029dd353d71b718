"""Linear recurrences with a scalar decay per head, by matrix products over chunks of time.

    S[t] = exp(log_decay[t]) S[t - 1] + k[t] v[t]^T        y[t] = S[t]^T q[t]

Heads come in G groups of R that share q and k: all heads in one group (Mamba2, G = 1), or each its
own group (Mamba3, R = 1). Within a chunk, y is a masked product of scores; a loop passes states
from chunk to chunk, with one fused multiply-add per chunk.

Letters: B batch, T time, G groups, R heads of a group, N state size, D head channels, C chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CHUNK = 64


def chunk_length(num_tokens: int) -> int:
    """Chunk size C: a power of two, 64 for all but short sequences."""
    return min(MAX_CHUNK, 1 << (num_tokens - 1).bit_length())


def split_chunks(x: Tensor, *, dim: int, chunk: int) -> Tensor:
    """Split axis `dim` of T tokens into two axes (chunks, C), zero-padded at the end."""
    missing = -x.shape[dim] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing))
    return x.unflatten(dim, (-1, chunk))


def decay_to_end(log_decay: Tensor) -> Tensor:
    """Decay after each token until the last, (..., T) like the argument, summed from the end.

    Near the end weights are large, so they are accurate where it matters. The sum is along the
    last axis, because along any other a GPU sums token by token.
    """
    return F.pad(log_decay[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1).exp()


def decay_between(since_start: Tensor, *, diagonal: bool = True) -> Tensor:
    """Decay (..., C, C) from tokens of the last axis to those of the axis before; 0 backwards.

    Args:
        since_start: (..., C) running sums of log decays.
        diagonal: whether a token reaches itself.
    """
    size = since_start.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=since_start.device)
    # Masked before the exponential: after it, inf * 0 would be NaN in the gradient. So is the
    # diagonal, whose gradients would cancel only up to rounding.
    between = since_start[..., :, None] - since_start[..., None, :]
    decay = between.masked_fill(ones.triu(), -torch.inf).exp()
    return decay + torch.eye(size, dtype=decay.dtype, device=decay.device) if diagonal else decay


def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    diagonal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of the recurrence above.

    Args:
        q, k: (B, G, T, N), float32 or float64, like all other inputs.
        v: (B, G, T, R, D).
        log_decay: (B, G, T, R), at most 0.
        state: (B, G, N, R, D) before the first token; zeros if None.
        diagonal: whether y[t] includes the term of token t itself, (q[t] . k[t]) v[t].

    Returns:
        y (B, G, T, R, D) and the state after the last token.
    """
    num_tokens = q.shape[2]
    chunk = chunk_length(num_tokens)
    q, k, v, log_decay = (split_chunks(x, dim=2, chunk=chunk) for x in (q, k, v, log_decay))
    since_start = log_decay.mT.cumsum(-1).mT
    inner = _within_chunks(q, k, v, since_start, diagonal=diagonal)
    added = (k.mT @ (v * decay_to_end(log_decay.mT).mT[..., None]).flatten(-2)).unflatten(
        -1, v.shape[-2:]
    )
    kept = since_start[:, :, :, -1].exp()[:, :, :, None, :, None]
    if state is None:
        state = torch.zeros_like(added[:, :, 0])
    before = []
    for kept_i, added_i in zip(kept.unbind(2), added.unbind(2), strict=True):
        before.append(state)
        state = torch.addcmul(added_i, state, kept_i)
    carried = (q @ torch.stack(before, 2).flatten(-2)).unflatten(-1, v.shape[-2:])
    y = torch.addcmul(inner, carried, since_start.exp()[..., None])
    return y.flatten(2, 3)[:, :, :num_tokens], state


def _within_chunks(
    q: Tensor, k: Tensor, v: Tensor, since_start: Tensor, *, diagonal: bool
) -> Tensor:
    """Outputs from tokens of the same chunk: (B, G, chunks, C, R, D)."""
    decay = decay_between(since_start.mT, diagonal=diagonal)
    scores = (q @ k.mT)[..., None, :, :] * decay
    return (scores @ v.transpose(-3, -2)).transpose(-3, -2)


def ssd_state(k: Tensor, v: Tensor, log_decay: Tensor, *, state: Tensor | None = None) -> Tensor:
    """The last state of `ssd`, by one product over time, with the same arguments."""
    weight = decay_to_end(log_decay.mT).mT
    added = (k.mT @ (v * weight[..., None]).flatten(-2)).unflatten(-1, v.shape[-2:])
    if state is None:
        return added
    return torch.addcmul(added, state, log_decay.sum(2).exp()[:, :, None, :, None])
