"""Mixing weights inside chunks in plain PyTorch, and their gradients: `mix.py` without a kernel.

    gamma[t, k] = sum_m read[t, m] write[k, m] exp(sum of log_decay over k < p <= t)        t >= k

A pair t > k is split at the boundary between the two halves of the smallest aligned block that
holds both, as in the kernels. Every exponent is a sum of log_decay between two tokens, never a
difference of larger sums: a token that forgets everything (log_decay down to -inf) costs the others
no accuracy.

Letters: C tokens of a chunk, M modes; all tensors share their leading axes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Cost per token and head: log2(C)*M exponentials, C products and M*D/C elements of state.
CHUNK = 32
# Tokens in half a block, level by level.
HALVES = (1, 2, 4, 8, 16)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Split (..., C, M) into the earlier and later halves (..., C / 2 half, half, M) of blocks."""
    earlier, later = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return earlier, later


def _join(earlier: Tensor, later: Tensor) -> Tensor:
    """The inverse of `_halves`."""
    return torch.stack((earlier, later), -3).flatten(-4, -2)


class Sums(NamedTuple):
    """Sums of log_decay (..., C, M).

    levels: per level, sums from the start of a later half up to and including a token, and from
        after a token to the end of an earlier half, both (..., C / 2 half, half, M);
    prefix, suffix: the same for the whole chunk, (..., C, M); total: (..., M).
    """

    levels: list[tuple[Tensor, Tensor]]
    prefix: Tensor
    suffix: Tensor
    total: Tensor


def decay_sums(log_decay: Tensor) -> Sums:
    total = prefix = log_decay
    suffix = torch.zeros_like(log_decay)
    levels = []
    for half in HALVES:
        (prefix_0, prefix_1), (suffix_0, suffix_1) = _halves(prefix, half), _halves(suffix, half)
        levels.append((prefix_1, suffix_0))
        total_0, total_1 = _halves(total, 1)
        prefix = _join(prefix_0, prefix_1 + total_0)
        suffix = _join(suffix_0 + total_1, suffix_1)
        total = (total_0 + total_1).squeeze(-2)
    return Sums(levels, prefix, suffix, total.squeeze(-2))


def mix(read: Tensor, write: Tensor, sums: Sums) -> Tensor:
    """gamma (..., C, C), zero above the diagonal."""
    gamma = (read * write).sum(-1)[..., None, None]
    for half, (prefix, suffix) in zip(HALVES, sums.levels, strict=True):
        q, k = _halves(read, half)[1] * prefix.exp(), _halves(write, half)[0] * suffix.exp()
        # With few rows a matrix product does not pay.
        pairs = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) if half < 4 else q @ k.mT
        earlier, later = gamma.unflatten(-3, (-1, 2)).unbind(-3)
        gamma = torch.cat([F.pad(earlier, (0, half)), torch.cat([pairs, later], -1)], -2)
    return gamma.squeeze(-3)


def mix_backward(
    dgamma: Tensor, read: Tensor, write: Tensor, sums: Sums, dsums: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of read and write in gamma, and of log_decay.

    dsums: gradients of prefix, suffix and total through the states. A token's own term has no
    decay.
    """
    same = dgamma.diagonal(dim1=-2, dim2=-1)[..., None]
    dread, dwrite, terms = same * write, same * read, []
    for half, (prefix, suffix) in zip(HALVES, sums.levels, strict=True):
        r, w = _halves(read, half)[1], _halves(write, half)[0]
        decay_r, decay_w = prefix.exp(), suffix.exp()
        blocks = dgamma.unflatten(-1, (-1, 2, half))[..., 0, :].unflatten(-3, (-1, 2, half))
        pairs = blocks[..., 1, :, :, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        r_part, w_part = (pairs @ (w * decay_w)) * decay_r, (pairs.mT @ (r * decay_r)) * decay_w
        terms.append((r * r_part, w * w_part))
        dread = dread + _join(torch.zeros_like(r_part), r_part)
        dwrite = dwrite + _join(w_part, torch.zeros_like(w_part))
    # Propagate gradients of the sums to their terms, the longest blocks first.
    dprefix, dsuffix, dtotal = dsums
    dtotal = dtotal[..., None, :]
    for half, (term_r, term_w) in zip(HALVES[::-1], terms[::-1], strict=True):
        (prefix_0, prefix_1), (suffix_0, suffix_1) = _halves(dprefix, half), _halves(dsuffix, half)
        halves = (dtotal + prefix_1.sum(-2), dtotal + suffix_0.sum(-2))
        dtotal = torch.stack(halves, -2).flatten(-3, -2)
        dprefix = _join(prefix_0, prefix_1 + term_r)
        dsuffix = _join(suffix_0 + term_w, suffix_1)
    return dread, dwrite, dprefix + dtotal
