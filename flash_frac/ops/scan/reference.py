"""The specification: the paper's Algorithm 1 as a loop over tokens, in the inputs' precision.

    state = rho * state + write * u,   y = sum_m read_m state_m

with rho = exp(log_decay). Everything else in this package is tested against these two functions.
Letters: B batch, T time, H heads, D head channels, M modes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1 to full accuracy, also when compiled.

    On a CPU torch.compile turns torch.expm1 into exp(x) - 1, which loses the rate of a slow mode.
    """
    if torch.compiler.is_compiling() and x.device.type == "cpu":
        # Below this the result is -1, and sinh would overflow beyond -178.
        x = x.clamp_min(-64)
        return 2 * (x / 2).exp() * (x / 2).sinh()
    return torch.expm1(x)


def step(
    u_BHD: Tensor, read_BHM: Tensor, write_BHM: Tensor, log_decay_BHM: Tensor, state_BHMD: Tensor
) -> tuple[Tensor, Tensor]:
    """One token. Computes in the state's dtype; y has the dtype of u."""
    u, read, write, log_decay = (
        x.to(state_BHMD.dtype) for x in (u_BHD, read_BHM, write_BHM, log_decay_BHM)
    )
    # rho - 1 keeps the digits of a slow mode; rho itself, close to 1, does not.
    change = expm1(log_decay)[..., None] * state_BHMD + write[..., None] * u[..., None, :]
    state_BHMD = state_BHMD + change
    y_BHD = (read[..., None] * state_BHMD).sum(-2)
    return y_BHD.to(u_BHD.dtype), state_BHMD


def zero_state(u: Tensor, read: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The state (N, H, M, D) of N sequences before their first token, in accumulation dtype."""
    num = u.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.promote_types(u.dtype, torch.float32)
    return u.new_zeros(num, u.shape[2], read.shape[3], u.shape[3], dtype=dtype)


def recurrent_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "recurrent" of `frac_scan`, with the same arguments."""
    if initial_state is None:
        initial_state = zero_state(u, read, cu_seqlens)
    if cu_seqlens is not None:
        parts = []
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            u_n, read_n, write_n, decay_n = (x[:, start:end] for x in (u, read, write, log_decay))
            state = initial_state[n : n + 1]
            parts.append(recurrent_scan(u_n, read_n, write_n, decay_n, state, None))
        return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])
    state, outputs = initial_state, []
    for t in range(u.shape[1]):
        y, state = step(u[:, t], read[:, t], write[:, t], log_decay[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(u), state
