"""Kernels for decoding one token: convolution; controls, scan and gate.

    conv_step_kernel     window <- (window, x) without the oldest,  u = silu(bias + weight inputs)
    control_step_kernel  state <- rho state + write u,  z = (sum_m read state + D u) silu(gate + b)

States are updated in place; padding leaves them unchanged. The formulas of read, write and rho are
in `ops/control/reference.py`.

With EARLY, kernels are launched before the previous one ends (programmatic dependent launch). Until
`await_inputs` they may read only what no kernel of the last two launches writes: weights, and
states, which belong to an earlier token.

Letters: B batch, H heads, M modes, D head channels, I = H D inner width, K taps (of the controls:
dynamics logits per head).
"""

# Triton cannot compile (*a, b).
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


class ConvStep(NamedTuple):
    """weight (I, 1, K), bias (I,) or None, window (B, I, K - 1), mask (B,) or None, output u."""

    weight: Tensor
    bias: Tensor | None
    window: Tensor
    mask: Tensor | None
    u: Tensor


class GateInputs(NamedTuple):
    """Inputs of the gate, and those of the norm after it; None if absent.

    gate (B, H D), rows stride_gate apart, and skip (H, D); norm (H D,) multiplies the output, and
    squares (B, H, programs per head) takes the sums of its squares before.
    """

    gate: Tensor | None
    skip: Tensor | None
    norm: Tensor | None
    squares: Tensor | None


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Wait until the previous kernel has ended, and let the next one start; with EARLY only."""
    if EARLY:
        gdc_wait()
        # Not before the wait: the next kernel may read what the one before this has written.
        gdc_launch_dependents()


@triton.jit
def load_window(p_conv, o_row, m_row, o_i, m_i, K: tl.constexpr):
    """Everything of a convolution but its new input: past inputs like o_row, taps, bias [BI].

    o_row are the offsets of rows and channels in (B, I), in any shape whose last axis is o_i [BI].
    """
    past = ()
    for k in tl.static_range(K - 1):
        past = past + (tl.load(p_conv.window + o_row * (K - 1) + k, mask=m_row, other=0.0),)
    taps, b_bias = load_parameters(p_conv.weight, p_conv.bias, o_i, m_i, K)
    return past, taps, b_bias


@triton.jit
def convolve_token(p_conv, loaded, b_x, o_row, m_row, m_write, K: tl.constexpr):
    """Store u of the input b_x, and where m_write append b_x to the window.

    loaded are the results of `load_window`; b_x has the dtype of the inputs.
    """
    past, taps, b_bias = loaded
    inputs = ()
    for k in tl.static_range(K - 1):
        inputs = inputs + (past[k].to(tl.float32),)
    b_sum = weighted_sum(inputs + (b_x.to(tl.float32),), taps, b_bias, K)
    b_u = b_sum * tl.sigmoid(b_sum)
    tl.store(p_conv.u + o_row, b_u.to(p_conv.u.dtype.element_ty), mask=m_row)
    if K > 1:
        # Without a barrier a thread may overwrite what another still has to read.
        tl.debug_barrier()
        p_row = p_conv.window + o_row * (K - 1)
        for k in tl.static_range(1, K - 1):
            tl.store(p_row + k - 1, past[k], mask=m_write)
        tl.store(p_row + K - 2, b_x.to(p_conv.window.dtype.element_ty), mask=m_write)


@triton.jit
def conv_step_kernel(
    p_x, p_conv, num_channels, stride_x, K: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """u = silu(bias + sum_k weight[k] inputs[k]); then x is appended to the window.

    A program owns BI channels of one sequence. p_x (B, I), rows stride_x apart; p_conv `ConvStep`.
    """
    i_b = tl.program_id(1).to(tl.int64)
    o_i = tl.program_id(0) * BI + tl.arange(0, BI)
    m_i = o_i < num_channels
    o_row = i_b * num_channels + o_i
    # All loads come before any store, so that the program waits for memory once.
    loaded = load_window(p_conv, o_row, m_i, o_i, m_i, K)
    m_write = m_i
    if p_conv.mask is not None:
        m_write &= tl.load(p_conv.mask + i_b) != 0
    b_x = tl.load(p_x + i_b * stride_x + o_i, mask=m_i, other=0.0)
    convolve_token(p_conv, loaded, b_x, o_row, m_i, m_write, K)


@triton.jit
def control_step_kernel(
    p_u, p_in, p_state, p_gating, p_y, ranges, H, M: tl.constexpr, D, stride_gate, gate_bias,
    OWN_TAU: tl.constexpr,
    K: tl.constexpr, LAMBDA: tl.constexpr, READ_PRIOR: tl.constexpr, WRITE_PRIOR: tl.constexpr,
    NORMALIZATION: tl.constexpr, BETA: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    EARLY: tl.constexpr,
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
    # Loads of the state and of weights come first: they need not wait for the previous kernel.
    b_old = tl.load(p_state + o_state, mask=m_state, other=0.0)
    o_t = tl.arange(0, 1)
    m_r = o_t < 1
    b_log_tau = mode_log_tau(p_in.log_tau, o_t + i_h, o_m, m_r, m_m, M, OWN_TAU)
    if p_gating.skip is not None:
        b_skip = tl.load(p_gating.skip + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    b_u = tl.load(p_u + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if p_gating.gate is not None:
        p_channel = p_gating.gate + i_b * stride_gate + i_h * D + o_d
        b_gate = tl.load(p_channel, mask=m_d, other=0.0).to(tl.float32) + gate_bias
    # The controls of one head, as a block of one row; the prior is added to the logits later.
    at = (i_b * 2 * H * M, (i_h * M + o_m)[None, :], m_m[None, :], H * M)
    _, b_read, _, _ = mode_logits(p_in.rw, p_in.read_gate, None, at, 0, False)
    _, b_write, _, _ = mode_logits(p_in.rw, p_in.write_gate, None, at, 1, False)
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
    if p_gating.norm is not None:
        p_sum = p_gating.squares + i_row * tl.num_programs(0) + tl.program_id(0)
        tl.store(p_sum, tl.sum(tl.where(m_d, b_y * b_y, 0.0), 0))
        b_y *= tl.load(p_gating.norm + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)
