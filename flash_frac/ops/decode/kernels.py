"""Kernels for decoding one token: convolution; controls, scan and gate; linear layers.

    conv_step_kernel     window <- (window, x) without the oldest,  u = silu(bias + weight inputs)
    control_step_kernel  state <- rho state + write u,  z = (sum_m read state + D u) silu(gate + b)
    gemv_kernel          y = residual + W (x norm_weight / rms(x)) + bias
    swiglu_gemv_kernel   y = silu(W_gate n) (W_up n),  n = x norm_weight / rms(x)

8-bit matrices have one scale per row, which multiplies the sum over the row.
States are updated in place; padding leaves them unchanged. The formulas of read, write and rho are
in `ops/control/reference.py`.
Letters: B batch, H heads, M modes, D head channels, I = H D inner width, K taps (of the controls:
dynamics logits per head), E inputs and O outputs of a linear layer.
"""

# Triton cannot compile (*a, b).
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import decay_and_add
from flash_frac.ops.control.kernels import (
    head_dynamics,
    mode_beta,
    mode_decay,
    mode_log_tau,
    mode_logits,
    mode_prior,
    mode_weights,
)
from flash_frac.ops.conv.kernels import load_parameters, weighted_sum


class GateInputs(NamedTuple):
    """Inputs of the gate: gate (B, H D), rows stride_gate apart, and skip (H, D), or None."""

    gate: Tensor | None
    skip: Tensor | None


