"""The Triton backend of the controls: operators of torch.library and the launches behind them.

Letters: B batch, T time, H heads, M modes, K = 3 dynamics logits per head (2 with a fixed alpha).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div
from flash_frac.ops.backends import operator
from flash_frac.ops.control.kernels import (
    ControlGradients,
    ControlOutputs,
    Ranges,
    control_backward_kernel,
    control_forward_kernel,
)
from flash_frac.ops.control.reference import (
    MOST_DECAY,
    ControlInputs,
    Controls,
    ControlSettings,
    log_prior,
    num_dynamics,
    split_dynamics,
)

# Rows times modes per program, most rows and most heads. One warp: with 16 values per thread,
# threads hardly repeat the work of a row, and no reduction needs a barrier.
TILE, MOST_ROWS, MOST_HEADS, NUM_WARPS = 512, 128, 16, 1


def triton_controls(inputs: ControlInputs, settings: ControlSettings) -> Controls:
    """Backend "triton" of `controls_from_logits`, computed in float32."""
    log_tau, prior, mask = inputs.log_tau.float(), None, inputs.mask
    if settings.prior == "exact" and (settings.read_prior or settings.write_prior):
        # Computed in torch, because Triton has no atan2.
        alpha = split_dynamics(inputs.dyn.float(), inputs.dt_bias, settings).alpha
        prior = log_prior(alpha, log_tau, "exact").contiguous()
    return Controls(
        *control_op(
            inputs.dyn.contiguous(),
            inputs.rw.contiguous(),
            inputs.dt_bias.float().contiguous(),
            inputs.read_gate.float(),
            inputs.write_gate.float(),
            log_tau.contiguous(),
            prior,
            None if mask is None else mask.contiguous(),
            *kernel_settings(settings),
        )
    )


def kernel_settings(settings: ControlSettings) -> tuple[list[float], str]:
    """The settings as operator arguments, without the prior: ranges, and options as one string."""
    s, free = settings, settings.alpha_fixed is None
    ranges = Ranges(
        dt_min=s.dt_min,
        dt_max=s.dt_max,
        alpha_min=s.alpha_min if free else s.alpha_fixed,  # pyright: ignore[reportArgumentType]
        alpha_span=s.alpha_max - s.alpha_min,
        lambda_min=s.lambda_min,
        lambda_max=s.lambda_max,
        lambda_span=s.lambda_max - s.lambda_min,
        log_rho_min=math.log(s.rho_eps) if s.rho_eps else MOST_DECAY,
        log_rho_max=math.log1p(-s.rho_eps),
    )
    words = (num_dynamics(s), s.lambda_map, int(s.read_prior), int(s.write_prior))
    return list(ranges), " ".join(map(str, (*words, s.normalization, s.beta)))


@lru_cache(maxsize=64)
def kernel_options(switches: str) -> dict[str, Any]:
    """The kernels' constants by name, from the string of `kernel_settings`."""
    num, lambda_map, read_prior, write_prior, normalization, beta = switches.split()
    return {
        "K": int(num),
        "LAMBDA": lambda_map,
        "READ_PRIOR": read_prior == "1",
        "WRITE_PRIOR": write_prior == "1",
        "NORMALIZATION": normalization,
        "BETA": beta,
    }


