"""Attention of one token over a KV cache, in Triton only and without gradients.

Letters: B sequences, H query heads, h heads of keys and values, S columns, D channels.
"""

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.attention.kernels import attend_kernel, join_kernel
from flash_frac.ops.backends import operator, triton_refusal

# Roughly how many programs keep a GPU busy.
PROGRAMS = 256
# Bytes and most columns of a block of keys. Two blocks of keys and two of values are in flight.
BLOCK, MOST_COLUMNS = 16384, 128
# Most channels that a program holds in registers.
MOST_CHANNELS = 256
# Spans of a query joined at a time.
SPANS = 16


def attend_step(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """y (B, H, D) of one token of each sequence, which attends to columns up to its position.

    Later columns are not read, whatever the size of the buffers. Query heads that share a key head
    read it once.

    Args:
        q: (B, H, D), contiguous.
        k, v: (B, h, S, D), with the same strides and contiguous columns, such as the first S
            columns of longer buffers.
        positions: (B,), integers from 0; a position of S or more sees all columns.

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
    """y like q; q and positions are contiguous."""
    (batch, heads, channels), (_, key_heads, num_columns, _) = q.shape, k.shape
    rows, width = batch * key_heads, block_size(channels)
    columns = min(BLOCK // (width * q.element_size()), MOST_COLUMNS)
    # Few rows are cut into many spans, to occupy all multiprocessors.
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
