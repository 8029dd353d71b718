"""Sample the next token of each sequence, with its own settings, on any backend.

Letters: B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_frac.ops.backends import choose
from flash_frac.ops.sample.reference import WIDTH


def sample(
    logits: Tensor, table: Tensor, seen: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Tokens (B,) int64, and their log-probabilities (B,) float32 under the softmax of the logits.

    Applies repetition penalty, temperature, top-k, top-p and min-p in this order, like Hugging
    Face `generate`. Temperature 0 takes the most likely token, the first of equal ones. Filters
    keep or drop tokens of equal logits together. A row without a distribution (NaN or +inf
    anywhere, or only -inf) gets token -1 and log-probability NaN, and `seen` is unchanged.

    Args:
        logits: (B, V), float32 or narrower.
        table: (B, 10) int32, contiguous; columns as in `reference.fields`. Increments `drawn`.
        seen: (B, V) bool, the tokens to penalise. Chosen tokens are marked in it.
        backend: as in `frac_scan`.

    Example:
        >>> tokens, logprobs = sample(logits, settings.table, seen)
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must have shape (B, V), got {tuple(logits.shape)}")
    batch = len(logits)
    if table.shape != (batch, WIDTH) or table.dtype != torch.int32 or not table.is_contiguous():
        raise ValueError(
            f"table must be a contiguous ({batch}, {WIDTH}) of torch.int32, "
            f"got {tuple(table.shape)} of {table.dtype}"
        )
    if seen.shape != logits.shape or seen.dtype != torch.bool:
        raise ValueError(
            f"seen must have the shape {tuple(logits.shape)} of the logits and dtype torch.bool, "
            f"got {tuple(seen.shape)} and {seen.dtype}"
        )
    return choose("sample", backend, logits)(logits, table, seen)
