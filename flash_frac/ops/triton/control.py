"""The controls in one pass over their logits, forward and backward; formulas in `ops/control.py`.

A program takes BT tokens of BH heads with all modes, as rows [BR] and row by mode [BR, BM]. All is
computed in float32. The backward recomputes from the inputs; what is summed over tokens (gradients
of dt_bias, gates and log_tau) leaves each program as one partial sum, so results are reproducible.
Letters: T tokens of all sequences, H heads, M modes, K = 3 dynamics logits (2 if alpha is fixed).
"""

# Kernels are not the Python that pyright takes them for, and triton.cdiv is not typed as an int.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.control import ControlSettings
from flash_frac.ops.triton.exponential import exp, expm1, log
from flash_frac.ops.triton.launch import block_size, ceil_div

# Rows times modes of a program, the most rows and the most heads among them. One warp, because with
# 16 values a thread hardly two threads repeat the work of a row, and no reduction needs a barrier.
_TILE, _MAX_ROWS, _MAX_HEADS, _NUM_WARPS = 512, 128, 16, 1
# As in `ops/control.py`: exp(-88) is the smallest normal float32.
_MOST_DECAY = -88.0


@triton.jit
def clamped_softplus(x, low, high):
    """clamp(log(1 + e^x), low, high) and its derivative, which is 0 where the clamp acts."""
    e = exp(-tl.abs(x))
    one_plus = 1 + e
    # The last term is what rounding took from 1 + e.
    log1p = log(one_plus) + (e - (one_plus - 1)) / one_plus
    value = tl.where(x > 0, x, 0.0) + log1p
    slope = tl.where(x > 0, 1.0, e) / one_plus
    slope = tl.where((value >= low) & (value <= high), slope, 0.0)
    return tl.clamp(value, low, high, propagate_nan=tl.PropagateNan.ALL), slope


@triton.jit
def reciprocal(x):
    """1 / x of a normal x, to half an ulp, where 1 / x alone is off by up to two on a GPU.

    tl.div_rn is as exact, but calls a subroutine that costs half the registers of a kernel.
    """
    inverse = 1 / x
    return tl.fma(inverse, tl.fma(-x, inverse, 1.0), inverse)


@triton.jit
def sigmoid(x):
    """sigmoid and its derivative, neither from a difference of near numbers."""
    e = exp(-tl.abs(x))
    inverse = reciprocal(1 + e)
    return tl.where(x > 0, 1.0, e) * inverse, e * inverse * inverse


@triton.jit
def _block(T, H, M, BT: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):
    """First token, int64; tokens after it [BR], heads [BR] and modes [BM], and their masks."""
    i_t = tl.program_id(0).to(tl.int64) * BT
    o_t, o_h = tl.arange(0, BT * BH) // BH, tl.program_id(1) * BH + tl.arange(0, BT * BH) % BH
    o_m = tl.arange(0, BM)
    return i_t, o_t, o_h, o_m, (o_t < T - i_t) & (o_h < H), o_m < M


@triton.jit
def _program():
    return tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def head_dynamics(
    p_dyn, p_bias, i_t, o_t, o_h, m_r, H, ranges, K: tl.constexpr, LAMBDA: tl.constexpr
):
    """delta, alpha, lam [BR], and the derivative of each by its logit."""
    dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span = ranges
    p_row = p_dyn + i_t * K * H + (o_t * K * H + o_h)
    b_logit = tl.load(p_row, mask=m_r, other=0.0).to(tl.float32)
    b_logit += tl.load(p_bias + o_h, mask=m_r, other=0.0)
    b_delta, b_ddelta = clamped_softplus(b_logit, dt_min, dt_max)
    if K == 3:
        b_s, b_ds = sigmoid(tl.load(p_row + H, mask=m_r, other=0.0).to(tl.float32))
        b_alpha, b_dalpha = alpha_min + alpha_span * b_s, alpha_span * b_ds
    else:
        b_alpha, b_dalpha = tl.zeros_like(b_delta) + alpha_min, tl.zeros_like(b_delta)
    b_logit = tl.load(p_row + (K - 1) * H, mask=m_r, other=0.0).to(tl.float32)
    if LAMBDA == "sigmoid":
        b_s, b_ds = sigmoid(b_logit)
        b_lam, b_dlam = lambda_min + lambda_span * b_s, lambda_span * b_ds
    else:
        b_lam, b_dlam = clamped_softplus(b_logit, lambda_min, lambda_max)
    return b_delta, b_alpha, b_lam, b_ddelta, b_dalpha, b_dlam


