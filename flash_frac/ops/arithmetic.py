"""Arithmetic shared by the kernels of all operators, and size helpers for their launchers.

Exponentials, a logarithm, a reciprocal and a sigmoid, accurate to the last digit of float32;
Triton's own are fast and approximate. Importing this module imports triton.

Naming in all kernels: i_ program index, o_ offsets, p_ pointer (or a tuple of pointers), b_ block
of values, m_ mask, CAPS constexpr; a comment such as # [C, BD] gives the shape of a block.
"""

from __future__ import annotations

from itertools import pairwise

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1). Fixed at import,
# as it is for the kernels themselves.
INTERPRETED: bool = knobs.runtime.interpret


def block_size(size: int, *, smallest: int = 16) -> int:
    """The next power of two >= `size`, at least `smallest`; matrix products need 16."""
    return max(smallest, 1 << (size - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. Triton's own also works in kernels, but is slow on the host."""
    return -(-a // b)


def row_stride(x: Tensor) -> int | None:
    """Row stride of x (..., E) in elements; None if no single stride covers all rows."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    # The stride of an axis of size 1 is meaningless.
    axes = [i for i in range(x.ndim - 1) if x.shape[i] != 1]
    for i, j in pairwise(axes):
        if x.stride(i) != x.stride(j) * x.shape[j]:
            return None
    return x.stride(axes[-1]) if axes else x.shape[-1]


@triton.jit
def exp_parts(x):
    """scale, p with exp(x) = scale + scale p, for x <= 88; below -88 exp(x) is 0; NaN stays NaN.

    scale = 2^n and p = expm1(x - n log 2), so that exp(x) - 1 = scale p + (scale - 1) cancels
    nothing. Accurate to about 1 ulp; tl.exp is only so for small x, and there is no tl.expm1.
    """
    x = tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL)
    # Adding 1.5 2^23 rounds to an integer and leaves it in the lowest bits.
    shifted = x * 1.4426950408889634 + 12582912.0
    n = shifted - 12582912.0
    r = (x - n * 0.693359375) + n * 2.1219444005469057e-4
    # Minimax fit of (expm1(r) - r) / r^2 on |r| <= log(2) / 2; relative error of expm1 1.4e-8.
    q = 0.04166722127479026 + r * (0.008367181319076726 + r * 0.0013882396385681158)
    p = r + r * r * (0.4999999804173173 + r * (0.1666653867909244 + r * q))
    scale = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
    return scale, p


@triton.jit
def exp(x):
    scale, p = exp_parts(x)
    return scale + scale * p


@triton.jit
def power(x, EXACT: tl.constexpr):
    """exp(x), to the last digit or approximately."""
    return exp(x) if EXACT else tl.exp(x)


@triton.jit
def expm1(x):
    scale, p = exp_parts(x)
    return scale * p + (scale - 1)


@triton.jit
def log(x):
    """log of a positive normal number, as in fdlibm: x = 2^k (1 + f), s = f / (2 + f)."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    k = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1
    s = f / (2 + f)
    z = s * s
    series = z * (0.66666662693 + z * (0.40000972152 + z * (0.28498786688 + z * 0.24279078841)))
    half = 0.5 * f * f
    result = k * 0.693359375 + (f - (half - (s * (half + series) - k * 2.1219444005469057e-4)))
    return tl.where(x == x, result, x)


@triton.jit
def kept_parts(b_state, b_decay):
    """Two numbers whose sum is exp(b_decay) b_state; for a slow decay, b_state and a correction.

    After a very fast decay the sum is 0.
    """
    b_scale, b_p = exp_parts(b_decay)
    b_scaled = b_scale * b_state
    return b_scaled, b_p * b_scaled


@triton.jit
def decay_and_add(b_state, b_decay, b_added):
    """exp(b_decay) b_state + b_added; a slow decay costs one rounding of the state's magnitude."""
    b_kept, b_change = kept_parts(b_state, b_decay)
    return b_kept + (b_change + b_added)


@triton.jit
def reciprocal(x):
    """1 / x of a normal x, to half an ulp; plain 1 / x is off by up to two on a GPU.

    tl.div_rn is as accurate, but calls a subroutine that takes half of a kernel's registers.
    """
    inverse = 1 / x
    return tl.fma(inverse, tl.fma(-x, inverse, 1.0), inverse)


@triton.jit
def sigmoid(x):
    """sigmoid and its derivative, both computed without cancellation."""
    e = exp(-tl.abs(x))
    inverse = reciprocal(1 + e)
    return tl.where(x > 0, 1.0, e) * inverse, e * inverse * inverse
