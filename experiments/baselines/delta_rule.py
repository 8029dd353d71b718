"""The gated delta rule, by matrix products over chunks of time.

    S[t] = a[t] S[t - 1] + beta[t] k[t] (v[t] - a[t] S[t - 1]^T k[t])^T,    a = exp(log_decay)
    y[t] = S[t]^T q[t]

Within a chunk the corrections of all tokens are the solution of a unit triangular system
(Yang et al., 2024: the WY form), so that a chunk maps the state before it to the one after it by

    S' = transition S + added.

Letters: B batch, T time, H heads, K key channels, D value channels, C chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from experiments.baselines.ssd import chunk_length, decay_between, decay_to_end, split_chunks


class _Inverse(torch.autograd.Function):
    """Inverse of unit lower triangular (..., C, C), C a power of two, by doubling.

    Two inverted blocks P and Q on the diagonal, and X below the first, make one of twice the size:
    [[P, 0], [-Q X P, Q]]. Powers of the part below the diagonal would need fewer steps, but they
    grow without bound where keys repeat, and cancel.
    """

    @staticmethod
    def forward(ctx, matrix: Tensor) -> Tensor:
        chunk, size = matrix.shape[-1], 1
        inverse = torch.ones_like(matrix.diagonal(dim1=-2, dim2=-1))[..., None, None]
        while size < chunk:
            blocks = matrix.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size))
            below = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            below = -below if size == 1 else -(second @ below @ first)
            upper = torch.cat([first, torch.zeros_like(first)], -1)
            inverse = torch.cat([upper, torch.cat([below, second], -1)], -2)
            size *= 2
        inverse = inverse.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def unit_triangular_inverse(matrix: Tensor) -> Tensor:
    """Inverse of unit lower triangular matrices (..., C, C), C a power of two."""
    inverse = _Inverse.apply(matrix)
    assert isinstance(inverse, Tensor)
    return inverse


class _Chunks(NamedTuple):
    """k (chunks, B, H, C, K), log decays since the start of a chunk (chunks, B, H, C), decays to
    its end and between all pairs (..., C, C), and values and keys solved for corrections."""

    k: Tensor
    since_start: Tensor
    to_end: Tensor
    decay: Tensor
    solved_v: Tensor
    solved_k: Tensor


def _by_chunk(x: Tensor, chunk: int) -> Tensor:
    """(B, T, H, ...) -> (chunks, B, H, C, ...), contiguous for the products to come."""
    return split_chunks(x, dim=1, chunk=chunk).transpose(2, 3).transpose(0, 1).contiguous()


def _solve(k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> _Chunks:
    chunk = chunk_length(k.shape[1])
    k, v, beta, log_decay = (_by_chunk(x, chunk) for x in (k, v, beta, log_decay))
    since_start = log_decay.cumsum(-1)
    decay = decay_between(since_start)
    k_beta = k * beta[..., None]
    # Only what is below the diagonal is read: a diagonal of ones is understood.
    inverse = unit_triangular_inverse((k_beta @ k.mT) * decay)
    solved_v = inverse @ (v * beta[..., None])
    solved_k = inverse @ (k_beta * since_start.exp()[..., None])
    return _Chunks(k, since_start, decay_to_end(log_decay), decay, solved_v, solved_k)


def _pass_states(chunks: _Chunks, state: Tensor | None) -> list[Tensor]:
    """States (B, H, K, D) at all chunk boundaries, the first and the last included."""
    last = chunks.since_start[..., -1:]
    k_to_end = (chunks.k * chunks.to_end[..., None]).mT
    added = k_to_end @ chunks.solved_v
    eye = torch.eye(added.shape[-2], dtype=added.dtype, device=added.device)
    transition = eye * last.exp()[..., None] - k_to_end @ chunks.solved_k
    batch, shape = added.flatten(1, 2), added.shape[1:]
    s = torch.zeros_like(batch[0]) if state is None else state.to(added.dtype).flatten(0, 1)
    states = [s]
    for transition_i, added_i in zip(
        transition.flatten(1, 2).unbind(0), batch.unbind(0), strict=True
    ):
        states.append(torch.baddbmm(added_i, transition_i, states[-1]))
    return [s.view(shape) for s in states]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and last state of the recurrence above.

    Args:
        q, k: (B, T, H, K), float32 or float64, as all the others; keys of at most unit length.
        v: (B, T, H, D).
        beta: (B, T, H) in [0, 2]; log_decay: (B, T, H), at most 0.
        state: (B, H, K, D) before the first token; zeros if None.

    Returns:
        y (B, T, H, D) and the state after the last token.
    """
    num_tokens = q.shape[1]
    chunks = _solve(k, v, beta, log_decay)
    states = _pass_states(chunks, state)
    before = torch.stack(states[:-1])
    q = _by_chunk(q, chunks.k.shape[-2])
    corrected = chunks.solved_v - chunks.solved_k @ before
    y = (q * chunks.since_start.exp()[..., None]) @ before
    y = y + ((q @ chunks.k.mT) * chunks.decay) @ corrected
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens], states[-1]


def gated_delta_rule_state(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, state: Tensor | None = None
) -> Tensor:
    """The last state of `gated_delta_rule`, without outputs; arguments as there."""
    return _pass_states(_solve(k, v, beta, log_decay), state)[-1]
