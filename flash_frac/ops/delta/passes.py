"""The gated delta rule over chunks in plain PyTorch, by the WY form, and its gradient.

With S the state before a chunk of C tokens, and all sums over log_decay,

    decay[t, j] = exp(sum over j < p <= t),   t >= j
    (I + L) u   = beta v - beta exp(sum over p <= t) k S
    y           = exp(sum over p <= t) q S + attention u
    S_next      = exp(sum over the chunk) S + (exp(sum over p > t) k)^T u

with L[t, j] = beta[t] decay[t, j] k[t].k[j] for t > j, attention[t, j] = decay[t, j] q[t].k[j].

Every exponent is a sum of log_decay between two tokens, never a difference of larger sums: a token
that forgets everything (log_decay down to -inf) costs the others no accuracy. A non-finite token is
zeroed first, and then set to NaN in the results that depend on it, as in `scan/passes.py`.

Letters: N chunks, G rows and heads of a batch, C tokens of a chunk, K key channels, D value
channels, S sequences of a row (1, or all packed sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.scan.passes import (
    Layout,
    finite,
    first_chunks,
    nan_where,
    not_finite,
    spoilt,
    without_autocast,
)
from flash_frac.ops.scan.reference import expm1

# Most chunks in an exported graph, whose number of doublings is fixed: 2^21 tokens.
MOST_CHUNKS = 1 << 16


class Decays(NamedTuple):
    """Decays in chunks.

    between: (N, G, C, C), 0 above the diagonal; from_start, to_end: (N, G, C, 1); change:
    (N, G, 1, 1), the decay over the chunk minus 1, which keeps the digits of a slow decay.
    """

    between: Tensor
    from_start: Tensor
    to_end: Tensor
    change: Tensor


def _decays(log_decay: Tensor) -> Decays:
    size = log_decay.shape[-2]
    between = log_decay.expand(*log_decay.shape[:-1], size).tril(-1).cumsum(-2).exp().tril()
    since = log_decay.cumsum(-2)
    return Decays(between, since.exp(), between[..., -1, :, None], expm1(since[..., -1:, :]))


def unit_triangular_inverse(matrix: Tensor) -> Tensor:
    """Inverse of I + matrix (..., C, C), strictly lower triangular, C a power of two, by doubling.

    Two inverted blocks P and Q on the diagonal, with X below P, join into one of twice the size:
    [[P, 0], [-Q X P, Q]]. Powers of the matrix would need fewer steps, but grow without bound and
    cancel where keys repeat.
    """
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
    return inverse.squeeze(-3)


class System(NamedTuple):
    """State updates of chunks: u = inverse (values - reads S), S_next = S + change S + writes^T u.

    inverse: (N, G, C, C); values: (N, G, C, D); reads, writes: (N, G, C, K); change: (N, G, 1, 1).
    """

    inverse: Tensor
    values: Tensor
    reads: Tensor
    writes: Tensor
    change: Tensor


def _pass_on(
    system: System, initial: Tensor, layout: Layout | None
) -> tuple[Tensor, Tensor, Tensor]:
    """u, the state before each chunk (N, G, K, D), and after each sequence (S, G, K, D)."""
    state, us, before, after = initial[0], [], [], []
    for n, (inverse, values, reads, writes, change) in enumerate(
        zip(*(x.unbind(0) for x in system), strict=True)
    ):
        state = _taken_up(state, initial, n, None if layout is None else layout.first, layout)
        before.append(state)
        us.append(inverse @ torch.baddbmm(values, reads, state, alpha=-1))
        state = torch.baddbmm(torch.addcmul(state, change, state), writes.mT, us[-1])
        after.append(state)
    if layout is None:
        return torch.stack(us), torch.stack(before), state[None]
    return torch.stack(us), torch.stack(before), torch.stack(after).index_select(0, layout.last)


def _taken_up(
    state: Tensor, given: Tensor, n: int, ends: Tensor | None, layout: Layout | None
) -> Tensor:
    """The state; if chunk n is in `ends`, the given state (S, G, K, D) of its sequence instead."""
    if ends is None or layout is None:
        return state
    sequence = layout.sequence[n : n + 1]
    return torch.where(ends[sequence] == n, given.index_select(0, sequence)[0], state)


def _pass_on_by_doubling(
    system: System, initial: Tensor, layout: Layout | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `_pass_on`, in one graph for any number of chunks: torch.export cannot trace a loop."""
    inverse, values, reads, writes, change = system
    num = values.shape[0]
    torch._check(num <= MOST_CHUNKS, lambda: "an exported graph scans at most 2^21 tokens")
    solved = writes.mT @ inverse
    eye = torch.eye(reads.shape[-1], dtype=reads.dtype, device=reads.device)
    transition = eye + change * eye - solved @ reads
    first = first_chunks(layout, reads.device)
    entering = transition.index_select(0, first) @ initial
    after = (solved @ values).index_add(0, first, entering)
    # A sequence takes nothing from the previous one.
    transition = transition.index_fill(0, first, 0)
    index, shift = torch.arange(num, device=reads.device), 1
    while shift < MOST_CHUNKS:
        earlier = (index - shift).clamp_min(0)
        after = after + transition @ after.index_select(0, earlier)
        transition = transition @ transition.index_select(0, earlier)
        shift *= 2
    before = after.roll(1, 0).index_copy(0, first, initial)
    final = after[-1:] if layout is None else after.index_select(0, layout.last)
    return inverse @ (values - reads @ before), before, final


