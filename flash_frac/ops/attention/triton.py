"""Attention of one token to keys and values in buffers, on Triton alone and without gradients.

Letters: B sequences, H heads of queries, h of keys and values, S columns, D channels.
"""

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.attention.kernels import attend_kernel, join_kernel
from flash_frac.ops.backends import operator, triton_refusal

# Programs that keep a GPU busy, roughly.
PROGRAMS = 256
# Bytes of a block of keys, and the most columns of one; two blocks, and two of values, are in
# flight.
BLOCK, MOST_COLUMNS = 16384, 128
# Channels that a program has in registers.
MOST_CHANNELS = 256
# Spans of a query that are joined at a time.
SPANS = 16


def attend_step(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """y (B, H, D) of one token of each sequence, which sees the columns up to its position.

    Columns after it are not read, whatever the size of the buffers. Heads of queries that share a
    head of keys read it once.

    Args:
        q: (B, H, D), contiguous.
        k, v: (B, h, S, D), with the same strides, columns contiguous: the first S columns of
            longer buffers will do.
        positions: (B,), whole numbers from 0; from S on, all columns are seen.

    Example:
        >>> y = attend_step(q, keys[:, :, :room], values[:, :, :room], lengths, D**-0.5)
    """
    if reason := triton_refusal(q):
        raise ValueError(f"attend_step cannot run here: {reason}")
    batch, heads, channels = q.shape
    if channels > MOST_CHANNELS:
        raise ValueError(f"q must have at most {MOST_CHANNELS} channels, got {channels}")
    for name, x in (("k", k), ("v", v)):
        fits = x.ndim == 4 and (len(x), x.shape[3]) == (batch, channels) and x.dtype == q.dtype
        if not fits or heads % x.shape[1] or x.shape != k.shape:
            raise ValueError(
                f"{name} must have shape ({batch}, h, S, {channels}), h a divisor of {heads}, and "
                f"dtype {q.dtype}, got {tuple(x.shape)} and {x.dtype}"
            )
        if x.stride() != k.stride() or x.stride()[2:] != (channels, 1):
            raise ValueError(f"{name} must have contiguous columns, got strides {x.stride()}")
    if positions.shape != (batch,):
        raise ValueError(f"positions must have shape ({batch},), got {tuple(positions.shape)}")
    return attend_step_op(q.contiguous(), k, v, positions.contiguous(), scaling)


@operator("attend_step")
def attend_step_op(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """y like q, which is contiguous, as positions are."""
    (batch, heads, channels), (_, key_heads, num_columns, _) = q.shape, k.shape
    rows, width = batch * key_heads, block_size(channels)
    columns = min(BLOCK // (width * q.element_size()), MOST_COLUMNS)
    # Few rows are cut into many spans, so that all processors read.
    span = ceil_div(num_columns, max(1, PROGRAMS // rows))
    span = ceil_div(span, columns) * columns
    num_spans = ceil_div(num_columns, span)
    parts = q.new_empty(batch * heads, num_spans, channels, dtype=torch.float32)
    weights = q.new_empty(batch * heads, num_spans, dtype=torch.float32)
    y = torch.empty_like(q)
    with torch.cuda.device_of(q):
        attend_kernel[(num_spans, rows)](
            q, k, v, positions, parts, weights, num_columns, span, key_heads, heads // key_heads,
            channels, k.stride(0), k.stride(1), scaling,
            BG=block_size(heads // key_heads), BS=columns, BD=width, num_warps=4,
            num_stages=2,
        )  # fmt: skip
        join_kernel[(batch * heads,)](
            parts, weights, y, num_spans, channels, BN=SPANS, BD=width, num_warps=4
        )
    return y


@attend_step_op.register_fake
def _(q, k, v, positions, scaling):
    return torch.empty_like(q)
