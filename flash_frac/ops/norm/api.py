"""RMS norms, plain and after a gate, on any backend.

    y = z / sqrt(mean(z^2) + eps) weight,       z = x   or   (x + D u) silu(gate + gate_bias)

Letters: B batch, T time, E width, H heads, D head channels, I = H D inner width. In a shape D is
the number of head channels; in the formula it is the paper's skip weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_frac.ops.backends import choose


def norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """RMSNorm(x) (..., E) with weight (E,).

    Args:
        dtype: of the result; that of x if None. Sums are always float32 or wider.
        backend: as in `frac_scan`; "triton" takes rows up to 8,192 wide.
    """
    _check("x", x, weight)
    return choose("norm", backend, x)(x, weight, eps, dtype or x.dtype)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    gate_bias: float = 0.0,
    *,
    skip: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:
    """RMSNorm((x + D u) silu(gate + gate_bias)) (B, T, I), in the dtype of the gate.

    Args:
        x: (B, T, H, D), the scan's output.
        gate: (B, T, I); half of a (B, T, 2 I) projection needs no copy.
        weight: (I,).
        skip: the direct term as D (H, D) and u (B, T, H, D); None to leave it out.
        backend: as in `norm`.

    Example:
        >>> x, gate = in_proj(hidden).chunk(2, -1)
        >>> y = gated_norm(scanned, gate, weight, 1e-6, skip=(mixer.D, u))
    """
    _check("gate", gate, weight)
    if x.shape[:-2] != gate.shape[:-1] or x.shape[-2] * x.shape[-1] != gate.shape[-1]:
        raise ValueError(
            f"x must have shape {(*gate.shape[:-1], 'H', 'D')} with H D = {gate.shape[-1]} to fit "
            f"the gate, got {tuple(x.shape)}"
        )
    if skip is not None:
        for name, tensor, shape in (("D", skip[0], x.shape[-2:]), ("u", skip[1], x.shape)):
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}"
                )
    return choose("gated_norm", backend, gate)(x, gate, weight, eps, gate_bias, skip)


def _check(name: str, x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have shape {tuple(x.shape[-1:])} like the rows of {name}, "
            f"got {tuple(weight.shape)}"
        )