class Kept(NamedTuple):
    """Saved for the backward pass: keys is L without beta, `before` the states before chunks."""

    keys: Tensor
    attention: Tensor
    inverse: Tensor
    u: Tensor
    before: Tensor


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    layout: Layout | None,
) -> tuple[Tensor, Tensor, Kept]:
    """y, the state after each sequence, and what to save for the backward pass."""
    between, from_start, to_end, change = _decays(log_decay)
    keys, attention = (k @ k.mT) * between.tril(-1), (q @ k.mT) * between
    inverse = unit_triangular_inverse(beta * keys)
    system = System(inverse, beta * v, beta * from_start * k, to_end * k, change)
    pass_on = _pass_on_by_doubling if torch.compiler.is_exporting() else _pass_on
    u, before, final = pass_on(system, initial, layout)
    y = torch.baddbmm(
        (attention @ u).flatten(0, 1), (from_start * q).flatten(0, 1), before.flatten(0, 1)
    )
    return y.view_as(v), final, Kept(keys, attention, inverse, u, before)


def _pass_back(
    du: Tensor, dbefore: Tensor, dfinal: Tensor, system: System, layout: Layout | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inverse^-1 u (N, G, C, D), of the states after chunks, and of the initial ones.

    du, dbefore: gradients of u and of the states before chunks through y; both are overwritten.
    """
    dsolved, dafter = torch.empty_like(du), torch.empty_like(dbefore)
    dstate = dfinal[0]
    for n in reversed(range(len(du))):
        dstate = _taken_up(dstate, dfinal, n, None if layout is None else layout.last, layout)
        dafter[n] = dstate
        du[n].baddbmm_(system.writes[n], dstate)
        torch.bmm(system.inverse[n].mT, du[n], out=dsolved[n])
        dstate = torch.addcmul(dstate, system.change[n], dstate).add_(dbefore[n])
        dstate = dstate.baddbmm_(system.reads[n].mT, dsolved[n], alpha=-1)
        dbefore[n] = dstate
    first = first_chunks(layout, du.device)
    return dsolved, dafter, dbefore.index_select(0, first)


def _backward(
    dy: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    kept: Kept,
    layout: Layout | None,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, beta, log_decay and the initial states."""
    keys, attention, inverse, u, before = kept
    between, from_start, to_end, change = _decays(log_decay)
    queries, reads, writes = from_start * q, beta * from_start * k, to_end * k
    system = System(inverse, v, reads, writes, change)
    dsolved, dafter, dinitial = _pass_back(
        attention.mT @ dy, queries.mT @ dy, dfinal, system, layout
    )
    dattention, dkeys = dy @ u.mT, -(dsolved @ u.mT)
    dqueries, dreads, dwrites = dy @ before.mT, -(dsolved @ before.mT), u @ dafter.mT

    dq_scores, dk_scores = dattention * between, beta * dkeys * between.tril(-1)
    dq = dq_scores @ k + from_start * dqueries
    dk = dq_scores.mT @ q + (dk_scores + dk_scores.mT) @ k
    dk = dk + beta * from_start * dreads + to_end * dwrites
    dkeys = dkeys * keys
    dbeta = (dsolved * v).sum(-1) + (from_start * k * dreads).sum(-1) + dkeys.sum(-1)

    # Every p in a sum over j < p <= t gets its gradient: pairs of tokens on both sides of p, from
    # the start to a token after p, from a token before p to the end, and from the start to the end.
    pairs = (dattention * attention + beta * dkeys).flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
    dstart = (queries * dqueries + reads * dreads).sum(-1)
    dend = (writes * dwrites).sum(-1)[..., :-1]
    across = (1 + change[..., 0]) * (before * dafter).sum((-2, -1))[..., None]
    ddecay = pairs + dstart.flip(-1).cumsum(-1).flip(-1) + F.pad(dend, (1, 0)).cumsum(-1) + across
    return dq, dk, beta * dsolved, dbeta[..., None], ddecay[..., None], dinitial


def _clean(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Inputs of `_forward` with the non-finite values zeroed that would affect other tokens."""
    q, k, v, beta, log_decay, initial = inputs
    log_decay = log_decay.nan_to_num(0, 0, -torch.inf)
    return finite(q), finite(k), finite(v), finite(beta), log_decay, finite(initial)


def isolated_forward(
    inputs: Sequence[Tensor], layout: Layout | None
) -> tuple[tuple[Tensor, Tensor], Kept]:
    """y, the state after each sequence, and what the backward pass needs."""
    q, k, v, beta, log_decay, initial = inputs
    # -inf is a valid decay; +inf and NaN are not.
    bad = not_finite(k) | not_finite(v) | not_finite(beta) | not_finite(log_decay.clamp_min(0))
    after, bad_final = spoilt(bad[None], not_finite(initial.flatten(-2))[None], layout)
    # A bad query affects only its own token.
    bad_y = after[0] | not_finite(q)
    with without_autocast(v):
        y, final, kept = _forward(*_clean(inputs), layout=layout)
    y = y + nan_where(bad_y[..., None], y)
    return (y, final + nan_where(bad_final[0][..., None, None], y)), kept


def isolated_backward(
    dy: Tensor,
    dfinal: Tensor,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    layout: Layout | None,
) -> tuple[Tensor, ...]:
    """Gradients; a non-finite dy or query makes those of its sequence up to that token NaN."""
    bad, bad_state = not_finite(dy) | not_finite(inputs[0]), not_finite(dfinal.flatten(-2))
    turned = None if layout is None else layout.reversed()
    # Backward in time, inside the chunks too.
    up_to, first = spoilt(bad[None].flip(1, 3), bad_state[None].flip(1), turned)
    nan = nan_where(up_to[0].flip(0, 2)[..., None], dy)
    nan_initial = nan_where(first[0].flip(0)[..., None, None], dy)
    with without_autocast(dy):
        dq, *others, dinitial = _backward(
            finite(dy), finite(dfinal), *_clean(inputs)[:5], kept=Kept(*kept), layout=layout
        )
    dq = dq + nan_where(bad[..., None], dy)
    return dq, *(x + nan for x in others), dinitial + nan_initial
