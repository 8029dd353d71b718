"""Attention over buffers of keys and values, of which only some columns are visible.

A query at position p sees keys at positions up to p and, with a window W, only those after p - W.
Padding also sees something, because attention to nothing is NaN.
Letters: B sequences, T queries, H heads of queries, h of keys and values, S columns, D channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from flash_frac.ops import uses_triton

# Maximum elements of a mask; more queries are computed in parts.
MASK_ELEMENTS = 2**27


def attend_one(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """Decode one token: y (B, H, 1, D) of q, which sees the columns up to `positions` (B, 1).

    Shapes and kernels do not depend on how many columns these are.
    """
    if uses_triton("auto", q):
        from flash_frac.ops.attention.triton import MOST_CHANNELS, attend_step

        if q.shape[-1] <= MOST_CHANNELS:
            return attend_step(q[:, :, 0], k, v, positions[:, 0], scaling)[:, :, None]
    return attend_one_plain(q, k, v, positions, scaling)


def attend_one_plain(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """`attend_one` with torch's kernels, which read all S columns."""
    visible = torch.arange(k.shape[2], device=k.device) <= positions
    # Heads that share keys are rows of one product, so keys are read once and never repeated.
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    y = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible[:, None, None], scale=scaling)
    return y.reshape(q.shape)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """y (B, H, T, D); queries are the last T of S tokens, and see themselves and earlier ones."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    if num_queries == num_keys:
        return _sdpa(q, k, v, scaling, causal=True)
    if q.device.type == "cuda" and q.dtype.itemsize == 2:
        # Flash attention needs no mask in memory.
        bias = causal_lower_right(num_queries, num_keys)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    columns = torch.arange(num_keys, device=q.device)[None]
    return attend_by_position(q, k, v, columns[:, -num_queries:], columns, scaling)


def attend_by_position(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """y (B, H, T, D); positions of queries (B or 1, T) and keys (B or 1, S), negative if empty."""
    part = max(1, MASK_ELEMENTS // (len(q) * k.shape[2]))
    keys, found = key_positions[:, None], []
    for rows, positions in zip(q.split(part, 2), query_positions.split(part, 1), strict=True):
        ages = positions[:, :, None] - keys
        visible = (ages >= 0) & (keys >= 0)
        if window is not None:
            visible &= ages < window
        found.append(_sdpa(rows, k, v, scaling, mask=visible[:, None]))
    return torch.cat(found, 2)


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int) -> Tensor:
    """Like `attend_causally`, with a window; the cost grows with T W, not T S."""
    before = k.shape[2] - q.shape[2]
    if not before and q.shape[2] <= window:
        return _sdpa(q, k, v, scaling, causal=True)
    columns, found = torch.arange(k.shape[2], device=q.device)[None], []
    for begin in range(before, k.shape[2], window):
        end, first = min(begin + window, k.shape[2]), max(0, begin - window + 1)
        seen = slice(first, end)
        found.append(
            attend_by_position(
                q[:, :, begin - before : end - before],
                k[:, :, seen],
                v[:, :, seen],
                columns[:, begin:end],
                columns[:, seen],
                scaling,
                window,
            )
        )
    return torch.cat(found, 2)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if mask is not None and groups > 1:
        # Kernels with a mask need one key head per query head.
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=k.shape[1] != q.shape[1],
    )
