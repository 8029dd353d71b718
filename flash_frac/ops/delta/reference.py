"""The specification: the gated delta rule as a loop over tokens, in the precision of its inputs.

    decayed = a state,   state = decayed + beta k (v - decayed^T k)^T,   y = state^T q

with a = exp(log_decay). The rest of this folder is tested against these two functions.
Letters: B batch, T time, H heads, K key channels, D value channels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from flash_frac.ops.scan.reference import expm1, zero_state


def delta_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHD: Tensor,
    beta_BH: Tensor,
    log_decay_BH: Tensor,
    state_BHKD: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token. Computes in the state's dtype; y has the dtype of v."""
    q, k, v, beta, log_decay = (
        x.to(state_BHKD.dtype) for x in (q_BHK, k_BHK, v_BHD, beta_BH, log_decay_BH)
    )
    # a - 1 keeps the digits of a slow decay; a itself, close to 1, does not.
    state_BHKD = state_BHKD + expm1(log_decay)[..., None, None] * state_BHKD
    error_BHD = v - (k[..., None] * state_BHKD).sum(-2)
    state_BHKD = state_BHKD + (beta[..., None] * k)[..., None] * error_BHD[..., None, :]
    y_BHD = (q[..., None] * state_BHKD).sum(-2)
    return y_BHD.to(v_BHD.dtype), state_BHKD


def recurrent_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "recurrent" of `delta_scan`, with the same arguments."""
    if initial_state is None:
        initial_state = zero_state(v, k, cu_seqlens)
    if cu_seqlens is not None:
        parts = []
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            q_n, k_n, v_n, beta_n, decay_n = (x[:, start:end] for x in (q, k, v, beta, log_decay))
            state = initial_state[n : n + 1]
            parts.append(recurrent_delta(q_n, k_n, v_n, beta_n, decay_n, state, None))
        return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])
    state, outputs = initial_state, []
    for t in range(v.shape[1]):
        y, state = delta_step(q[:, t], k[:, t], v[:, t], beta[:, t], log_decay[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), state
