"""Kernels of the controls: one pass over their logits, forward and backward.

Formulas are in `reference.py`. A program takes BT tokens of BH heads with all modes, as BR = BT BH
rows [BR] and row by mode [BR, BM]. Everything is float32. The backward pass recomputes from the
inputs. For gradients that are sums over tokens (dt_bias, gates and log_tau) each program writes one
partial sum, so results are reproducible.
Letters: B batch, T tokens of all sequences, H heads, M modes, K = 3 dynamics logits per head (2 if
alpha is fixed).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import exp, expm1, log, reciprocal, sigmoid

# The largest x for which exp(x) is finite in float32.
LARGEST_EXPONENT = tl.constexpr(88.0)
# The smallest normal float32.
TINY = tl.constexpr(2.0**-126)


class ControlOutputs(NamedTuple):
    """read, write and log_decay (B, T, H, M), or their gradients."""

    read: Tensor
    write: Tensor
    log_decay: Tensor


class ControlGradients(NamedTuple):
    """Gradients of dyn, rw and prior, shaped like them; partial sums of the rest, one per program.

    dt_bias (grid[0], H); gates (programs, 2); log_tau (programs, M), or (grid[0], H, M) if each
    head has its own. None if not needed.
    """

    dyn: Tensor
    rw: Tensor
    prior: Tensor | None
    dt_bias: Tensor
    gates: Tensor
    log_tau: Tensor | None


class Ranges(NamedTuple):
    """Ends and widths of the ranges of delta, alpha and lambda, and of log rho."""

    dt_min: float
    dt_max: float
    alpha_min: float
    alpha_span: float
    lambda_min: float
    lambda_max: float
    lambda_span: float
    log_rho_min: float
    log_rho_max: float


@triton.jit
def clamped_softplus(x, low, high):
    """clamp(log(1 + e^x), low, high) and its derivative, which is 0 where it is clamped."""
    e = exp(-tl.abs(x))
    one_plus = 1 + e
    # The last term restores what rounding took from 1 + e.
    log1p = log(one_plus) + (e - (one_plus - 1)) / one_plus
    value = tl.where(x > 0, x, 0.0) + log1p
    slope = tl.where(x > 0, 1.0, e) / one_plus
    slope = tl.where((value >= low) & (value <= high), slope, 0.0)
    return tl.clamp(value, low, high, propagate_nan=tl.PropagateNan.ALL), slope


@triton.jit
def _block(T, H, M, BT: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):
    """First token, int64; tokens after it [BR], heads [BR] and modes [BM], and their masks."""
    i_t = tl.program_id(0).to(tl.int64) * BT
    o_t, o_h = tl.arange(0, BT * BH) // BH, tl.program_id(1) * BH + tl.arange(0, BT * BH) % BH
    o_m = tl.arange(0, BM)
    return i_t, o_t, o_h, o_m, (o_t < T - i_t) & (o_h < H), o_m < M


@triton.jit
def _program():
    """Linear index of this program in the grid, int64."""
    return tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def head_dynamics(
    p_dyn, p_bias, i_t, o_t, o_h, m_r, H, ranges, K: tl.constexpr, LAMBDA: tl.constexpr
):
    """delta, alpha, lam [BR], and the derivative of each by its logit."""
    p_row = p_dyn + i_t * K * H + (o_t * K * H + o_h)
    b_logit = tl.load(p_row, mask=m_r, other=0.0).to(tl.float32)
    b_logit += tl.load(p_bias + o_h, mask=m_r, other=0.0)
    b_delta, b_ddelta = clamped_softplus(b_logit, ranges.dt_min, ranges.dt_max)
    if K == 3:
        b_s, b_ds = sigmoid(tl.load(p_row + H, mask=m_r, other=0.0).to(tl.float32))
        b_alpha = ranges.alpha_min + ranges.alpha_span * b_s
        b_dalpha = ranges.alpha_span * b_ds
    else:
        b_alpha, b_dalpha = tl.zeros_like(b_delta) + ranges.alpha_min, tl.zeros_like(b_delta)
    b_logit = tl.load(p_row + (K - 1) * H, mask=m_r, other=0.0).to(tl.float32)
    if LAMBDA == "sigmoid":
        b_s, b_ds = sigmoid(b_logit)
        b_lam, b_dlam = ranges.lambda_min + ranges.lambda_span * b_s, ranges.lambda_span * b_ds
    else:
        b_lam, b_dlam = clamped_softplus(b_logit, ranges.lambda_min, ranges.lambda_max)
    return b_delta, b_alpha, b_lam, b_ddelta, b_dalpha, b_dlam


@triton.jit
def mode_log_tau(p_log_tau, o_h, o_m, m_r, m_m, M, OWN_TAU: tl.constexpr):
    """log tau of the modes: [1, BM] if all heads share it, [BR, BM] if each head has its own."""
    if OWN_TAU:
        o_tau, m_tau = (o_h * M)[:, None] + o_m[None, :], m_r[:, None] & m_m[None, :]
    else:
        o_tau, m_tau = o_m[None, :], m_m[None, :]
    return tl.load(p_log_tau + o_tau, mask=m_tau, other=0.0)


@triton.jit
def mode_decay(b_delta, b_alpha, b_lam, b_log_tau, ranges):
    """log(lam) / alpha [BR]; log_decay and where its clamp lets gradients pass [BR, BM]."""
    b_power = tl.div_rn(log(b_lam), b_alpha)
    b_capped = tl.minimum(b_power, LARGEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    b_log_rho = -(b_delta * exp(b_capped))[:, None] * exp(-b_log_tau)
    b_log_decay = tl.clamp(
        b_log_rho, ranges.log_rho_min, ranges.log_rho_max, propagate_nan=tl.PropagateNan.ALL
    )
    return b_power, b_log_decay, b_log_rho == b_log_decay


@triton.jit
def mode_beta(b_log_decay, b_lam, BETA: tl.constexpr):
    """beta, the factor of the write weights [BR, BM]."""
    if BETA == "equal_variance":
        b_below = tl.minimum(b_log_decay, -TINY, propagate_nan=tl.PropagateNan.ALL)
        b_beta = tl.sqrt_rn(-expm1(2 * b_below))
    else:
        b_beta = -expm1(b_log_decay)
    if BETA == "exact_zoh":
        b_beta = b_beta * (1 / b_lam)[:, None]
    return b_beta


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
    """Prior logits [BR, BM]: -alpha log tau, or those given."""
    if p_prior is None:
        b_prior = -b_alpha[:, None] * b_log_tau
    else:
        b_prior = tl.load(p_prior + i_rm + o_rm, mask=m_rm, other=0.0)
    return b_prior


@triton.jit
def mode_weights(b_z, m_m, NORMALIZATION: tl.constexpr):
    """Weights of the modes [BR, BM] from their logits."""
    if NORMALIZATION == "softmax":
        b_z = tl.where(m_m[None, :], b_z, float("-inf"))
        b_e = tl.where(m_m[None, :], exp(b_z - tl.max(b_z, 1)[:, None]), 0.0)
        # The gradient averages with these weights, so they must add up to 1 as closely as possible.
        b_w = b_e * reciprocal(tl.sum(b_e, 1))[:, None]
    elif NORMALIZATION == "sigmoid":
        b_w, _ = sigmoid(b_z)
    else:
        b_w = b_z
    return b_w


@triton.jit
def _weights_backward(b_z, b_w, b_dw, NORMALIZATION: tl.constexpr):
    """Gradient of the logits [BR, BM] from that of the weights."""
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
    """Store the gradient of the raw logits, and this program's share of the gate logit's."""
    i_rw, o_rw, m_rm, side = at
    tl.store(p_drw + i_rw + SIDE * side + o_rw, b_gate * b_dz, mask=m_rm)
    tl.store(p_dgate + 2 * _program() + SIDE, b_slope * tl.sum(tl.sum(b_dz * b_raw, 1), 0))


@triton.jit
def _dynamics_backward(
    p_ddyn, p_dbias, gradients, i_t, o_t, o_h, m_r, H,
    K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the dynamics logits, and this program's share of dt_bias's."""
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


