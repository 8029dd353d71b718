"""silu(gate) up, the middle of a gated MLP (SwiGLU), on any backend.

    y = gate sigmoid(gate) up

Letters: E width of a row.
"""

from __future__ import annotations

from torch import Tensor

from flash_frac.ops.backends import choose


def swiglu(gate: Tensor, up: Tensor, backend: str = "auto") -> Tensor:
    """silu(gate) up (..., E), computed in float32 and returned in the dtype of both.

    Args:
        gate: (..., E); half of a (..., 2 E) projection needs no copy.
        up: like gate, in shape and dtype.
        backend: as in `frac_scan`. "triton" keeps only gate and up for the gradient.

    Example:
        >>> y = down_proj(swiglu(gate_proj(x), up_proj(x)))
    """
    if up.shape != gate.shape or up.dtype != gate.dtype:
        raise ValueError(
            f"up must have the shape {tuple(gate.shape)} and dtype {gate.dtype} of gate, "
            f"got {tuple(up.shape)} and {up.dtype}"
        )
    return choose("swiglu", backend, gate)(gate, up)
