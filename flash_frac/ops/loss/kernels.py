"""The loss kernel: from logits to losses, optionally overwriting the logits by their gradient.

    loss = logsumexp(logits) - logits[label],      dlogits = softmax(logits) - onehot(label)

A program reads a row twice, the second time from cache, and writes it once.
Letters: N tokens, V vocabulary in blocks BV.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, expm1, log, power

# Elements per block, and its warps.
BLOCK, WARPS = 4096, 8


@triton.jit
def cross_entropy_kernel(
    p_logits, p_labels, p_losses, V, ignore_index,
    BV: tl.constexpr, GRADIENT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Losses p_losses (N,) float32 of p_logits (N, V) and p_labels (N,), whose gradient replaces
    the logits if GRADIENT.

    Both are 0 at ignored labels, and NaN for a label outside the vocabulary.
    """
    i_row = tl.program_id(0).to(tl.int64)
    p_row, o_v = p_logits + i_row * V, tl.arange(0, BV)
    label = tl.load(p_labels + i_row)
    # [BV]. The initial value is finite, so that no difference of two infinities gives NaN.
    b_max, b_sum = tl.full([BV], -3e38, tl.float32), tl.zeros([BV], tl.float32)
    for start in range(0, V, BV):
        o = start + o_v
        b_x = tl.load(p_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_x)
        b_sum = b_sum * power(b_max - b_new, EXACT) + power(b_x - b_new, EXACT)
        b_max = b_new
    largest = tl.max(b_max, 0)
    # Not added to the largest logit, so that the small loss of a confident token keeps its digits.
    rest = log(tl.sum(b_sum * power(b_max - largest, EXACT), 0))
    is_inside = (label >= 0) & (label < V)
    at_label = tl.load(p_row + label, mask=is_inside, other=float("nan")).to(tl.float32)
    loss, is_counted = rest - (at_label - largest), label != ignore_index
    tl.store(p_losses + i_row, tl.where(is_counted, loss, 0.0))
    if GRADIENT:
        # p - 1 without cancellation.
        b_at_label = tl.zeros([BV], tl.float32) - loss
        spoilt = tl.where(is_inside, 0.0, float("nan"))
        for start in range(0, V, BV):
            o = start + o_v
            b_x = tl.load(p_row + o, mask=o < V, other=float("-inf")).to(tl.float32)
            b_d = tl.where(
                o == label, expm1(b_at_label), power(b_x - largest - rest, EXACT) + spoilt
            )
            b_d = tl.where(is_counted, b_d, 0.0)
            tl.store(p_row + o, b_d.to(p_logits.dtype.element_ty), mask=o < V)


def cross_entropy_(logits: Tensor, labels: Tensor, ignore_index: int, gradient: bool) -> Tensor:
    """Losses (N,) float32 of logits (N, V) and labels (N,); with `gradient`, the gradient of their
    sum overwrites the logits."""
    losses = logits.new_empty(labels.shape, dtype=torch.float32)
    num_tokens, size = logits.shape
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(num_tokens,)](
            logits, labels, losses, size, ignore_index,
            BV=min(block_size(size), BLOCK), GRADIENT=gradient,
            EXACT=logits.dtype == torch.float32, num_warps=WARPS,
        )  # fmt: skip
    return losses
