"""One token of the delta rule in Triton: `delta_step`, and the fused decoding step of a layer.

Letters: B batch, H heads, K key channels in a block BK, D value channels in blocks BD.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div, decay_and_add, exp, sigmoid
from flash_frac.ops.backends import operator, triton_refusal
from flash_frac.ops.control.kernels import clamped_softplus

# As in the layer: added to a squared length before taking its root.
_UNIT_EPS = tl.constexpr(1e-6)
# Value channels per program of `delta_step`: few, so one sequence occupies many multiprocessors.
STEP_CHANNELS = 32
# A program of the fused step holds all channels of a head, up to 128 x 256 numbers, in registers.
FUSED_WARPS = 16


class StepInputs(NamedTuple):
    """For `fused_delta_step`: qkv (B, 2 H K + H D), a, b (B, H), A_log, dt_bias (H,), mask (B,)."""

    qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    mask: Tensor | None


@triton.jit
def _move(b_state, b_q, b_k, b_v, beta, log_decay):
    """y [BD] and the new state [BK, BD]."""
    b_found = exp(log_decay) * tl.sum(b_k[:, None] * b_state, 0)
    b_written = beta * (b_v - b_found)
    b_state = decay_and_add(b_state, log_decay, b_k[:, None] * b_written[None, :])
    return tl.sum(b_q[:, None] * b_state, 0), b_state


@triton.jit
def delta_step_kernel(
    p_q, p_k, p_v, p_beta, p_log_decay, p_state, p_y, p_new_state, D,
    K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """S' = a S + beta k (v - a S^T k)^T and y = S'^T q, for a head and a block of value channels.

    p_q, p_k (B, H, K); p_v, p_y (B, H, D); p_beta, p_log_decay (B, H); p_state, p_new_state
    (B, H, K, D).
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_k, o_d = tl.arange(0, BK), tl.program_id(1) * BD + tl.arange(0, BD)
    m_k, m_d = o_k < K, o_d < D
    # [BK, BD]
    o_state = (i_row * K + o_k)[:, None] * D + o_d
    m_state = m_k[:, None] & m_d[None, :]
    b_state = tl.load(p_state + o_state, mask=m_state, other=0.0)
    # [BK] and [BD]
    b_q = tl.load(p_q + i_row * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(p_k + i_row * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    beta = tl.load(p_beta + i_row).to(tl.float32)
    b_y, b_state = _move(b_state, b_q, b_k, b_v, beta, tl.load(p_log_decay + i_row))
    tl.store(p_new_state + o_state, b_state, mask=m_state)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


@triton.jit
def _unit(b_x):
    """A vector scaled to unit length."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) + _UNIT_EPS)


@triton.jit
def fused_delta_step_kernel(
    p_in, p_state, p_gate, p_weight, p_y, stride_qkv, stride_a, stride_b, stride_gate,
    scale, eps, H, D, K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Unit vectors, controls, step, norm and gate of one sequence and head, all channels.

    p_in `StepInputs`; p_state (B, H, K, D), overwritten; p_y (B, H, D); p_gate (B, H D) and
    p_weight (D,), or None. Rows of qkv, a, b and gate may be strided.
    """
    i_b, i_h = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i_row = i_b * H + i_h
    o_k, o_d = tl.arange(0, BK), tl.arange(0, BD)
    m_k, m_d = o_k < K, o_d < D
    # [BK, BD]; the state is loaded first, to overlap with the rest.
    o_state = (i_row * K + o_k)[:, None] * D + o_d
    m_state = m_k[:, None] & m_d[None, :]
    b_old = tl.load(p_state + o_state, mask=m_state, other=0.0)
    p_row = p_in.qkv + i_b * stride_qkv
    b_q = tl.load(p_row + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_k = tl.load(p_row + (H + i_h) * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_row + 2 * H * K + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    if p_gate is not None:
        p_channel = p_gate + i_b * stride_gate + i_h * D + o_d
        b_gate = tl.load(p_channel, mask=m_d, other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    a = tl.load(p_in.a + i_b * stride_a + i_h).to(tl.float32)
    a += tl.load(p_in.dt_bias + i_h).to(tl.float32)
    softplus, _ = clamped_softplus(a, 0.0, float("inf"))
    log_decay = -exp(tl.load(p_in.A_log + i_h).to(tl.float32)) * softplus
    beta, _ = sigmoid(tl.load(p_in.b + i_b * stride_b + i_h).to(tl.float32))
    b_y, b_new = _move(b_old, scale * _unit(b_q), _unit(b_k), b_v, beta, log_decay)
    if p_in.mask is not None:
        b_new = tl.where(tl.load(p_in.mask + i_b) != 0, b_new, b_old)
    tl.store(p_state + o_state, b_new, mask=m_state)
    if p_gate is not None:
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) / D + eps) * b_weight
        b_y *= b_gate * tl.sigmoid(b_gate)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


def triton_delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `delta_step`, with the same arguments."""
    return delta_step_op(*(x.contiguous() for x in (q, k, v, beta, log_decay.float(), state)))


@operator("delta_step")
def delta_step_op(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y (B, H, D) and the new state, from contiguous inputs (B, H, ...)."""
    (batch, heads, channels), keys = v.shape, k.shape[-1]
    y, new_state = torch.empty_like(v), torch.empty_like(state)
    block = min(block_size(channels), STEP_CHANNELS)
    with torch.cuda.device_of(v):
        delta_step_kernel[(batch * heads, ceil_div(channels, block))](
            q, k, v, beta, log_decay, state, y, new_state, channels,
            K=keys, BK=block_size(keys), BD=block, num_warps=4,
        )  # fmt: skip
    return y, new_state


@delta_step_op.register_fake
def _(q, k, v, beta, log_decay, state):
    return torch.empty_like(v), torch.empty_like(state)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(True)


def _gradients(ctx: Any, dy: Tensor, dnew: Tensor) -> tuple:
    """In plain torch, because single steps are for decoding, not for training."""
    q, k, v, beta, log_decay, state, new_state = ctx.saved_tensors
    q, wide_k, wide_v, wide_beta, wide_dy = (x.float() for x in (q, k, v, beta, dy))
    kept = log_decay.exp()[..., None, None]
    decayed = kept * state
    error = wide_v - (wide_k[..., None] * decayed).sum(-2)
    dnew = dnew + q[..., None] * wide_dy[..., None, :]
    # Gradients of beta error, which the key writes, and of the decayed state.
    dwritten = (wide_k[..., None] * dnew).sum(-2)
    dv = wide_beta[..., None] * dwritten
    ddecayed = dnew - wide_k[..., None] * dv[..., None, :]
    dq = (new_state * wide_dy[..., None, :]).sum(-1)
    dk = (dnew * (wide_beta[..., None] * error)[..., None, :]).sum(-1)
    dk = dk - (decayed * dv[..., None, :]).sum(-1)
    dbeta = (dwritten * error).sum(-1)
    ddecay = (ddecayed * decayed).sum((-2, -1))
    narrow = (dq.to(k.dtype), dk.to(k.dtype), dv.to(v.dtype), dbeta.to(beta.dtype))
    return *narrow, ddecay, kept * ddecayed


delta_step_op.register_autograd(_gradients, setup_context=_save)


def fused_delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    mask: Tensor | None = None,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """One token of a delta layer between its convolution and o_proj. No gradient.

    q and k are scaled to unit length, then q by K^-1/2. beta = sigmoid(b) and
    log_decay = -exp(A_log) softplus(a + dt_bias).

    Args:
        qkv: (B, 2 H K + H D) queries, keys and values after the convolution, joined in this order.
        a, b: (B, H) logits; A_log, dt_bias: (H,). Rows of qkv, a, b and gate may be strided.
        state: (B, H, K, D) float32, contiguous; overwritten.
        mask: (B,), 0 at padding, which leaves the state as it is.
        gate: (B, H D), and norm_weight: (D,), with its eps; None for y alone.

    Returns:
        y, or RMSNorm(y) silu(gate) with a gate; (B, H, D) in the dtype of qkv.
    """
    batch, heads, keys, channels = state.shape
    rows = {"qkv": (qkv, heads * (2 * keys + channels)), "a": (a, heads), "b": (b, heads)}
    if gate is not None:
        rows["gate"] = (gate, heads * channels)
    for name, (x, width) in rows.items():
        if x.shape != (batch, width) or x.stride(1) != 1:
            raise ValueError(
                f"{name} must have shape {(batch, width)} and a contiguous last axis, "
                f"got {tuple(x.shape)} with strides {x.stride()}"
            )
    whole = {"A_log": (A_log, (heads,)), "dt_bias": (dt_bias, (heads,)), "state": (state, None)}
    if gate is not None:
        whole["norm_weight"] = (norm_weight, (channels,))
    for name, (x, shape) in whole.items():
        if x is None or shape not in (None, x.shape) or not x.is_contiguous():
            got = "None" if x is None else f"{tuple(x.shape)} with strides {x.stride()}"
            shape = tuple(state.shape) if shape is None else shape
            raise ValueError(f"{name} must have shape {shape} and be contiguous, got {got}")
    reason = triton_refusal(qkv)
    if reason is None and state.dtype != torch.float32:
        reason = f"state must be float32, got {state.dtype}"
    if reason:
        raise ValueError(f"fused_delta_step cannot run here: {reason}")
    tensors = (qkv, a, b, A_log, dt_bias, state, gate, norm_weight)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("fused_delta_step has no gradient; call it under torch.no_grad()")
    mask = None if mask is None else mask.contiguous()
    return fused_delta_step_op(qkv, a, b, A_log, dt_bias, state, mask, gate, norm_weight, eps)


@operator("fused_delta_step", mutates=("state",))
def fused_delta_step_op(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    mask: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """y, or z with a gate, (B, H, D)."""
    batch, heads, keys, channels = state.shape
    y = qkv.new_empty(batch, heads, channels)
    with torch.cuda.device_of(qkv):
        fused_delta_step_kernel[(heads, batch)](
            StepInputs(qkv, a, b, A_log, dt_bias, mask), state, gate, norm_weight, y,
            qkv.stride(0), a.stride(0), b.stride(0), 0 if gate is None else gate.stride(0),
            keys**-0.5, eps, heads, channels,
            K=keys, BK=block_size(keys), BD=block_size(channels), num_warps=FUSED_WARPS,
        )  # fmt: skip
    return y


@fused_delta_step_op.register_fake
def _(qkv, a, b, A_log, dt_bias, state, *rest):
    return qkv.new_empty(state.shape[0], state.shape[1], state.shape[3])
