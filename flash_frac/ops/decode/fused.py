"""The linear layers of a Frac layer's step, fused with what stands beside them. No gradients.

    projection_step  in_proj with the norm before it, and the convolution of its first half
    pair_step        rw_proj and dyn_proj, which do not depend on each other
    output_step      out_proj with the rest of the norm before it, and the residual

Each is one kernel, for one vector or a few with 8-bit weights ("gemv": `ops/decode/gemv.py`) or for
up to 64 ("product": `ops/decode/product.py`); sums over parts of the inputs need one more. Which of
the two a step uses, and whether any, is the choice of `step_kind`.
Letters: B batch, E inputs and O outputs of a layer, I inner width, K taps of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator
from flash_frac.ops.decode.gemv import LinearStep
from flash_frac.ops.decode.kernels import ConvStep
from flash_frac.ops.decode.linear import fused_norm_linear, launch_gemv
from flash_frac.ops.decode.plan import product_options, step_plan
from flash_frac.ops.decode.product import ProductInputs, join_kernel, product_kernel
from flash_frac.ops.decode.triton import check_step, early_options

# Outputs of a program of `join_kernel`.
JOINED = 256


def projection_step(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    eps: float,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    window: Tensor,
    *,
    kind: str,
    scale: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """weight RMSNorm(x), and silu of the convolution of its first I outputs.

    Args:
        x: (B, E), last axis contiguous.
        weight: (O, E), contiguous, with a scale (O,) if it is quantised.
        norm_weight: (E,) of the norm, with its eps.
        conv_weight: (I, 1, K), I <= O, the last tap for this token; conv_bias: (I,) or None.
        window: (B, I, K - 1) previous inputs of the convolution, contiguous; overwritten.
        kind: of `step_kind`.
        mask: (B,), 0 at padding, which leaves the window as it is.

    Returns:
        y (B, O) and u (B, I), in the dtype of x.
    """
    _check_kind(kind, scale)
    (batch, size), (channels, _, taps), num_outputs = x.shape, conv_weight.shape, weight.shape[0]
    if channels > num_outputs:
        raise ValueError(
            "conv_weight must have at most as many channels as weight has outputs "
            f"({num_outputs}), got {channels}"
        )
    shapes = [("weight", weight, (num_outputs, size)), ("scale", scale, (num_outputs,))]
    shapes += [("norm_weight", norm_weight, (size,)), ("conv_bias", conv_bias, (channels,))]
    shapes += [("conv_weight", conv_weight, (channels, 1, taps)), ("mask", mask, (batch,))]
    check_step("projection_step", x, [*shapes, ("window", window, (batch, channels, taps - 1))])
    mask = None if mask is None else mask.contiguous()
    parts = (norm_weight, eps, conv_weight, conv_bias, window, mask)
    return projection_step_op(x, weight, scale, *parts, kind, step_plan(x.device).early)


def pair_step(
    x: Tensor,
    weight: Tensor,
    other_x: Tensor,
    other_weight: Tensor,
    other_bias: Tensor | None,
    *,
    kind: str,
    scale: Tensor | None = None,
    other_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """weight x, and other_weight other_x + other_bias, of vectors (B, E) both.

    The rest is as in `projection_step`; weights are both quantised or both not.
    """
    _check_kind(kind, scale, other_scale)
    (batch, size), num, num_others = x.shape, weight.shape[0], other_weight.shape[0]
    shapes = [("weight", weight, (num, size)), ("other_weight", other_weight, (num_others, size))]
    shapes += [("scale", scale, (num,)), ("other_scale", other_scale, (num_others,))]
    check_step("pair_step", x, [*shapes, ("other_bias", other_bias, (num_others,))])
    if other_x.shape != (batch, size) or other_x.stride(1) != 1:
        raise ValueError(
            f"other_x must have shape {(batch, size)} and a contiguous last axis, "
            f"got {tuple(other_x.shape)} with strides {other_x.stride()}"
        )
    others = (other_x, other_weight, other_scale, other_bias)
    return pair_step_op(x, weight, scale, *others, kind, step_plan(x.device).early)


def output_step(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    eps: float,
    *,
    norm_weight: Tensor | None = None,
    squares: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """residual + weight RMSNorm(x), x (B, E).

    Args:
        norm_weight: (E,); a gemv norms x itself.
        squares: (B, S), the sums of squares of x before norm_weight was applied to it; for a
            product, in place of norm_weight.
        The rest is as in `projection_step`.
    """
    if (norm_weight is None) == (squares is None) or (squares is not None and scale is not None):
        raise ValueError(
            "output_step takes norm_weight, or squares and a weight that is not quantised"
        )
    early = step_plan(x.device).early
    if squares is None:
        options = {"scale": scale, "norm_weight": norm_weight, "eps": eps, "residual": residual}
        return fused_norm_linear(x, weight, early=early, **options)
    (batch, size), num_outputs = x.shape, weight.shape[0]
    shapes = [
        ("weight", weight, (num_outputs, size)),
        ("squares", squares, (batch, squares.shape[1])),
    ]
    check_step("output_step", x, [*shapes, ("residual", residual, (batch, num_outputs))])
    return output_step_op(x, weight, residual, squares, eps, early)


def _check_kind(kind: str, *scales: Tensor | None) -> None:
    if kind not in ("gemv", "product"):
        raise ValueError(f'kind must be "gemv" or "product", got {kind!r}')
    if kind == "product" and any(scale is not None for scale in scales):
        raise ValueError('a quantised weight needs kind="gemv", got "product"')


@operator("projection_step", mutates=("window",))
def projection_step_op(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    window: Tensor,
    mask: Tensor | None,
    kind: str,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """y (B, O) and u (B, I). Rows of x may be apart, the rest is contiguous."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    u = x.new_empty(x.shape[0], conv_weight.shape[0])
    conv = ConvStep(conv_weight, conv_bias, window, mask, u)
    if kind == "gemv":
        layer = LinearStep(x, norm_weight, weight, scale, None, None, y)
        launch_gemv(layer, conv=conv, eps=eps, early=early)
    else:
        layer = ProductInputs(x, norm_weight, weight, None, None, None, None, y)
        _launch_product(layer, conv=conv, eps=eps, early=early)
    return y, u