@triton.jit
def conv_step_kernel(
    p_x, p_weight, p_bias, p_window, p_mask, p_u, num_channels, stride_x,
    K: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """u = silu(bias + sum_k weight[k] inputs[k]); then x is appended to the window.

    A program owns BI channels of one sequence. p_x (B, I), rows stride_x apart; p_u (B, I);
    p_window (B, I, K - 1), overwritten; p_weight (I, 1, K); p_bias (I,) and p_mask (B,), or None.
    """
    i_b = tl.program_id(1).to(tl.int64)
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    m_i = o_i < num_channels
    m_write = m_i
    if p_mask is not None:
        m_write &= tl.load(p_mask + i_b) != 0
    p_row = p_window + (i_b * num_channels + o_i) * (K - 1)
    # All loads come before any store, so that the program waits for memory once.
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
        # Without a barrier a thread may overwrite what another still has to read.
        tl.debug_barrier()
        for k in tl.static_range(1, K - 1):
            tl.store(p_row + k - 1, past[k], mask=m_write)
        tl.store(p_row + K - 2, b_x.to(p_window.dtype.element_ty), mask=m_write)


@triton.jit
def control_step_kernel(
    p_u, p_in, p_state, p_gating, p_y, ranges, H, M: tl.constexpr, D, stride_gate, gate_bias,
    OWN_TAU: tl.constexpr,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Controls, one step of the scan, direct term and gate, of one head and BD channels.

    p_u, p_y (B, H, D); p_in `ControlInputs` of one token, without a prior; p_state (B, H, M, D),
    overwritten; p_gating `GateInputs`; ranges `Ranges`.
    """
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    i_row = i_b * H + i_h
    o_m, o_d = tl.arange(0, BM), tl.program_id(0) * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    o_state, m_state = i_row * M * D + o_m[:, None] * D + o_d[None, :], m_m[:, None] & m_d[None, :]
    # Loads of the state and per-channel inputs come first, to overlap with the controls.
    b_old = tl.load(p_state + o_state, mask=m_state, other=0.0)
    b_u = tl.load(p_u + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if p_gating.gate is not None:
        p_channel = p_gating.gate + i_b * stride_gate + i_h * D + o_d
        b_gate = tl.load(p_channel, mask=m_d, other=0.0).to(tl.float32) + gate_bias
        if p_gating.skip is not None:
            b_skip = tl.load(p_gating.skip + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    # The controls of one head, as a block of one row; the prior is added to the logits later.
    o_t = tl.arange(0, 1)
    m_r = o_t < 1
    at = (i_b * 2 * H * M, (i_h * M + o_m)[None, :], m_m[None, :], H * M)
    _, b_read, _, _ = mode_logits(p_in.rw, p_in.read_gate, None, at, 0, False)
    _, b_write, _, _ = mode_logits(p_in.rw, p_in.write_gate, None, at, 1, False)
    b_log_tau = mode_log_tau(p_in.log_tau, o_t + i_h, o_m, m_r, m_m, M, OWN_TAU)
    b_delta, b_alpha, b_lam, _, _, _ = head_dynamics(
        p_in.dyn, p_in.dt_bias, i_b, o_t, o_t + i_h, m_r, H, ranges, K, LAMBDA
    )
    # [1, BM]
    _, b_log_decay, _ = mode_decay(b_delta, b_alpha, b_lam, b_log_tau, ranges)
    b_beta = mode_beta(b_log_decay, b_lam, BETA)
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
    if p_in.mask is not None:
        b_new = tl.where(tl.load(p_in.mask + i_b) != 0, b_new, b_old)
    tl.store(p_state + o_state, b_new, mask=m_state)
    b_y = tl.sum(tl.where(m_m[:, None], tl.reshape(b_read, [BM, 1]) * b_new, 0.0), 0)
    if p_gating.gate is not None:
        if p_gating.skip is not None:
            b_y += b_skip * b_u
        b_y *= b_gate * tl.sigmoid(b_gate)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


@triton.jit
def load_weights(p_weight, o_o, o_e, O, E: tl.constexpr):  # noqa: E741
    """Block [BO, BE], float32, of p_weight (O, E), before the scales of quantised rows."""
    o_w = o_o.to(tl.int64)[:, None] * E + o_e[None, :]
    m_w = (o_o < O)[:, None] & (o_e < E)[None, :]
    return tl.load(p_weight + o_w, mask=m_w, other=0.0).to(tl.float32)


@triton.jit
def scale_rows(b_sum, p_scale, o_o, m_o):
    """Row sums [BO] times p_scale (O,); p_scale is None if weights are not quantised."""
    if p_scale is not None:
        b_sum *= tl.load(p_scale + o_o, mask=m_o, other=0.0).to(tl.float32)
    return b_sum


@triton.jit
def gemv_kernel(
    p_x, p_norm, p_weight, p_scale, p_bias, p_residual, p_y,
    O, E: tl.constexpr, stride_x, eps, BO: tl.constexpr, BE: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """y = residual + W (x norm_weight / rms(x)) + bias, for BO rows of W and one vector.

    A program walks along its rows and accumulates the sum of squares of x on the way, so the norm
    costs no extra pass. p_x (B, E), rows stride_x apart; p_weight (O, E); p_y (B, O); p_norm
    (E,), p_scale and p_bias (O,) and p_residual (B, O) may be None.
    """
    # Vectors are the fast axis of the grid: neighbouring programs read the same weights.
    i_b = tl.program_id(0)
    o_o = tl.program_id(1) * BO + tl.arange(0, BO)
    m_o = o_o < O
    # [BO, BE] and [BE]
    b_sum = tl.zeros([BO, BE], dtype=tl.float32)
    b_squares = tl.zeros([BE], dtype=tl.float32)
    for start in tl.static_range(0, E, BE):
        o_e = start + tl.arange(0, BE)
        m_e = o_e < E
        b_w = load_weights(p_weight, o_o, o_e, O, E)
        b_x = tl.load(p_x + i_b * stride_x + o_e, mask=m_e, other=0.0).to(tl.float32)
        if p_norm is not None:
            b_squares += b_x * b_x
            b_x *= tl.load(p_norm + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_sum += b_w * b_x[None, :]
    b_y = scale_rows(tl.sum(b_sum, 1), p_scale, o_o, m_o)
    if p_norm is not None:
        b_y *= tl.rsqrt(tl.sum(b_squares, 0) / E + eps)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_o, mask=m_o, other=0.0).to(tl.float32)
    o_y = i_b * O + o_o
    if p_residual is not None:
        b_y += tl.load(p_residual + o_y, mask=m_o, other=0.0).to(tl.float32)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_o)


@triton.jit
def swiglu_gemv_kernel(
    p_x, p_norm, p_gate, p_up, p_gate_scale, p_up_scale, p_y,
    O, E: tl.constexpr, stride_x, eps, BO: tl.constexpr, BE: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """y = silu(W_gate n) (W_up n) with n = x norm_weight / rms(x), for BO rows of both matrices.

    Like `gemv_kernel`: p_x (B, E), rows stride_x apart; p_norm (E,); p_gate, p_up (O, E), the
    matrices, and p_gate_scale, p_up_scale (O,), or None; p_y (B, O).
    """
    i_b = tl.program_id(0)
    o_o = tl.program_id(1) * BO + tl.arange(0, BO)
    m_o = o_o < O
    # [BO, BE] and [BE]
    b_gates = tl.zeros([BO, BE], dtype=tl.float32)
    b_ups = tl.zeros([BO, BE], dtype=tl.float32)
    b_squares = tl.zeros([BE], dtype=tl.float32)
    for start in tl.static_range(0, E, BE):
        o_e = start + tl.arange(0, BE)
        m_e = o_e < E
        b_gate_w = load_weights(p_gate, o_o, o_e, O, E)
        b_up_w = load_weights(p_up, o_o, o_e, O, E)
        b_x = tl.load(p_x + i_b * stride_x + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_squares += b_x * b_x
        b_x *= tl.load(p_norm + o_e, mask=m_e, other=0.0).to(tl.float32)
        b_gates += b_gate_w * b_x[None, :]
        b_ups += b_up_w * b_x[None, :]
    b_rms = tl.rsqrt(tl.sum(b_squares, 0) / E + eps)
    b_gate = scale_rows(tl.sum(b_gates, 1), p_gate_scale, o_o, m_o) * b_rms
    b_up = scale_rows(tl.sum(b_ups, 1), p_up_scale, o_o, m_o) * b_rms
    b_y = b_gate * tl.sigmoid(b_gate) * b_up
    tl.store(p_y + i_b * O + o_o, b_y.to(p_y.dtype.element_ty), mask=m_o)
