"""A linear layer on a few vectors, with a norm before and a residual after, as one operator.

Letters: B vectors, E inputs, O outputs.
"""

from torch import Tensor

from flash_frac.ops.custom_ops.operator import operator
from flash_frac.ops.triton.gemv import MOST_VECTORS, gemv
from flash_frac.ops.triton.launch import refusal


def fused_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + weight RMSNorm(x) + bias, rounded once, at the end; it has no gradient.

    Args:
        x: (B, E), its last axis contiguous, at most MOST_VECTORS rows.
        weight: (O, E), contiguous; bias: (O,) or None.
        norm_weight: (E,) of the norm, with its eps; None for no norm.
        residual: (B, O), contiguous, or None.

    Returns:
        (B, O), in the dtype of x.
    """
    if reason := refusal(x):
        raise ValueError(f"fused_norm_linear cannot run here: {reason}")
    if x.ndim != 2 or x.shape[0] > MOST_VECTORS or x.stride(1) != 1:
        raise ValueError(
            f"x must be at most {MOST_VECTORS} vectors (B, E), contiguous in the last axis, "
            f"got shape {tuple(x.shape)} with strides {x.stride()}"
        )
    num_outputs, size = weight.shape
    for name, tensor, shape in (
        ("weight", weight, (num_outputs, x.shape[1])),
        ("bias", bias, (num_outputs,)),
        ("norm_weight", norm_weight, (size,)),
        ("residual", residual, (x.shape[0], num_outputs)),
    ):
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} must have shape {tuple(shape)} and be contiguous, "
                f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    return _norm_linear(x, weight, bias, norm_weight, eps, residual)


@operator("norm_linear")
def _norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    return gemv(x, weight, bias, norm_weight, eps, residual)


@_norm_linear.register_fake
def _(x, weight, bias, norm_weight, eps, residual):
    return x.new_empty(x.shape[0], weight.shape[0])