@projection_step_op.register_fake
def _(x, weight, scale, norm_weight, eps, conv_weight, *rest):
    return tuple(x.new_empty(x.shape[0], w.shape[0]) for w in (weight, conv_weight))


@operator("pair_step")
def pair_step_op(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    other_x: Tensor,
    other_weight: Tensor,
    other_scale: Tensor | None,
    other_bias: Tensor | None,
    kind: str,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """y of both layers. Rows of x and other_x may be apart, the rest is contiguous."""
    y, other = (x.new_empty(x.shape[0], w.shape[0]) for w in (weight, other_weight))
    if kind == "gemv":
        first = LinearStep(x, None, weight, scale, None, None, y)
        second = LinearStep(other_x, None, other_weight, other_scale, other_bias, None, other)
        launch_gemv(first, second, early=early)
    else:
        first = ProductInputs(x, None, weight, None, None, None, None, y)
        second = ProductInputs(other_x, None, other_weight, other_bias, None, None, None, other)
        _launch_product(first, second, early=early)
    return y, other


@pair_step_op.register_fake
def _(x, weight, scale, other_x, other_weight, *rest):
    return tuple(x.new_empty(x.shape[0], w.shape[0]) for w in (weight, other_weight))


@operator("output_step")
def output_step_op(
    x: Tensor, weight: Tensor, residual: Tensor, squares: Tensor, eps: float, early: bool
) -> Tensor:
    """y (B, O). Rows of x may be apart, the rest is contiguous."""
    batch, (num_outputs, size) = x.shape[0], weight.shape
    y = x.new_empty(batch, num_outputs)
    num = product_options(batch, num_outputs, size, x.dtype)["SPLITS"]
    sums = x.new_empty(num, batch, num_outputs, dtype=torch.float32) if num > 1 else None
    layer = ProductInputs(x, None, weight, None, residual, squares, sums, y)
    _launch_product(layer, eps=eps, early=early)
    if num > 1:
        with torch.cuda.device_of(x):
            join_kernel[(ceil_div(num_outputs, JOINED), batch)](
                layer, batch, num_outputs, size, eps, **_squares_options(layer),
                SPLITS=num, BO=JOINED, EARLY=early, num_warps=2, **early_options(early),
            )  # fmt: skip
    return y


@output_step_op.register_fake
def _(x, weight, residual, squares, eps, early):
    return torch.empty_like(residual)


def _squares_options(layer: ProductInputs) -> dict[str, int]:
    size = 0 if layer.squares is None else layer.squares.shape[1]
    return {"S": size, "BS": block_size(max(size, 1), smallest=1)}


def _launch_product(
    first: ProductInputs,
    second: ProductInputs | None = None,
    conv: ConvStep | None = None,
    *,
    eps: float = 0.0,
    early: bool,
) -> None:
    """Run one or two layers with equally many inputs; conv is of the first outputs of the first."""
    (num_outputs, size), batch = first.weight.shape, first.x.shape[0]
    num_second, stride_second = 0, 0
    if second is not None:
        num_second, stride_second = second.weight.shape[0], second.x.stride(0)
    total, splits = num_outputs + num_second, first.sums is not None
    options = product_options(batch, total, size, first.x.dtype, splits=splits)
    blocks = sum(ceil_div(num, options["BO"]) for num in (num_outputs, num_second))
    num_channels, taps = (0, 1) if conv is None else (conv.u.shape[1], conv.weight.shape[-1])
    grid = (blocks, ceil_div(batch, options["BB"]), options["SPLITS"])
    # What is fetched early must be aligned, as memory from torch is unless it is part of a tensor.
    fetched = [first.weight, *([] if second is None else [second.weight])]
    fetched += [] if conv is None else [conv.window]
    fetches = early and all(x.data_ptr() % 16 == 0 for x in fetched)
    with torch.cuda.device_of(first.x):
        product_kernel[grid](
            first, second, conv, batch, num_outputs, num_second, E=size,
            stride_x=first.x.stride(0), stride_x2=stride_second, eps=eps,
            num_channels=num_channels, K=taps, EARLY=early,
            FETCH=32 * options["num_warps"] if fetches else 0,
            **_squares_options(first), **options, **early_options(early),
        )  # fmt: skip
