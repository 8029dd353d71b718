"""Operators for decoding, in Triton only and without gradients.

Convolution and scan of one token, which update their states in place, and linear layers on a few
vectors. Weights of linear layers may be quantised: int8 or float8_e4m3fn, with one scale per row.

Letters: B batch, H heads, M modes, D head channels, I = H D inner width, K taps, E inputs, O
outputs of a linear layer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator, triton_refusal
from flash_frac.ops.control.kernels import Ranges
from flash_frac.ops.control.reference import ControlInputs, ControlSettings, num_dynamics
from flash_frac.ops.control.triton import kernel_options, kernel_settings
from flash_frac.ops.decode.kernels import (
    GateInputs,
    control_step_kernel,
    conv_step_kernel,
    gemv_kernel,
    swiglu_gemv_kernel,
)
from flash_frac.ops.norm.triton import triton_norm

# Channels per program. Few, so that a single sequence still occupies many multiprocessors.
CONV_CHANNELS, STATE_CHANNELS = 128, 64
# Beyond this number of vectors, tensor cores win. So they do for several vectors beyond this number
# of 16-bit weights, because each vector reads all weights (one H200, docs/log.md). 8-bit weights
# have no such limit: for a product they are dequantised, which moves five times the bytes that the
# kernel reads. Not measured yet.
MOST_VECTORS, MOST_READ = 4, 2**24
# Matrix elements that a program has in flight, and the most of them along a row. 8-bit weights have
# twice as many, for the same number of bytes.
GEMV_TILE, LONGEST_ROW = 8192, 2048
# Dtypes of quantised weights.
QUANTISED = (torch.int8, torch.float8_e4m3fn)


def fused_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """silu of the convolution at one token; then append it to the window. No gradient.

    Args:
        x: (B, I), last axis contiguous, such as half of a (B, 2 I) projection.
        weight: (I, 1, K), the last tap for this token; bias: (I,) or None.
        window: (B, I, K - 1) previous inputs, contiguous; overwritten.
        mask: (B,), 0 at padding, which leaves the window as it is.

    Returns:
        u (B, I), like x.
    """
    (batch, channels), taps = x.shape, weight.shape[-1]
    shapes = [("weight", weight, (channels, 1, taps)), ("bias", bias, (channels,))]
    shapes += [("window", window, (batch, channels, taps - 1)), ("mask", mask, (batch,))]
    _check("fused_conv_step", x, shapes)
    return conv_step_op(x, weight, bias, window, None if mask is None else mask.contiguous())


def fused_control_step(
    u: Tensor,
    dyn_logits: Tensor,
    rw_logits: Tensor,
    dt_bias: Tensor,
    read_gate_logit: Tensor,
    write_gate_logit: Tensor,
    log_tau: Tensor,
    state: Tensor,
    *,
    settings: ControlSettings,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
    gate_bias: float = 0.0,
    skip: Tensor | None = None,
) -> Tensor:
    """Controls and `frac_step` of one token, then direct term and gate. No gradient.

    Args:
        u: (B, H, D), contiguous.
        dyn_logits (B, 3 H), or 2 H with a fixed alpha; rw_logits (B, 2 H M); dt_bias (H,), gate
            logits (1,) and log_tau (M,) or (H, M), all as in `controls_from_logits`.
        state: (B, H, M, D) float32, contiguous; overwritten.
        settings: with the asymptotic prior.
        mask: (B,), 0 at padding, which leaves the state as it is.
        gate: (B, H D), last axis contiguous; gate_bias is added to it. None for y alone.
        skip: (H, D) weight of the direct term, only with a gate; None for no direct term.

    Returns:
        y, or (y + skip u) silu(gate + gate_bias) with a gate; (B, H, D), like u.
    """
    if settings.prior != "asymptotic":
        raise ValueError(
            f"fused_control_step needs the asymptotic prior, got {settings.prior!r}; "
            "use controls_from_logits and frac_step"
        )
    (batch, heads, channels), modes = u.shape, log_tau.shape[-1]
    shapes = [
        ("u", u, (batch, heads, channels)),
        ("dyn_logits", dyn_logits, (batch, num_dynamics(settings) * heads)),
        ("rw_logits", rw_logits, (batch, 2 * heads * modes)),
        ("dt_bias", dt_bias, (heads,)),
        ("read_gate_logit", read_gate_logit, (1,)),
        ("write_gate_logit", write_gate_logit, (1,)),
        ("log_tau", log_tau, (heads, modes)[-log_tau.ndim :]),
        ("state", state, (batch, heads, modes, channels)),
        ("mask", mask, (batch,)),
        ("skip", skip, (heads, channels)),
    ]
    _check("fused_control_step", u.flatten(1), shapes)
    if gate is not None and (gate.shape != (batch, heads * channels) or gate.stride(1) != 1):
        raise ValueError(
            f"gate must have shape {(batch, heads * channels)} and a contiguous last axis, "
            f"got {tuple(gate.shape)} with strides {gate.stride()}"
        )
    times = (t.float() for t in (dt_bias, read_gate_logit, write_gate_logit, log_tau))
    mask = None if mask is None else mask.contiguous()
    inputs = (u, dyn_logits, rw_logits, *times, state, mask, gate, gate_bias, skip)
    return control_step_op(*inputs, *kernel_settings(settings))


def fused_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + weight RMSNorm(x) + bias, rounded once at the end. No gradient.

    Args:
        x: (B, E), last axis contiguous, at most MOST_VECTORS rows.
        weight: (O, E), contiguous; bias: (O,) or None.
        scale: (O,), one factor per row of a quantised weight (a dtype of QUANTISED).
        norm_weight: (E,) of the norm, with its eps; None for no norm.
        residual: (B, O), contiguous, or None.

    Returns:
        (B, O), in the dtype of x.
    """
    _check_vectors(x)
    (batch, size), num_outputs = x.shape, weight.shape[0]
    shapes = [("weight", weight, (num_outputs, size)), ("bias", bias, (num_outputs,))]
    shapes += [("norm_weight", norm_weight, (size,)), ("residual", residual, (batch, num_outputs))]
    _check("fused_norm_linear", x, [*shapes, ("scale", scale, (num_outputs,))])
    _check_scale("weight", weight, scale)
    return norm_linear_op(x, weight, scale, bias, norm_weight, eps, residual)


def norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_norm_linear` for any number of vectors; many vectors use tensor cores."""
    num = x.shape[0]
    little = num == 1 or scale is not None or num * weight.numel() <= MOST_READ
    if num <= MOST_VECTORS and little:
        options = {"scale": scale, "norm_weight": norm_weight, "eps": eps, "residual": residual}
        return fused_norm_linear(x, weight, bias, **options)
    if norm_weight is not None:
        x = triton_norm(x, norm_weight, eps, x.dtype)
    if scale is not None:
        weight = _dequantised(weight, scale, x.dtype)
    if residual is not None and bias is None:
        return torch.addmm(residual, x, weight.t())
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def _dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights (O, E) in a dtype, rounded once.

    Scaled before a product and not after it: sums of unscaled values exceed float16.
    """
    # One kernel reads int8 and writes the result; torch does not multiply float8 by other dtypes.
    values = weight if weight.dtype is torch.int8 else weight.to(dtype)
    return torch.mul(values, scale[:, None], out=weight.new_empty(weight.shape, dtype=dtype))


def fused_norm_swiglu(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
) -> Tensor:
    """silu(gate_weight n) (up_weight n), n = RMSNorm(x), rounded once at the end. No gradient.

    Args:
        x: (B, E), last axis contiguous, at most MOST_VECTORS rows.
        gate_weight, up_weight: (O, E), contiguous.
        norm_weight: (E,) of the norm, with its eps.
        gate_scale, up_scale: (O,), as in `fused_norm_linear`.

    Returns:
        (B, O), in the dtype of x.
    """
    _check_vectors(x)
    size, num_outputs = x.shape[1], gate_weight.shape[0]
    shapes: list = [("gate_weight", gate_weight, (num_outputs, size))]
    shapes += [("up_weight", up_weight, (num_outputs, size)), ("norm_weight", norm_weight, (size,))]
    scales = {"gate_scale": gate_scale, "up_scale": up_scale}
    shapes += [(name, scale, (num_outputs,)) for name, scale in scales.items()]
    _check("fused_norm_swiglu", x, shapes)
    _check_scale("gate_weight", gate_weight, gate_scale)
    _check_scale("up_weight", up_weight, up_scale)
    return norm_swiglu_op(x, gate_weight, up_weight, gate_scale, up_scale, norm_weight, eps)


def _check_scale(name: str, weight: Tensor, scale: Tensor | None) -> None:
    if (weight.dtype in QUANTISED) != (scale is not None):
        given = "a scale" if scale is not None else "no scale"
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in QUANTISED)
        raise ValueError(
            f"{name} of {kinds} has a scale, any other none; got {weight.dtype} and {given}"
        )


def _check_vectors(x: Tensor) -> None:
    if x.ndim != 2 or x.shape[0] > MOST_VECTORS:
        raise ValueError(
            f"x must be at most {MOST_VECTORS} vectors (B, E), got shape {tuple(x.shape)}"
        )


def _check(function: str, x: Tensor, shapes: list[tuple[str, Tensor | None, tuple]]) -> None:
    if reason := triton_refusal(x):
        raise ValueError(f"{function} cannot run here: {reason}")
    if x.stride(1) != 1:
        raise ValueError(f"x must be contiguous in its last axis, got strides {x.stride()}")
    for name, tensor, shape in shapes:
        if tensor is None:
            continue
        if tensor.shape != shape or not (tensor.is_contiguous() or name == "mask"):
            raise ValueError(
                f"{name} must have shape {tuple(shape)} and be contiguous, "
                f"got {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, *(tensor for _, tensor, _ in shapes))
    ):
        raise ValueError(f"{function} has no gradient; call it under torch.no_grad()")


@operator("conv_step", mutates=("window",))
def conv_step_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, mask: Tensor | None
) -> Tensor:
    """u (B, I) like x. Rows of x may be strided; the rest is contiguous."""
    batch, channels = x.shape
    u = x.new_empty(batch, channels)
    with torch.cuda.device_of(x):
        conv_step_kernel[(ceil_div(channels, CONV_CHANNELS), batch)](
            x, weight, bias, window, mask, u, channels, x.stride(0),
            K=weight.shape[-1], BI=CONV_CHANNELS, num_warps=1,
        )  # fmt: skip
    return u


@conv_step_op.register_fake
def _(x, weight, bias, window, mask):
    return x.new_empty(x.shape)


@operator("control_step", mutates=("state",))
def control_step_op(
    u: Tensor,
    dyn: Tensor,
    rw: Tensor,
    dt_bias: Tensor,
    read_gate: Tensor,
    write_gate: Tensor,
    log_tau: Tensor,
    state: Tensor,
    mask: Tensor | None,
    gate: Tensor | None,
    gate_bias: float,
    skip: Tensor | None,
    ranges: Sequence[float],
    switches: str,
) -> Tensor:
    """y, or z with a gate, (B, H, D) like u. Rows of gate may be strided, the rest not."""
    (batch, heads, channels), modes = u.shape, log_tau.shape[-1]
    y = torch.empty_like(u)
    width = min(block_size(channels), STATE_CHANNELS)
    inputs = ControlInputs(dyn, rw, dt_bias, read_gate, write_gate, log_tau, None, mask)
    with torch.cuda.device_of(u):
        control_step_kernel[(ceil_div(channels, width), heads, batch)](
            u, inputs, state, GateInputs(gate, skip), y, Ranges(*ranges),
            H=heads, M=modes, D=channels, OWN_TAU=log_tau.ndim == 2,
            stride_gate=0 if gate is None else gate.stride(0), gate_bias=gate_bias,
            **kernel_options(switches),
            BM=block_size(modes, smallest=1), BD=width, num_warps=1,
        )  # fmt: skip
    return y


@control_step_op.register_fake
def _(u, *rest):
    return torch.empty_like(u)


@operator("norm_linear")
def norm_linear_op(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    """y (B, O) in the dtype of x, whose rows may be apart; the rest is contiguous."""
    batch, num_outputs = x.shape[0], weight.shape[0]
    y = x.new_empty(batch, num_outputs)
    rows, options = _gemv_launch(weight, GEMV_TILE)
    with torch.cuda.device_of(x):
        gemv_kernel[(batch, ceil_div(num_outputs, rows))](
            x, norm_weight, weight, scale, bias, residual, y, num_outputs,
            stride_x=x.stride(0), eps=eps, **options,
        )  # fmt: skip
    return y


def _gemv_launch(weight: Tensor, tile: int) -> tuple[int, dict[str, int]]:
    """Matrix rows per program, block sizes and launch options."""
    num_outputs, size = weight.shape
    length = min(block_size(size), LONGEST_ROW)
    # Few outputs are spread over more programs, to occupy all multiprocessors.
    spread, packed = num_outputs < 2048, 2 if weight.itemsize == 1 else 1
    rows = 1 if spread else packed * tile // length
    return rows, {"E": size, "BO": rows, "BE": length, "num_warps": 4 if spread else 4 * packed}


@norm_linear_op.register_fake
def _(x, weight, scale, bias, norm_weight, eps, residual):
    return x.new_empty(x.shape[0], weight.shape[0])


@operator("norm_swiglu")
def norm_swiglu_op(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """y (B, O) in the dtype of x, whose rows may be apart; the rest is contiguous."""
    batch, num_outputs = x.shape[0], gate_weight.shape[0]
    y = x.new_empty(batch, num_outputs)
    # Each of the two matrices gets half of the tile.
    rows, options = _gemv_launch(gate_weight, GEMV_TILE // 2)
    with torch.cuda.device_of(x):
        swiglu_gemv_kernel[(batch, ceil_div(num_outputs, rows))](
            x, norm_weight, gate_weight, up_weight, gate_scale, up_scale, y, num_outputs,
            stride_x=x.stride(0), eps=eps, **options,
        )  # fmt: skip
    return y


@norm_swiglu_op.register_fake
def _(x, gate_weight, up_weight, gate_scale, up_scale, norm_weight, eps):
    return x.new_empty(x.shape[0], gate_weight.shape[0])
