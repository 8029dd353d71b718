"""One token of the scan: each program updates the state of a head and a block of channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.triton.exponential import decay_and_add
from flash_frac.ops.triton.launch import block_size, ceil_div


@triton.jit
def step_kernel(
    u,
    read,
    write,
    log_decay,
    state,
    y,
    new_state,
    D,
    M: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_m, o_d = tl.arange(0, BM), tl.program_id(1) * BD + tl.arange(0, BD)
    m_m, m_d = o_m < M, o_d < D
    b_u = tl.load(u + i_row * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_read = tl.load(read + i_row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
    b_write = tl.load(write + i_row * M + o_m, mask=m_m, other=0.0).to(tl.float32)
    b_decay = tl.load(log_decay + i_row * M + o_m, mask=m_m, other=0.0)
    o_state = i_row * M * D + o_m[:, None] * D + o_d
    m_state = m_m[:, None] & m_d[None, :]
    b_state = tl.load(state + o_state, mask=m_state, other=0.0)
    b_state = decay_and_add(b_state, b_decay[:, None], b_write[:, None] * b_u[None, :])
    tl.store(new_state + o_state, b_state, mask=m_state)
    b_y = tl.sum(b_read[:, None] * b_state, 0)
    tl.store(y + i_row * D + o_d, b_y.to(y.dtype.element_ty), mask=m_d)


def step(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y (B, H, D) and the new state, from contiguous inputs (B, H, ...)."""
    batch, heads, channels = u.shape
    num_modes = read.shape[-1]
    y, new_state = torch.empty_like(u), torch.empty_like(state)
    block = min(block_size(channels), 64)
    step_kernel[(batch * heads, ceil_div(channels, block))](
        u,
        read,
        write,
        log_decay,
        state,
        y,
        new_state,
        channels,
        M=num_modes,
        BM=block_size(num_modes, smallest=1),
        BD=block,
        num_warps=1,
    )
    return y, new_state
