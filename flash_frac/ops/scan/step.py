"""The Triton backend of `frac_step`: kernel, launch and operator of one token.

Letters: B batch, H heads, M modes in a block BM, D head channels in blocks BD.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import block_size, ceil_div, decay_and_add
from flash_frac.ops.backends import operator


@triton.jit
def step_kernel(
    p_u, p_read, p_write, p_log_decay, p_state, p_y, p_new_state, D,
    M: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """S' = exp(log_decay) S + write u and y = sum_m read S', for a head and a block of channels.

    p_u, p_y (B, H, D); p_read, p_write, p_log_decay (B, H, M); p_state, p_new_state (B, H, M, D).
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_m, o_d = tl.arange(0, BM), tl.program_id(1) * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    # [BD] and [BM]
    b_u = tl.load(p_u + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_read = tl.load(p_read + i_row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
    b_write = tl.load(p_write + i_row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
    b_decay = tl.load(p_log_decay + i_row * M + o_m, mask=m_m, other=0.0)
    # [BM, BD]
    o_state = i_row * M * D + o_m[:, None] * D + o_d
    m_state = m_m[:, None] & m_d[None, :]
    b_state = tl.load(p_state + o_state, mask=m_state, other=0.0)
    b_state = decay_and_add(b_state, b_decay[:, None], b_write[:, None] * b_u[None, :])
    tl.store(p_new_state + o_state, b_state, mask=m_state)
    b_y = tl.sum(b_read[:, None] * b_state, 0)
    tl.store(p_y + i_row * D + o_d, b_y.to(p_y.dtype.element_ty), mask=m_d)


def triton_step(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Backend "triton" of `frac_step`, with the same arguments."""
    return step_op(*(x.contiguous() for x in (u, read, write, log_decay.float(), state)))


@operator("step")
def step_op(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y (B, H, D) and the new state, from contiguous inputs (B, H, ...)."""
    batch, heads, channels = u.shape
    num_modes = read.shape[-1]
    y, new_state = torch.empty_like(u), torch.empty_like(state)
    block = min(block_size(channels), 64)
    with torch.cuda.device_of(u):
        step_kernel[(batch * heads, ceil_div(channels, block))](
            u, read, write, log_decay, state, y, new_state, channels,
            M=num_modes,
            BM=block_size(num_modes, smallest=1),
            BD=block,
            num_warps=1,
        )  # fmt: skip
    return y, new_state


@step_op.register_fake
def _(u, read, write, log_decay, state):
    return torch.empty_like(u), torch.empty_like(state)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(True)


def _gradients(ctx: Any, dy: Tensor, dnew: Tensor) -> tuple:
    """In plain torch, because single steps are for decoding, not for training."""
    u, read, write, log_decay, state, new_state = ctx.saved_tensors
    wide_dy, kept = dy.float(), log_decay.exp()
    dnew = dnew + read[..., None] * wide_dy[..., None, :]
    du = (write[..., None] * dnew).sum(-2).to(u.dtype)
    dread = (new_state * wide_dy[..., None, :]).sum(-1).to(read.dtype)
    dwrite = (dnew * u[..., None, :]).sum(-1).to(write.dtype)
    dlog_decay = kept * (dnew * state).sum(-1)
    return du, dread, dwrite, dlog_decay, kept[..., None] * dnew


step_op.register_autograd(_gradients, setup_context=_save)