@triton.jit
def mode_decay(b_delta, b_alpha, b_lam, b_log_tau, low, high):
    """log(lam) / alpha [BR]; log_decay and where its clamp lets gradients pass [BR, BM]."""
    b_power = tl.div_rn(log(b_lam), b_alpha)
    b_rate = b_delta * exp(tl.minimum(b_power, 88.0, propagate_nan=tl.PropagateNan.ALL))
    b_log_rho = -b_rate[:, None] * exp(-b_log_tau)[None, :]
    b_log_decay = tl.clamp(b_log_rho, low, high, propagate_nan=tl.PropagateNan.ALL)
    return b_power, b_log_decay, b_log_rho == b_log_decay


@triton.jit
def mode_logits(p_rw, p_gate, b_prior, at, SIDE: tl.constexpr, PRIOR: tl.constexpr):
    """Logits of the read (SIDE 0) or write weights [BR, BM], raw and with gate and prior; gate."""
    i_rw, o_rw, m_rm, side = at
    b_raw = tl.load(p_rw + i_rw + SIDE * side + o_rw, mask=m_rm, other=0.0).to(tl.float32)
    b_gate, b_slope = sigmoid(tl.load(p_gate))
    b_z = b_gate * b_raw
    if PRIOR:
        b_z += b_prior
    return b_raw, b_z, b_gate, b_slope


@triton.jit
def mode_prior(p_prior, b_alpha, b_log_tau, i_rm, o_rm, m_rm):
    # [BR, BM]
    if p_prior is None:
        b_prior = -b_alpha[:, None] * b_log_tau[None, :]
    else:
        b_prior = tl.load(p_prior + i_rm + o_rm, mask=m_rm, other=0.0)
    return b_prior


@triton.jit
def mode_weights(b_z, m_m, NORMALIZATION: tl.constexpr):
    if NORMALIZATION == "softmax":
        b_z = tl.where(m_m[None, :], b_z, float("-inf"))
        b_e = tl.where(m_m[None, :], exp(b_z - tl.max(b_z, 1)[:, None]), 0.0)
        # The gradient takes a mean by these weights, which must add up to 1 as nearly as can be.
        b_w = b_e * reciprocal(tl.sum(b_e, 1))[:, None]
    elif NORMALIZATION == "sigmoid":
        b_w, _ = sigmoid(b_z)
    else:
        b_w = b_z
    return b_w


@triton.jit
def _weights_backward(b_z, b_w, b_dw, NORMALIZATION: tl.constexpr):
    if NORMALIZATION == "softmax":
        b_dz = b_w * (b_dw - tl.sum(b_w * b_dw, 1)[:, None])
    elif NORMALIZATION == "sigmoid":
        _, b_slope = sigmoid(b_z)
        b_dz = b_dw * b_slope
    else:
        b_dz = b_dw
    return b_dz


@triton.jit
def _logits_backward(p_drw, p_dgate, b_raw, b_gate, b_slope, b_dz, at, SIDE: tl.constexpr):
    """Store the gradient of the raw logits, and this program's part of that of the gate logit."""
    i_rw, o_rw, m_rm, side = at
    tl.store(p_drw + i_rw + SIDE * side + o_rw, b_gate * b_dz, mask=m_rm)
    tl.store(p_dgate + 2 * _program() + SIDE, b_slope * tl.sum(tl.sum(b_dz * b_raw, 1), 0))


