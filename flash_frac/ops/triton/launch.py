"""What all launchers share: where kernels can run, how sizes are cut, and the launch itself."""

from __future__ import annotations

from typing import Any

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
    """a / b rounded up. Triton's own is ten times slower on the host, and is called everywhere."""
    return -(-a // b)


# Compiled kernels by their arguments, and the constants that complete these.
_COMPILED: dict[tuple, tuple[Any, tuple]] = {}
_MOST_COMPILED = 10000


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), at a fraction of its time on the host.

    Triton binds and inspects every argument anew; here a kernel is found again by the values of its
    arguments, and of tensors by what Triton looks at. Arguments come in order, constants last.
    """
    if INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    kinds = ((x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in arguments)
    key = (id(kernel), torch.cuda.current_device(), *kinds, *constants.values())
    known = _COMPILED.get(key)
    if known is not None:
        compiled, rest = known
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)
        return
    if len(_COMPILED) >= _MOST_COMPILED:
        # Triton keeps the kernels: only the short way to them is lost.
        _COMPILED.clear()
    compiled = kernel[grid](*arguments, **constants)
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    _COMPILED[key] = compiled, rest
