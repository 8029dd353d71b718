"""Operators for decoding, in Triton only and without gradients.

Convolution and scan of one token, which update their states in place. Linear layers are in
`ops/decode/linear.py`.

Letters: B batch, H heads, M modes, D head channels, I = H D inner width, K taps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator, triton_refusal
from flash_frac.ops.control.kernels import Ranges
from flash_frac.ops.control.reference import ControlInputs, ControlSettings, num_dynamics
from flash_frac.ops.control.triton import kernel_options, kernel_settings
from flash_frac.ops.decode.kernels import (
    ConvStep,
    GateInputs,
    control_step_kernel,
    conv_step_kernel,
)

# Channels per program. Few, so that a single sequence still occupies many multiprocessors.
CONV_CHANNELS, STATE_CHANNELS = 128, 64


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
    check_step("fused_conv_step", x, shapes)
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
    norm_weight: Tensor | None = None,
    squares: Tensor | None = None,
    early: bool = False,
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
        norm_weight: (H D,) multiplies the result, only with a gate; the rest of an RMS norm needs
            squares.
        squares: (B, S), as of `empty_squares`, overwritten: their sum over S is that of the squares
            of the result before norm_weight. Given with norm_weight, or None.
        early: whether the previous kernel may still run, if it is one of a step.

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
        ("norm_weight", norm_weight, (heads * channels,)),
        ("squares", squares, (batch, heads * _num_blocks(channels))),
    ]
    check_step("fused_control_step", u.flatten(1), shapes)
    if gate is not None and (gate.shape != (batch, heads * channels) or gate.stride(1) != 1):
        raise ValueError(
            f"gate must have shape {(batch, heads * channels)} and a contiguous last axis, "
            f"got {tuple(gate.shape)} with strides {gate.stride()}"
        )
    if (norm_weight is None) != (squares is None) or (gate is None and squares is not None):
        raise ValueError("norm_weight and squares must be given together, and with a gate")
    times = (t.float() for t in (dt_bias, read_gate_logit, write_gate_logit, log_tau))
    mask = None if mask is None else mask.contiguous()
    inputs = (u, dyn_logits, rw_logits, *times, state, mask, gate, gate_bias, skip)
    norm = (norm_weight, squares, early)
    return control_step_op(*inputs, *norm, *kernel_settings(settings))


def empty_squares(u: Tensor, num_heads: int) -> Tensor:
    """Memory for the `squares` of `fused_control_step`, for u (B, I)."""
    size = num_heads * _num_blocks(u.shape[1] // num_heads)
    return u.new_empty(u.shape[0], size, dtype=torch.float32)


def _num_blocks(channels: int) -> int:
    """Programs of `control_step_kernel` per head."""
    return ceil_div(channels, _width(channels))


def _width(channels: int) -> int:
    return min(block_size(channels), STATE_CHANNELS)


def early_options(early: bool) -> dict[str, bool]:
    """Launch options of a kernel with EARLY."""
    return {"launch_pdl": True} if early else {}


def check_step(function: str, x: Tensor, shapes: list[tuple[str, Tensor | None, tuple]]) -> None:
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
            x, ConvStep(weight, bias, window, mask, u), channels, x.stride(0),
            K=weight.shape[-1], BI=CONV_CHANNELS, num_warps=1,
        )  # fmt: skip
    return u


@conv_step_op.register_fake
def _(x, weight, bias, window, mask):
    return x.new_empty(x.shape)


@operator("control_step", mutates=("state", "squares"))
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
    norm_weight: Tensor | None,
    squares: Tensor | None,
    early: bool,
    ranges: Sequence[float],
    switches: str,
) -> Tensor:
    """y, or z with a gate, (B, H, D) like u. Rows of gate may be strided, the rest not."""
    (batch, heads, channels), modes = u.shape, log_tau.shape[-1]
    y = torch.empty_like(u)
    inputs = ControlInputs(dyn, rw, dt_bias, read_gate, write_gate, log_tau, None, mask)
    gating = GateInputs(gate, skip, norm_weight, squares)
    with torch.cuda.device_of(u):
        control_step_kernel[(_num_blocks(channels), heads, batch)](
            u, inputs, state, gating, y, Ranges(*ranges),
            H=heads, M=modes, D=channels, OWN_TAU=log_tau.ndim == 2,
            stride_gate=0 if gate is None else gate.stride(0), gate_bias=gate_bias,
            **kernel_options(switches),
            BM=block_size(modes, smallest=1), BD=_width(channels),
            EARLY=early, num_warps=1, **early_options(early),
        )  # fmt: skip
    return y


@control_step_op.register_fake
def _(u, *rest):
    return torch.empty_like(u)