@triton.jit(do_not_specialize=["T"])
def control_forward_kernel(
    p_in, p_out, ranges, T, H: tl.constexpr, M: tl.constexpr, OWN_TAU: tl.constexpr,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """read, write and log_decay, by the formulas of `reference.py`.

    p_in `ControlInputs`, p_out `ControlOutputs`, ranges `Ranges`.
    """
    i_t, o_t, o_h, o_m, m_r, m_m = _block(T, H, M, BT, BH, BM)
    m_rm = m_r[:, None] & m_m[None, :]
    # From the first token on, offsets fit 32 bits.
    i_rm, o_rm = i_t * H * M, (o_t * H + o_h)[:, None] * M + o_m[None, :]
    at = (2 * i_rm, o_rm + (o_t * H * M)[:, None], m_rm, H * M)
    # [BR]
    b_delta, b_alpha, b_lam, _, _, _ = head_dynamics(
        p_in.dyn, p_in.dt_bias, i_t, o_t, o_h, m_r, H, ranges, K, LAMBDA
    )
    # [1, BM] or [BR, BM]
    b_log_tau = mode_log_tau(p_in.log_tau, o_h, o_m, m_r, m_m, M, OWN_TAU)
    # [BR, BM]
    _, b_log_decay, _ = mode_decay(b_delta, b_alpha, b_lam, b_log_tau, ranges)
    b_beta = mode_beta(b_log_decay, b_lam, BETA)
    b_prior = mode_prior(p_in.prior, b_alpha, b_log_tau, i_rm, o_rm, m_rm)
    _, b_z, _, _ = mode_logits(p_in.rw, p_in.read_gate, b_prior, at, 0, READ_PRIOR)
    tl.store(p_out.read + i_rm + o_rm, mode_weights(b_z, m_m, NORMALIZATION), mask=m_rm)
    _, b_z, _, _ = mode_logits(p_in.rw, p_in.write_gate, b_prior, at, 1, WRITE_PRIOR)
    b_write = mode_weights(b_z, m_m, NORMALIZATION) * b_beta
    if p_in.mask is not None:
        m_token = (tl.load(p_in.mask + i_t + o_t, mask=m_r, other=0) != 0)[:, None]
        b_write = tl.where(m_token, b_write, 0.0)
        b_log_decay = tl.where(m_token, b_log_decay, 0.0)
    tl.store(p_out.write + i_rm + o_rm, b_write, mask=m_rm)
    tl.store(p_out.log_decay + i_rm + o_rm, b_log_decay, mask=m_rm)


@triton.jit(do_not_specialize=["T"])
def control_backward_kernel(
    p_in, p_dout, p_din, ranges, T, H: tl.constexpr, M: tl.constexpr, OWN_TAU: tl.constexpr,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of all inputs, from those of read, write and log_decay.

    p_in `ControlInputs`, p_dout `ControlOutputs` of gradients, p_din `ControlGradients`, ranges
    `Ranges`.
    """
    i_t, o_t, o_h, o_m, m_r, m_m = _block(T, H, M, BT, BH, BM)
    m_rm = m_r[:, None] & m_m[None, :]
    # From the first token on, offsets fit 32 bits.
    i_rm, o_rm = i_t * H * M, (o_t * H + o_h)[:, None] * M + o_m[None, :]
    at = (2 * i_rm, o_rm + (o_t * H * M)[:, None], m_rm, H * M)
    # [BR]
    b_delta, b_alpha, b_lam, b_delta_slope, b_alpha_slope, b_lam_slope = head_dynamics(
        p_in.dyn, p_in.dt_bias, i_t, o_t, o_h, m_r, H, ranges, K, LAMBDA
    )
    # [1, BM] or [BR, BM]
    b_log_tau = mode_log_tau(p_in.log_tau, o_h, o_m, m_r, m_m, M, OWN_TAU)
    # [BR, BM]; gradients are 0 outside the mask, and so are all terms of the sums below.
    b_dread = tl.load(p_dout.read + i_rm + o_rm, mask=m_rm, other=0.0).to(tl.float32)
    m_live = m_rm
    if p_in.mask is not None:
        m_live &= (tl.load(p_in.mask + i_t + o_t, mask=m_r, other=0) != 0)[:, None]
    b_dwrite = tl.load(p_dout.write + i_rm + o_rm, mask=m_live, other=0.0).to(tl.float32)
    b_dlog_decay = tl.load(p_dout.log_decay + i_rm + o_rm, mask=m_live, other=0.0)
    b_prior = mode_prior(p_in.prior, b_alpha, b_log_tau, i_rm, o_rm, m_rm)
    b_raw, b_z, b_gate, b_slope = mode_logits(p_in.rw, p_in.read_gate, b_prior, at, 0, READ_PRIOR)
    b_dz = _weights_backward(b_z, mode_weights(b_z, m_m, NORMALIZATION), b_dread, NORMALIZATION)
    _logits_backward(p_din.rw, p_din.gates, b_raw, b_gate, b_slope, b_dz, at, 0)
    b_dprior = b_dz if READ_PRIOR else tl.zeros_like(b_dz)
    b_power, b_log_decay, m_pass = mode_decay(b_delta, b_alpha, b_lam, b_log_tau, ranges)
    b_over_lam = 1 / b_lam
    b_beta = mode_beta(b_log_decay, b_lam, BETA)
    b_raw, b_z, b_gate, b_slope = mode_logits(p_in.rw, p_in.write_gate, b_prior, at, 1, WRITE_PRIOR)
    b_weights = mode_weights(b_z, m_m, NORMALIZATION)
    b_dz = _weights_backward(b_z, b_weights, b_dwrite * b_beta, NORMALIZATION)
    _logits_backward(p_din.rw, p_din.gates, b_raw, b_gate, b_slope, b_dz, at, 1)
    b_dprior += b_dz if WRITE_PRIOR else tl.zeros_like(b_dz)
    b_dbeta = b_dwrite * b_weights
    # [BR, BM]; minus the derivative of beta by log rho.
    if BETA == "equal_variance":
        b_falls = tl.div_rn(exp(2 * b_log_decay), b_beta)
    elif BETA == "exact_zoh":
        b_falls = exp(b_log_decay) * b_over_lam[:, None]
    else:
        b_falls = exp(b_log_decay)
    b_dlog_rho = tl.where(m_pass, b_dlog_decay - b_dbeta * b_falls, 0.0)
    # The gradient by log x, where x = -log_decay is the rate of a mode.
    b_dlog_x = b_dlog_rho * b_log_decay
    # [BR]
    b_dlog_rate = tl.sum(b_dlog_x, 1)
    b_ddelta = b_dlog_rate / b_delta
    b_dpower = tl.where(b_power <= LARGEST_EXPONENT, b_dlog_rate, 0.0)
    b_dalpha = -b_dpower * b_power / b_alpha
    b_dlam = b_dpower / b_alpha * b_over_lam
    if BETA == "exact_zoh":
        b_dlam -= tl.sum(b_dbeta * b_beta, 1) * b_over_lam
    if p_in.prior is None:
        b_dalpha -= tl.sum(b_dprior * b_log_tau, 1)
    else:
        tl.store(p_din.prior + i_rm + o_rm, b_dprior, mask=m_rm)
    if p_din.log_tau is not None:
        if p_in.prior is None:
            b_dlog_x += b_alpha[:, None] * b_dprior
        if OWN_TAU:
            # [BH, BM]
            b_dlog_tau = -tl.sum(tl.reshape(b_dlog_x, (BT, BH, BM)), 0)
            o_own = tl.program_id(1) * BH + tl.arange(0, BH)
            p_own = p_din.log_tau + tl.program_id(0).to(tl.int64) * H * M
            m_own = (o_own < H)[:, None] & m_m[None, :]
            tl.store(p_own + (o_own * M)[:, None] + o_m[None, :], b_dlog_tau, mask=m_own)
        else:
            tl.store(p_din.log_tau + _program() * M + o_m, -tl.sum(b_dlog_x, 0), mask=m_m)
    gradients = (b_ddelta * b_delta_slope, b_dalpha * b_alpha_slope, b_dlam * b_lam_slope)
    _dynamics_backward(p_din.dyn, p_din.dt_bias, gradients, i_t, o_t, o_h, m_r, H, K, BT, BH)