@triton.jit
def _dynamics_backward(
    p_ddyn, p_dbias, gradients, i_t, o_t, o_h, m_r, H,
    K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the dynamics logits, and this program's part of that of dt_bias."""
    b_ddelta, b_dalpha, b_dlam = gradients
    p_row = p_ddyn + i_t * K * H + (o_t * K * H + o_h)
    tl.store(p_row, b_ddelta, mask=m_r)
    if K == 3:
        tl.store(p_row + H, b_dalpha, mask=m_r)
    tl.store(p_row + (K - 1) * H, b_dlam, mask=m_r)
    o_bias = tl.program_id(1) * BH + tl.arange(0, BH)
    b_dbias = tl.sum(tl.reshape(b_ddelta, (BT, BH)), 0)
    p_dbias += tl.program_id(0).to(tl.int64) * H
    tl.store(p_dbias + o_bias, b_dbias, mask=o_bias < H)


@triton.jit
def control_forward_kernel(
    p_dyn, p_rw, p_bias, p_read_gate, p_write_gate, p_log_tau, p_prior, p_mask,
    p_read, p_write, p_log_decay,
    T, H: tl.constexpr, M: tl.constexpr,
    dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span, rho_min, rho_max,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i_t, o_t, o_h, o_m, m_r, m_m = _block(T, H, M, BT, BH, BM)
    m_rm = m_r[:, None] & m_m[None, :]
    # From the first token on, offsets fit 32 bits.
    i_rm, o_rm = i_t * H * M, (o_t * H + o_h)[:, None] * M + o_m[None, :]
    at = (2 * i_rm, o_rm + (o_t * H * M)[:, None], m_rm, H * M)
    ranges = (dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span)
    b_delta, b_alpha, b_lam, _, _, _ = head_dynamics(
        p_dyn, p_bias, i_t, o_t, o_h, m_r, H, ranges, K, LAMBDA
    )
    # [BM]
    b_log_tau = tl.load(p_log_tau + o_m, mask=m_m, other=0.0)
    # [BR, BM]
    _, b_log_decay, _ = mode_decay(b_delta, b_alpha, b_lam, b_log_tau, rho_min, rho_max)
    b_beta = -expm1(b_log_decay)
    if BETA == "exact_zoh":
        b_beta = b_beta * (1 / b_lam)[:, None]
    b_prior = mode_prior(p_prior, b_alpha, b_log_tau, i_rm, o_rm, m_rm)
    _, b_z, _, _ = mode_logits(p_rw, p_read_gate, b_prior, at, 0, READ_PRIOR)
    tl.store(p_read + i_rm + o_rm, mode_weights(b_z, m_m, NORMALIZATION), mask=m_rm)
    _, b_z, _, _ = mode_logits(p_rw, p_write_gate, b_prior, at, 1, WRITE_PRIOR)
    b_write = mode_weights(b_z, m_m, NORMALIZATION) * b_beta
    if p_mask is not None:
        m_token = (tl.load(p_mask + i_t + o_t, mask=m_r, other=0) != 0)[:, None]
        b_write = tl.where(m_token, b_write, 0.0)
        b_log_decay = tl.where(m_token, b_log_decay, 0.0)
    tl.store(p_write + i_rm + o_rm, b_write, mask=m_rm)
    tl.store(p_log_decay + i_rm + o_rm, b_log_decay, mask=m_rm)


@triton.jit
def control_backward_kernel(
    p_dyn, p_rw, p_bias, p_read_gate, p_write_gate, p_log_tau, p_prior, p_mask,
    p_dread, p_dwrite, p_dlog_decay, p_ddyn, p_drw, p_dprior, p_dbias, p_dgates, p_dlog_tau,
    T, H: tl.constexpr, M: tl.constexpr,
    dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span, rho_min, rho_max,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i_t, o_t, o_h, o_m, m_r, m_m = _block(T, H, M, BT, BH, BM)
    m_rm = m_r[:, None] & m_m[None, :]
    # From the first token on, offsets fit 32 bits.
    i_rm, o_rm = i_t * H * M, (o_t * H + o_h)[:, None] * M + o_m[None, :]
    at = (2 * i_rm, o_rm + (o_t * H * M)[:, None], m_rm, H * M)
    ranges = (dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span)
    # [BR]
    b_delta, b_alpha, b_lam, b_delta_slope, b_alpha_slope, b_lam_slope = head_dynamics(
        p_dyn, p_bias, i_t, o_t, o_h, m_r, H, ranges, K, LAMBDA
    )
    # [BM]
    b_log_tau = tl.load(p_log_tau + o_m, mask=m_m, other=0.0)
    # [BR, BM]; gradients are 0 outside the mask, and with them all that is summed below.
    b_dread = tl.load(p_dread + i_rm + o_rm, mask=m_rm, other=0.0).to(tl.float32)
    m_live = m_rm
    if p_mask is not None:
        m_live &= (tl.load(p_mask + i_t + o_t, mask=m_r, other=0) != 0)[:, None]
    b_dwrite = tl.load(p_dwrite + i_rm + o_rm, mask=m_live, other=0.0).to(tl.float32)
    b_dlog_decay = tl.load(p_dlog_decay + i_rm + o_rm, mask=m_live, other=0.0)
    b_prior = mode_prior(p_prior, b_alpha, b_log_tau, i_rm, o_rm, m_rm)
    b_raw, b_z, b_gate, b_slope = mode_logits(p_rw, p_read_gate, b_prior, at, 0, READ_PRIOR)
    b_dz = _weights_backward(b_z, mode_weights(b_z, m_m, NORMALIZATION), b_dread, NORMALIZATION)
    _logits_backward(p_drw, p_dgates, b_raw, b_gate, b_slope, b_dz, at, 0)
    b_dprior = b_dz if READ_PRIOR else tl.zeros_like(b_dz)
    b_power, b_log_decay, m_pass = mode_decay(b_delta, b_alpha, b_lam, b_log_tau, rho_min, rho_max)
    b_over_lam = 1 / b_lam
    b_beta = -expm1(b_log_decay)
    if BETA == "exact_zoh":
        b_dwrite *= b_over_lam[:, None]
    b_raw, b_z, b_gate, b_slope = mode_logits(p_rw, p_write_gate, b_prior, at, 1, WRITE_PRIOR)
    b_weights = mode_weights(b_z, m_m, NORMALIZATION)
    b_dz = _weights_backward(b_z, b_weights, b_dwrite * b_beta, NORMALIZATION)
    _logits_backward(p_drw, p_dgates, b_raw, b_gate, b_slope, b_dz, at, 1)
    b_dprior += b_dz if WRITE_PRIOR else tl.zeros_like(b_dz)
    b_dbeta = b_dwrite * b_weights
    b_dlog_rho = tl.where(m_pass, b_dlog_decay - b_dbeta * exp(b_log_decay), 0.0)
    # The gradient by log x, where x = -log_decay is the rate of a mode.
    b_dlog_x = b_dlog_rho * b_log_decay
    # [BR]
    b_dlog_rate = tl.sum(b_dlog_x, 1)
    b_ddelta = b_dlog_rate / b_delta
    b_dpower = tl.where(b_power <= 88.0, b_dlog_rate, 0.0)
    b_dalpha = -b_dpower * b_power / b_alpha
    b_dlam = b_dpower / b_alpha * b_over_lam
    if BETA == "exact_zoh":
        b_dlam -= tl.sum(b_dbeta * b_beta, 1) * b_over_lam
    if p_prior is None:
        b_dalpha -= tl.sum(b_dprior * b_log_tau[None, :], 1)
    else:
        tl.store(p_dprior + i_rm + o_rm, b_dprior, mask=m_rm)
    if p_dlog_tau is not None:
        if p_prior is None:
            b_dlog_x += b_alpha[:, None] * b_dprior
        tl.store(p_dlog_tau + _program() * M + o_m, -tl.sum(b_dlog_x, 0), mask=m_m)
    gradients = (b_ddelta * b_delta_slope, b_dalpha * b_alpha_slope, b_dlam * b_lam_slope)
    _dynamics_backward(p_ddyn, p_dbias, gradients, i_t, o_t, o_h, m_r, H, K, BT, BH)


class ControlInputs(NamedTuple):
    """What the kernels read, contiguous; all but dyn, rw and mask in float32.

    dyn (B, T, K H) and rw (B, T, 2 H M) logits; dt_bias (H,), gate logits (1,), log_tau (M,);
    prior (B, T, H, M) logits, or None for -alpha log tau; mask (B, T), 0 at padding, or None.
    """

    dyn: Tensor
    rw: Tensor
    dt_bias: Tensor
    read_gate: Tensor
    write_gate: Tensor
    log_tau: Tensor
    prior: Tensor | None
    mask: Tensor | None


@lru_cache(maxsize=64)
def control_constants(settings: ControlSettings) -> tuple[Any, ...]:
    """The settings as kernels take them: ranges, the number of dynamics logits, switches."""
    s, free = settings, settings.alpha_fixed is None
    alpha_range = (s.alpha_min if free else s.alpha_fixed, s.alpha_max - s.alpha_min)
    lambda_range = (s.lambda_min, s.lambda_max, s.lambda_max - s.lambda_min)
    log_rho_range = (math.log(s.rho_eps) if s.rho_eps else _MOST_DECAY, math.log1p(-s.rho_eps))
    ranges = (s.dt_min, s.dt_max, *alpha_range, *lambda_range, *log_rho_range)
    switches = (s.lambda_map, s.read_prior, s.write_prior, s.normalization, s.beta)
    return (*ranges, 3 if free else 2, *switches)


def _launch_arguments(
    inputs: ControlInputs, settings: ControlSettings
) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """The grid, and what both kernels take after their pointers."""
    num_tokens = inputs.rw.shape[0] * inputs.rw.shape[1]
    num_heads, num_modes = inputs.dt_bias.shape[0], inputs.log_tau.shape[0]
    modes_block = block_size(num_modes, smallest=1)
    num_rows = min(max(_TILE // modes_block, 1), _MAX_ROWS)
    heads_block = min(block_size(num_heads, smallest=1), num_rows, _MAX_HEADS)
    tokens_block = num_rows // heads_block
    sizes = (num_tokens, num_heads, num_modes)
    grid = (ceil_div(num_tokens, tokens_block), ceil_div(num_heads, heads_block))
    blocks = (tokens_block, heads_block, modes_block)
    return grid, (*sizes, *control_constants(settings), *blocks)


def control_forward(
    inputs: ControlInputs, settings: ControlSettings, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """read, write (B, T, H, M) in `dtype`, and log_decay in float32."""
    rw = inputs.rw
    shape = (*rw.shape[:2], inputs.dt_bias.shape[0], inputs.log_tau.shape[0])
    read, write = rw.new_empty(shape, dtype=dtype), rw.new_empty(shape, dtype=dtype)
    log_decay = rw.new_empty(shape, dtype=torch.float32)
    grid, arguments = _launch_arguments(inputs, settings)
    with torch.cuda.device_of(rw):
        control_forward_kernel[grid](
            *inputs,
            read,
            write,
            log_decay,
            *arguments,
            num_warps=_NUM_WARPS,
        )
    return read, write, log_decay


def control_backward(
    inputs: ControlInputs,
    gradients: tuple[Tensor, Tensor, Tensor],
    settings: ControlSettings,
    *,
    need_log_tau: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of dyn, rw, dt_bias, both gate logits, log_tau and prior, from those of the result.

    That of both gates is one tensor (2,); those of log_tau not needed, and of no prior, are empty.
    """
    grid, arguments = _launch_arguments(inputs, settings)
    num_programs, new = grid[0] * grid[1], inputs.log_tau.new_empty
    ddyn, drw = torch.empty_like(inputs.dyn), torch.empty_like(inputs.rw)
    dprior = None if inputs.prior is None else torch.empty_like(inputs.prior)
    dbias, dgates = new(grid[0], inputs.dt_bias.shape[0]), new(num_programs, 2)
    dlog_tau = new(num_programs, inputs.log_tau.shape[0]) if need_log_tau else None
    with torch.cuda.device_of(inputs.rw):
        pointers = (*inputs, *gradients, ddyn, drw, dprior, dbias, dgates, dlog_tau)
        control_backward_kernel[grid](*pointers, *arguments, num_warps=_NUM_WARPS)
    dlog_tau = new(0) if dlog_tau is None else dlog_tau.sum(0)
    return ddyn, drw, dbias.sum(0), dgates.sum(0), dlog_tau, new(0) if dprior is None else dprior
