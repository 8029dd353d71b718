"""The controls as an operator: from the raw outputs of a layer's projections, on any backend.

Letters: B batch, T time, H heads, M modes, K = 3 dynamics logits per head (2 with a fixed alpha).
"""

from __future__ import annotations

from torch import Tensor

from flash_frac.ops.backends import choose
from flash_frac.ops.control.reference import (
    ControlInputs,
    Controls,
    ControlSettings,
    num_dynamics,
)


def controls_from_logits(
    dyn_logits: Tensor,
    rw_logits: Tensor,
    dt_bias: Tensor,
    read_gate_logit: Tensor,
    write_gate_logit: Tensor,
    log_tau: Tensor,
    *,
    settings: ControlSettings,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Controls:
    """`controls` from raw projection outputs, in float32 (float64 for float64 inputs).

    Args:
        dyn_logits: (B, T, 3 H), logits of delta, alpha and lam; (B, T, 2 H) with a fixed alpha.
        rw_logits: (B, T, 2 H M), logits of the read and the write weights.
        dt_bias: (H,), added to the logit of delta.
        read_gate_logit, write_gate_logit: (1,); their sigmoids multiply the logits.
        log_tau: (M,) log of the timescales; (H, M) if heads have their own.
        settings: ranges and options.
        mask: (B, T), 0 at padding, which becomes an identity step: write 0, log_decay 0.
        backend: as in `frac_scan`.

    Returns:
        Controls(read, write, log_decay), each (B, T, H, M), contiguous.

    Example:
        >>> rw = rw_proj(u)
        >>> read, write, log_decay = controls_from_logits(
        ...     dyn_proj(x), rw, dt_bias, p_read, p_write, log_tau, settings=settings
        ... )
    """
    num_heads, num_modes, size = dt_bias.shape[0], log_tau.shape[-1], rw_logits.shape[:2]
    for name, tensor, shape in (
        ("dyn_logits", dyn_logits, (*size, num_dynamics(settings) * num_heads)),
        ("rw_logits", rw_logits, (*size, 2 * num_heads * num_modes)),
        ("log_tau", log_tau, (num_heads, num_modes)[-log_tau.ndim :]),
        ("mask", mask, size),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    inputs = ControlInputs(
        dyn_logits, rw_logits, dt_bias, read_gate_logit, write_gate_logit, log_tau, None, mask
    )
    return choose("controls", backend, rw_logits)(inputs, settings)
