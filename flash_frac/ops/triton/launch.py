"""What all launchers share: where kernels can run, and how sizes are cut."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

# Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1). Fixed at import,
# as it is for the kernels themselves.
INTERPRETED: bool = knobs.runtime.interpret


def refusal(x: Tensor) -> str | None:
    """Why a kernel cannot run on tensors like x, or None."""
    if INTERPRETED:
        # Its bfloat16 is silently wrong, and its float16 untested.
        return None if x.dtype == torch.float32 else "the Triton interpreter computes float32 only"
    if x.device.type != "cuda":
        return f"Triton kernels need CUDA tensors, got {x.device}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"Triton kernels compute bfloat16, float16 and float32, got {x.dtype}"
    return None


def block_size(size: int, *, smallest: int = 16) -> int:
    """The power of two that holds `size`; matrix products need at least 16."""
    return max(smallest, 1 << (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. Not Triton's, which may be used in kernels and is slow on the host."""
    return -(-a // b)
