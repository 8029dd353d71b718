"""How decoding steps run on each kind of GPU, and launch parameters of products."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import INTERPRETED, block_size, ceil_div

# Beyond this number of vectors a kernel does not let each of them read all weights.
MOST_VECTORS = 4
# Dtypes of quantised weights.
QUANTISED = (torch.int8, torch.float8_e4m3fn)
# Programs that occupy a large GPU, and vectors of one program at most.
PROGRAMS, MOST_ROWS = 96, 64


class StepPlan(NamedTuple):
    """How steps run on a kind of GPU.

    Attributes:
        fuses: put the convolution into the kernel of `in_proj`, and `rw_proj` with `dyn_proj` into
            one, instead of running them side by side.
        most_products: multiply 2 to this number of vectors by `product_kernel`; cuBLAS takes more.
        early: launch each kernel before the previous one ends (programmatic dependent launch).
    """

    fuses: bool
    most_products: int
    early: bool


# Nothing else is measured yet: `python benchmarks/model.py --parts plans` compares the rest.
DEFAULT = StepPlan(fuses=False, most_products=0, early=False)
# Plans of compute capabilities, and plans to try, by device type.
PLANS: dict[tuple[int, int] | str, StepPlan] = {}


def step_plan(device: torch.device) -> StepPlan:
    """The plan for a device."""
    if device.type in PLANS:
        return PLANS[device.type]
    return DEFAULT if device.type != "cuda" else PLANS.get(_capability(device), DEFAULT)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def step_kind(x: Tensor, weights: list[Tensor]) -> str | None:
    """How to run a fused step of vectors x (B, E): "gemv", "product", or None for not at all."""
    plan, num = step_plan(x.device), x.shape[0]
    if not plan.fuses:
        return None
    quantised = [weight.dtype in QUANTISED for weight in weights]
    if num == 1 or (all(quantised) and num <= MOST_VECTORS):
        return "gemv"
    is_read = x.dtype.itemsize == 2 or INTERPRETED
    return "product" if num <= plan.most_products and is_read and not any(quantised) else None


@lru_cache(maxsize=1024)
def product_options(
    num: int, num_outputs: int, size: int, dtype: torch.dtype, *, splits: bool = True
) -> dict[str, Any]:
    """Block sizes and launch options of `product_kernel` for this many vectors and outputs.

    Args:
        splits: whether outputs may come from sums over parts of the inputs.
    """
    vectors, outputs, num_splits = min(block_size(num), MOST_ROWS), 64, 1
    blocks = ceil_div(num_outputs, outputs)
    if blocks < PROGRAMS:
        if vectors > 16 and splits:
            # Sums over parts of the inputs, because many programs would each read all vectors.
            num_splits = min(8, block_size(ceil_div(PROGRAMS, blocks), smallest=1))
        else:
            outputs = vectors = 16
    # Bytes of a row in flight at once.
    num_bytes = 1024 if vectors == outputs == 16 else 256
    depth = min(block_size(size), num_bytes // dtype.itemsize)
    num_splits = min(num_splits, max(1, size // depth))
    return {
        "BB": vectors,
        "BO": outputs,
        "BE": depth,
        "SPLITS": 1 << (num_splits.bit_length() - 1),
        "STAGES": 4 if vectors == 16 and outputs == 64 else 3,
        "PRECISION": "tf32" if dtype.itemsize == 2 else "ieee",
        "num_warps": 4,
    }
