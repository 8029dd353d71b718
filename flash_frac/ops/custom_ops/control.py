"""The controls as one operator: what `ops/control.py` computes, in one kernel each way.

Letters: B batch, T time, H heads, M modes, K = 3 dynamics logits a head (2 with a fixed alpha).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_frac.ops.control import Controls, ControlSettings, dynamics, log_prior
from flash_frac.ops.custom_ops.operator import operator
from flash_frac.ops.triton.control import ControlInputs, control_backward, control_forward
from flash_frac.ops.triton.launch import refusal

# The settings as what an operator can take: these as one list of floats, the rest one by one.
_RANGES = ("dt_min", "dt_max", "alpha_min", "alpha_max", "lambda_min", "lambda_max", "rho_eps")


def fused_controls(
    dyn_logits: Tensor,
    rw_logits: Tensor,
    dt_bias: Tensor,
    read_gate_logit: Tensor,
    write_gate_logit: Tensor,
    log_tau: Tensor,
    *,
    settings: ControlSettings,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Controls:
    """`controls` from the raw outputs of the projections, computed in float32.

    Args:
        dyn_logits: (B, T, 3 H), logits of delta, alpha and lam; (B, T, 2 H) with a fixed alpha.
        rw_logits: (B, T, 2 H M), logits of the read and the write weights.
        dt_bias: (H,), added to the logit of delta.
        read_gate_logit, write_gate_logit: (1,); their sigmoids multiply the logits.
        log_tau: (M,) log of the timescales.
        settings: ranges and switches.
        mask: (B, T), 0 at padding, which becomes an identity step: write 0, log_decay 0.
        dtype: of read and write.

    Returns:
        Controls(read, write, log_decay), each (B, T, H, M), contiguous; log_decay in float32.

    Example:
        >>> rw = rw_proj(u)
        >>> read, write, log_decay = fused_controls(
        ...     dyn_proj(x), rw, dt_bias, p_read, p_write, log_tau, settings=settings, dtype=u.dtype
        ... )
    """
    _check(dyn_logits, rw_logits, dt_bias, log_tau, mask, settings)
    log_tau = log_tau.float()
    prior = None
    if settings.prior == "exact" and (settings.read_prior or settings.write_prior):
        prior = _exact_prior(dyn_logits, log_tau, settings)
    return Controls(
        *_control(
            dyn_logits.contiguous(),
            rw_logits.contiguous(),
            dt_bias.float().contiguous(),
            read_gate_logit.float(),
            write_gate_logit.float(),
            log_tau.contiguous(),
            prior,
            None if mask is None else mask.contiguous(),
            *pack_settings(settings),
            dtype,
        )
    )


def _exact_prior(dyn_logits: Tensor, log_tau: Tensor, settings: ControlSettings) -> Tensor:
    """Logits (B, T, H, M) of the exact prior, left to torch because Triton has no atan2."""
    num_dynamics = 3 if settings.alpha_fixed is None else 2
    logits = dyn_logits.float().unflatten(-1, (num_dynamics, -1)).unbind(-2)
    alpha_logit = logits[1] if num_dynamics == 3 else None
    alpha = dynamics(logits[0], alpha_logit, logits[-1], settings).alpha
    return log_prior(alpha, log_tau, "exact").contiguous()


def _check(
    dyn_logits: Tensor,
    rw_logits: Tensor,
    dt_bias: Tensor,
    log_tau: Tensor,
    mask: Tensor | None,
    settings: ControlSettings,
) -> None:
    if reason := refusal(rw_logits) or refusal(dyn_logits):
        raise ValueError(f"fused_controls cannot run here: {reason}")
    num_heads, num_modes, size = dt_bias.shape[0], log_tau.shape[0], rw_logits.shape[:2]
    num_dynamics = 3 if settings.alpha_fixed is None else 2
    for name, tensor, shape in (
        ("dyn_logits", dyn_logits, (*size, num_dynamics * num_heads)),
        ("rw_logits", rw_logits, (*size, 2 * num_heads * num_modes)),
        ("mask", mask, size),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")


def pack_settings(settings: ControlSettings) -> tuple:
    """The settings as arguments of an operator, less the prior."""
    free = settings.alpha_fixed is None
    ranges = [getattr(settings, name) for name in _RANGES]
    if not free:
        ranges[2:4] = [settings.alpha_fixed] * 2
    switches = (settings.lambda_map, settings.read_prior, settings.write_prior)
    return (ranges, free, *switches, settings.normalization, settings.beta)


def unpack_settings(
    ranges: Sequence[float],
    free: bool,
    lambda_map: str,
    read_prior: bool,
    write_prior: bool,
    normalization: str,
    beta: str,
) -> ControlSettings:
    """The inverse of `pack_settings`."""
    return ControlSettings(
        **dict(zip(_RANGES, ranges, strict=True)),
        alpha_fixed=None if free else ranges[2],
        lambda_map=lambda_map,  # pyright: ignore[reportArgumentType]
        read_prior=read_prior,
        write_prior=write_prior,
        normalization=normalization,  # pyright: ignore[reportArgumentType]
        beta=beta,  # pyright: ignore[reportArgumentType]
    )


@operator("control")
def _control(
    dyn: Tensor,
    rw: Tensor,
    dt_bias: Tensor,
    read_gate: Tensor,
    write_gate: Tensor,
    log_tau: Tensor,
    prior: Tensor | None,
    mask: Tensor | None,
    ranges: Sequence[float],
    free: bool,
    lambda_map: str,
    read_prior: bool,
    write_prior: bool,
    normalization: str,
    beta: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = ControlInputs(dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask)
    settings = unpack_settings(
        ranges, free, lambda_map, read_prior, write_prior, normalization, beta
    )
    return control_forward(inputs, settings, dtype)


@_control.register_fake
def _(dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask, *settings):
    shape = (*rw.shape[:2], dt_bias.shape[0], log_tau.shape[0])
    read, write = (rw.new_empty(shape, dtype=settings[-1]) for _ in range(2))
    return read, write, rw.new_empty(shape, dtype=torch.float32)


@operator("control_backward")
def _control_backward(
    dread: Tensor,
    dwrite: Tensor,
    dlog_decay: Tensor,
    dyn: Tensor,
    rw: Tensor,
    dt_bias: Tensor,
    read_gate: Tensor,
    write_gate: Tensor,
    log_tau: Tensor,
    prior: Tensor | None,
    mask: Tensor | None,
    ranges: Sequence[float],
    free: bool,
    lambda_map: str,
    read_prior: bool,
    write_prior: bool,
    normalization: str,
    beta: str,
    need_log_tau: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = ControlInputs(dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask)
    settings = unpack_settings(
        ranges, free, lambda_map, read_prior, write_prior, normalization, beta
    )
    gradients = (dread.contiguous(), dwrite.contiguous(), dlog_decay.contiguous())
    return control_backward(inputs, gradients, settings, need_log_tau=need_log_tau)


@_control_backward.register_fake
def _(
    dread, dwrite, dlog_decay, dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask, *rest
):
    dlog_tau = torch.empty_like(log_tau) if rest[-1] else log_tau.new_empty(0)
    dprior = log_tau.new_empty(0) if prior is None else torch.empty_like(prior)
    gradients = (torch.empty_like(x) for x in (dyn, rw, dt_bias))
    return *gradients, log_tau.new_empty(2), dlog_tau, dprior


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.settings = inputs[8:-1]


def _gradients(ctx, dread, dwrite, dlog_decay):
    need_log_tau, has_prior = ctx.needs_input_grad[5], ctx.saved_tensors[6] is not None
    ddyn, drw, dbias, dgates, dlog_tau, dprior = _control_backward(
        dread, dwrite, dlog_decay, *ctx.saved_tensors, *ctx.settings, need_log_tau
    )
    dlog_tau = dlog_tau if need_log_tau else None
    dprior = dprior if has_prior else None
    gradients = (ddyn, drw, dbias, dgates[:1], dgates[1:], dlog_tau, dprior)
    return *gradients, None, *(None for _ in ctx.settings), None


_control.register_autograd(_gradients, setup_context=_save)
