"""The delta rule as a subject of `bench/ops.py`: our operator and fla's.

Both get the same inputs in bfloat16, except log_decay in float32.
Letters: B batch, T time, H heads, K key channels, D value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_frac.bench.ops import Subject
from flash_frac.bench.peers import Operation
from flash_frac.bench.timing import OURS
from flash_frac.ops import delta_scan
from flash_frac.ops.testing import DeltaInputs, random_delta_inputs

# B, T, H, K, D of a delta layer in the 1.3B model, on a GPU.
DELTA_SIZES = ([1, 16384, 16, 96, 192], [8, 4096, 16, 96, 192])


def our_delta(inputs: DeltaInputs, backend: str) -> Operation:
    def scan(*arguments: Tensor) -> Tensor:
        return delta_scan(*arguments, backend=backend).y

    return Operation(f"{OURS} {backend}", _shape(inputs), scan, inputs, True)


def fla_gated_delta_rule(inputs: DeltaInputs) -> Operation:
    """fla's operator on the same inputs, without scaling queries; q and k are already unit."""
    import fla  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore

    def rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        options: Any = {"scale": 1.0, "output_final_state": True}
        return chunk_gated_delta_rule(q=q, k=k, v=v, g=log_decay, beta=beta, **options)[0]

    name = f"fla {fla.__version__} gated_delta_rule"
    return Operation(name, _shape(inputs), rule, inputs, True)


def _shape(inputs: DeltaInputs) -> dict[str, int]:
    """H, M (the key channels) and D."""
    heads, channels = inputs.v.shape[2:]
    return {"H": heads, "M": inputs.k.shape[-1], "D": channels}


DELTA = Subject(
    "delta ",
    random_delta_inputs,
    lambda inputs: inputs.to(torch.bfloat16),
    our_delta,
    {"gated_delta_rule": fla_gated_delta_rule},
    DELTA_SIZES,
)