def _launch(inputs: ControlInputs) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid, block sizes and launch options of both kernels."""
    num_tokens = inputs.rw.shape[0] * inputs.rw.shape[1]
    log_tau = inputs.log_tau
    return _plan(num_tokens, inputs.dt_bias.shape[0], log_tau.shape[-1], log_tau.ndim == 2)


@lru_cache(maxsize=1024)
def _plan(
    num_tokens: int, num_heads: int, num_modes: int, own_tau: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Cached, because computing it in Python takes as long as a launch."""
    modes_block = block_size(num_modes, smallest=1)
    num_rows = min(max(TILE // modes_block, 1), MOST_ROWS)
    heads_block = min(block_size(num_heads, smallest=1), num_rows, MOST_HEADS)
    tokens_block = num_rows // heads_block
    grid = (ceil_div(num_tokens, tokens_block), ceil_div(num_heads, heads_block))
    sizes = {"T": num_tokens, "H": num_heads, "M": num_modes, "OWN_TAU": own_tau}
    blocks = {"BT": tokens_block, "BH": heads_block, "BM": modes_block}
    return grid, {**sizes, **blocks, "num_warps": NUM_WARPS}


@operator("control")
def control_op(
    dyn: Tensor,
    rw: Tensor,
    dt_bias: Tensor,
    read_gate: Tensor,
    write_gate: Tensor,
    log_tau: Tensor,
    prior: Tensor | None,
    mask: Tensor | None,
    ranges: Sequence[float],
    switches: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """read, write and log_decay (B, T, H, M), float32."""
    inputs = ControlInputs(dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask)
    shape = (*rw.shape[:2], dt_bias.shape[0], log_tau.shape[-1])
    outputs = ControlOutputs(*(rw.new_empty(shape, dtype=torch.float32) for _ in range(3)))
    grid, options = _launch(inputs)
    with torch.cuda.device_of(rw):
        control_forward_kernel[grid](
            inputs, outputs, Ranges(*ranges), **options, **kernel_options(switches)
        )
    return tuple(outputs)  # pyright: ignore[reportReturnType]


@control_op.register_fake
def _(dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask, *settings):
    shape = (*rw.shape[:2], dt_bias.shape[0], log_tau.shape[-1])
    return tuple(rw.new_empty(shape, dtype=torch.float32) for _ in range(3))


@operator("control_backward")
def control_backward_op(
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
    switches: str,
    need_log_tau: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of dyn, rw, dt_bias, both gate logits, log_tau and prior.

    Both gates share one tensor (2,). An unneeded gradient of log_tau or prior is empty.
    """
    inputs = ControlInputs(dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask)
    grid, options = _launch(inputs)
    num_programs, new = grid[0] * grid[1], log_tau.new_empty
    # With a bank per head, a program's partial sum covers only its own heads.
    num_tau = grid[0] if log_tau.ndim == 2 else num_programs
    gradients = ControlGradients(
        dyn=torch.empty_like(dyn),
        rw=torch.empty_like(rw),
        prior=None if prior is None else torch.empty_like(prior),
        dt_bias=new(grid[0], dt_bias.shape[0]),
        gates=new(num_programs, 2),
        log_tau=new(num_tau, *log_tau.shape) if need_log_tau else None,
    )
    with torch.cuda.device_of(rw):
        control_backward_kernel[grid](
            inputs,
            ControlOutputs(dread.contiguous(), dwrite.contiguous(), dlog_decay.contiguous()),
            gradients,
            Ranges(*ranges),
            **options,
            **kernel_options(switches),
        )
    dlog_tau = new(0) if gradients.log_tau is None else gradients.log_tau.sum(0)
    dprior = new(0) if gradients.prior is None else gradients.prior
    sums = (gradients.dt_bias.sum(0), gradients.gates.sum(0))
    return gradients.dyn, gradients.rw, *sums, dlog_tau, dprior


@control_backward_op.register_fake
def _(
    dread, dwrite, dlog_decay, dyn, rw, dt_bias, read_gate, write_gate, log_tau, prior, mask, *rest
):
    dlog_tau = torch.empty_like(log_tau) if rest[-1] else log_tau.new_empty(0)
    dprior = log_tau.new_empty(0) if prior is None else torch.empty_like(prior)
    gradients = (torch.empty_like(x) for x in (dyn, rw, dt_bias))
    return *gradients, log_tau.new_empty(2), dlog_tau, dprior


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.settings = inputs[8:]


def _gradients(ctx, dread, dwrite, dlog_decay):
    # Unpacked once: activation checkpointing recomputes saved tensors, and frees them once read.
    saved = ctx.saved_tensors
    need_log_tau, has_prior = ctx.needs_input_grad[5], saved[6] is not None
    ddyn, drw, dbias, dgates, dlog_tau, dprior = control_backward_op(
        dread, dwrite, dlog_decay, *saved, *ctx.settings, need_log_tau
    )
    dlog_tau = dlog_tau if need_log_tau else None
    dprior = dprior if has_prior else None
    gradients = (ddyn, drw, dbias, dgates[:1], dgates[1:], dlog_tau, dprior)
    return *gradients, None, *(None for _ in ctx.settings)


control_op.register_autograd(_gradients, setup_context=_save)
