"""The Triton backend of `sample`: an operator of torch.library and the launches behind it.

Letters: B batch, V vocabulary.
"""

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator
from flash_frac.ops.sample.kernels import (
    Scratch,
    draw_kernel,
    finish_kernel,
    part_kernel,
    threshold_kernel,
)
from flash_frac.ops.sample.reference import COLDEST, GROUP, SPREAD, WIDTH, fields

# Of the threshold search: logits that a program holds at a time, pivots per pass over the row, and
# warps.
BLOCK, PIVOTS, WARPS = 2048, 4, 16


def triton_sample(logits: Tensor, table: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `sample`, with the same arguments."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if seen.stride(1) != 1:
        raise ValueError(f"seen must have contiguous rows, got strides {seen.stride()}")
    tokens, logprobs, _ = sample_op(logits, table, seen)
    return tokens, logprobs


@operator("sample", mutates=["table", "seen"])
def sample_op(logits: Tensor, table: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probabilities, and the facts of `Scratch`. Rows are contiguous."""
    batch, size = logits.shape
    num_parts = ceil_div(size, GROUP)
    tokens, logprobs, facts = _outputs(logits)
    scratch = Scratch(
        parts=logprobs.new_empty(batch, 4, num_parts),
        args=logprobs.new_empty(batch, 2, num_parts, dtype=torch.int32),
        facts=facts,
    )
    marks, settings = seen.view(torch.uint8), fields(table)
    inputs = (logits, marks, settings, scratch)
    strides = {"stride_logits": logits.stride(0), "stride_seen": marks.stride(0), "WIDTH": WIDTH}
    joined = {"num_parts": num_parts, "BN": block_size(num_parts), **strides}
    with torch.cuda.device_of(logits):
        part_kernel[(num_parts, batch)](*inputs, V=size, BV=GROUP, num_warps=4, **strides)
        threshold_kernel[(batch,)](
            *inputs, tokens, V=size, COLDEST=COLDEST, NP=PIVOTS, BV=min(BLOCK, block_size(size)),
            num_warps=WARPS, **joined,
        )  # fmt: skip
        draw_kernel[(num_parts, batch)](
            *inputs, V=size, COLDEST=COLDEST, BW=SPREAD, num_warps=4, **strides
        )
        # One warp, because it reads what it writes.
        finish_kernel[(batch,)](*inputs, tokens, logprobs, V=size, num_warps=1, **joined)
    return tokens, logprobs, facts


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = len(logits)
    tokens = logits.new_empty(batch, dtype=torch.int64)
    logprobs = logits.new_empty(batch, dtype=torch.float32)
    return tokens, logprobs, logprobs.new_empty(batch, 3)


@sample_op.register_fake
def _(logits, table, seen):
    return _outputs(logits)
