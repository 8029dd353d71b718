"""One token of the convolution, and of controls, scan and gate, with states updated in place.

    window <- (window, x) without its oldest,     u = silu(bias + sum_k weight[k] inputs[k])
    state  <- rho state + write u,                z = (sum_m read state + D u) silu(gate + bias)

The formulas of read, write and rho are in `ops/control.py`. A padded token changes no state.
Letters: B batch, H heads, M modes, D head channels, I = H D inner width, K taps.
"""

# Triton compiles no (*a, b).
# ruff: noqa: RUF005

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.control import ControlSettings
from flash_frac.ops.triton.control import (
    control_constants,
    head_dynamics,
    mode_decay,
    mode_logits,
    mode_prior,
    mode_weights,
)
from flash_frac.ops.triton.conv import load_parameters, weighted_sum
from flash_frac.ops.triton.exponential import decay_and_add, expm1
from flash_frac.ops.triton.launch import block_size, ceil_div

# Channels of a program. Few, so that a single sequence still occupies many processors.
_CONV_CHANNELS, _STATE_CHANNELS = 128, 64


@triton.jit
def conv_step_kernel(
    p_x, p_weight, p_bias, p_window, p_mask, p_u, num_channels, stride_x,
    K: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    m_i = o_i < num_channels
    m_write = m_i
    if p_mask is not None:
        m_write &= tl.load(p_mask + i_b) != 0
    p_row = p_window + (i_b * num_channels + o_i) * (K - 1)
    # All loads before any store, so that memory is waited for once.
    taps, b_bias = load_parameters(p_weight, p_bias, o_i, m_i, K)
    past, inputs = (), ()
    for k in tl.static_range(K - 1):
        past = past + (tl.load(p_row + k, mask=m_i, other=0.0),)
        inputs = inputs + (past[k].to(tl.float32),)
    b_x = tl.load(p_x + i_b * stride_x + o_i, mask=m_i, other=0.0)
    b_sum = weighted_sum(inputs + (b_x.to(tl.float32),), taps, b_bias, K)
    b_u = b_sum * tl.sigmoid(b_sum)
    tl.store(p_u + i_b * num_channels + o_i, b_u.to(p_u.dtype.element_ty), mask=m_i)
    if K > 1:
        # A thread may overwrite what another has to read.
        tl.debug_barrier()
        for k in tl.static_range(1, K - 1):
            tl.store(p_row + k - 1, past[k], mask=m_write)
        tl.store(p_row + K - 2, b_x.to(p_window.dtype.element_ty), mask=m_write)


@triton.jit
def control_step_kernel(
    p_u, p_dyn, p_rw, p_bias, p_read_gate, p_write_gate, p_log_tau, p_mask, p_state,
    p_gate, p_skip, p_y, H, M: tl.constexpr, D, stride_gate, gate_bias,
    dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span, rho_min, rho_max,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    i_row = i_b * H + i_h
    o_m, o_d = tl.arange(0, BM), tl.program_id(0) * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    o_state, m_state = i_row * M * D + o_m[:, None] * D + o_d[None, :], m_m[:, None] & m_d[None, :]
    # The state and what belongs to channels come first, to be on their way during the controls.
    b_old = tl.load(p_state + o_state, mask=m_state, other=0.0)
    b_u = tl.load(p_u + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if p_gate is not None:
        p_channel = p_gate + i_b * stride_gate + i_h * D + o_d
        b_gate = tl.load(p_channel, mask=m_d, other=0.0).to(tl.float32) + gate_bias
        if p_skip is not None:
            b_skip = tl.load(p_skip + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    # The controls of one head, as a block of one row; the logits without their prior for now.
    o_t = tl.arange(0, 1)
    m_r = o_t < 1
    at = (i_b * 2 * H * M, (i_h * M + o_m)[None, :], m_m[None, :], H * M)
    _, b_read, _, _ = mode_logits(p_rw, p_read_gate, None, at, 0, False)
    _, b_write, _, _ = mode_logits(p_rw, p_write_gate, None, at, 1, False)
    b_log_tau = tl.load(p_log_tau + o_m, mask=m_m, other=0.0)
    ranges = (dt_min, dt_max, alpha_min, alpha_span, lambda_min, lambda_max, lambda_span)
    b_delta, b_alpha, b_lam, _, _, _ = head_dynamics(
        p_dyn, p_bias, i_b, o_t, o_t + i_h, m_r, H, ranges, K, LAMBDA
    )
    # [1, BM]
    _, b_log_decay, _ = mode_decay(b_delta, b_alpha, b_lam, b_log_tau, rho_min, rho_max)
    b_beta = -expm1(b_log_decay)
    if BETA == "exact_zoh":
        b_beta = b_beta * (1 / b_lam)[:, None]
    b_prior = mode_prior(None, b_alpha, b_log_tau, 0, 0, m_m)
    if READ_PRIOR:
        b_read += b_prior
    if WRITE_PRIOR:
        b_write += b_prior
    b_read = mode_weights(b_read, m_m, NORMALIZATION)
    b_write = mode_weights(b_write, m_m, NORMALIZATION) * b_beta
    # [BM, BD]
    b_added = tl.reshape(b_write, [BM, 1]) * b_u[None, :]
    b_new = decay_and_add(b_old, tl.reshape(b_log_decay, [BM, 1]), b_added)
    if p_mask is not None:
        b_new = tl.where(tl.load(p_mask + i_b) != 0, b_new, b_old)
    tl.store(p_state + o_state, b_new, mask=m_state)
    b_y = tl.sum(tl.where(m_m[:, None], tl.reshape(b_read, [BM, 1]) * b_new, 0.0), 0)
    if p_gate is not None:
        if p_skip is not None:
            b_y += b_skip * b_u
        b_y *= b_gate * tl.sigmoid(b_gate)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, mask: Tensor | None
) -> Tensor:
    """u (B, I) like x, whose rows may be apart; the rest is contiguous."""
    batch, channels = x.shape
    u = x.new_empty(batch, channels)
    with torch.cuda.device_of(x):
        conv_step_kernel[(ceil_div(channels, _CONV_CHANNELS), batch)](
            x, weight, bias, window, mask, u, channels, x.stride(0),
            K=weight.shape[-1], BI=_CONV_CHANNELS, num_warps=1,
        )  # fmt: skip
    return u


def control_step(
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
    settings: ControlSettings,
) -> Tensor:
    """y, or z with a gate, (B, H, D) like u. All contiguous, but rows of the gate may be apart."""
    (batch, heads, channels), modes = u.shape, log_tau.shape[0]
    y = torch.empty_like(u)
    width = min(block_size(channels), _STATE_CHANNELS)
    with torch.cuda.device_of(u):
        control_step_kernel[(ceil_div(channels, width), heads, batch)](
            u, dyn, rw, dt_bias, read_gate, write_gate, log_tau, mask, state, gate, skip, y,
            heads, modes, channels, 0 if gate is None else gate.stride(0), gate_bias,
            *control_constants(settings), block_size(modes, smallest=1), width, num_warps=1,
        )  # fmt: skip
    return y
