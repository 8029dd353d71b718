"""The two passes over chunks in plain PyTorch, and the isolation of non-finite tokens.

With S the state before a chunk of C tokens, and all sums over log_decay,

    y[t]        = sum_k gamma[t, k] u[k] + sum_m read[t, m] exp(sum over p <= t) S[m]
    S_next[m]   = exp(sum over the chunk) S[m] + sum_k write[k, m] exp(sum over p > k) u[k]

with gamma from `levels.py`. The states before all chunks come from a scan over groups of chunks:
no Python loop runs over chunks.

A non-finite token affects only its own sequence, from that token on. Products with zeros would
carry a NaN to earlier tokens and to other sequences, so such a token is zeroed first, and the
results that depend on it are set to NaN.

Letters: B batch, N chunks, H heads, C tokens of a chunk, D head channels, M modes, S sequences of a
row (1, or all packed sequences), G chunks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.scan.levels import decay_sums, mix, mix_backward

GROUP = 16
# Most groups in an exported graph, whose number of doublings is fixed.
MOST_GROUPS = 1 << 12


class Layout(NamedTuple):
    """Positions of the sequences of a packed row among its chunks.

    first: (S,) index of the first chunk of each sequence; last: (S,) of the last;
    sequence: (N,) the sequence of each chunk.
    """

    first: Tensor
    last: Tensor
    sequence: Tensor

    def reversed(self) -> Layout:
        """The layout with chunks, and so sequences, in reversed order."""
        end = self.sequence.shape[0] - 1
        return Layout(
            (end - self.last).flip(0),
            (end - self.first).flip(0),
            (len(self.first) - 1 - self.sequence).flip(0),
        )


def blocks(x: Tensor, axis: int, size: int) -> Tensor:
    """x, zero-padded, with the axis split into blocks of `size`."""
    length = x.shape[axis]
    if not torch.compiler.is_exporting():
        count = -(-length // size)
        x = F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, count * size - length))
        return x.unflatten(axis, (count, size))
    # One graph for all lengths: at least two blocks, and never an empty padding.
    count = (length + 2 * size - 1) // size
    index = torch.arange(count * size, device=x.device)
    x = x.index_select(axis, index.clamp_max(length - 1)).unflatten(axis, (count, size))
    after = (index >= length).view(count, size, *(1,) * (x.ndim - axis - 2))
    return x.masked_fill(after, 0)


def trim(x: Tensor, length: int) -> Tensor:
    """The first `length` entries of axis 1, without a check that would specialise an export."""
    if torch.compiler.is_exporting():
        return x.index_select(1, torch.arange(length, device=x.device))
    return x[:, :length]


def _scan_groups(state: Tensor, log_decay: Tensor, sequence: Tensor | None) -> Tensor:
    """Like `_scan_chunks`, by doubling; for few chunks, because it takes log2(N) passes."""
    num = state.shape[1]
    if exporting := torch.compiler.is_exporting():
        torch._check(num <= MOST_GROUPS, lambda: "an exported graph scans at most 2^21 tokens")
    index, shift = torch.arange(num, device=state.device), 1
    while shift < (MOST_GROUPS if exporting else num):
        earlier = (index - shift).clamp_min(0)
        apart = index < shift
        if sequence is not None:
            apart = apart | (sequence != sequence[earlier])
        kept = log_decay.masked_fill(apart[:, None, None], -torch.inf)
        state = state + kept.exp()[..., None] * state.index_select(1, earlier)
        log_decay = kept + log_decay.index_select(1, earlier)
        shift *= 2
    return state


def _scan_chunks(state: Tensor, log_decay: Tensor, sequence: Tensor | None) -> Tensor:
    """state[i] += exp(log_decay[i]) state[i - 1] along N, if i - 1 is in the same sequence.

    state (B, N, H, M, D), log_decay (B, N, H, M), sequence (N,) or None for a single sequence.
    One matrix product scans each group of G chunks; then the groups are scanned.
    """
    num_chunks = state.shape[1]
    # (B, N/G, H, M, G, D) and (B, N/G, H, M, G)
    state = blocks(state, 1, GROUP).permute(0, 1, 3, 4, 2, 5)
    log_decay = blocks(log_decay, 1, GROUP).permute(0, 1, 3, 4, 2)
    total = log_decay.cumsum(-1)
    # Sums from j + 1 to i are explicit, because differences of totals would lose digits.
    between = log_decay[..., None].expand(*log_decay.shape, GROUP).tril(-1).cumsum(-2)
    weights, carry_in = between.exp().tril(), total.exp()
    last = None
    if sequence is not None:
        group = blocks(sequence, 0, GROUP)
        last = group[:, -1]
        previous = last.roll(1)[None, :, None, None, None]
        group = group[None, :, None, None]
        weights = weights * (group[..., :, None] == group[..., None, :])
        carry_in = carry_in * (group == previous)
    state = weights @ state
    after = _scan_groups(state[..., -1, :], total[..., -1], last)
    # The first group has no predecessor.
    first = (torch.arange(after.shape[1], device=after.device) == 0)[:, None, None, None]
    before = after.roll(1, 1).masked_fill(first, 0)
    state = state + carry_in[..., None] * before[..., None, :]
    return trim(state.permute(0, 1, 4, 2, 3, 5).flatten(1, 2), num_chunks)


def _states_before(
    increment: Tensor, log_decay: Tensor, initial: Tensor, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """State before each chunk (B, N, H, M, D), and after each sequence (B, S, H, M, D)."""
    first = first_chunks(layout, increment.device)
    kept = log_decay.index_select(1, first).exp()[..., None] * initial
    sequence = None if layout is None else layout.sequence
    after = _scan_chunks(increment.index_add(1, first, kept), log_decay, sequence)
    before = after.roll(1, 1).index_copy(1, first, initial)
    return before, after[:, -1:] if layout is None else after.index_select(1, layout.last)


def first_chunks(layout: Layout | None, device: torch.device) -> Tensor:
    """The first chunk of each sequence."""
    return torch.zeros(1, dtype=torch.long, device=device) if layout is None else layout.first


def _forward(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    layout: Layout | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the state after each sequence, gamma, and the state before each chunk."""
    sums = decay_sums(log_decay)
    gamma = mix(read, write, sums)
    increment = (write * sums.suffix.exp()).mT @ u
    before, final = _states_before(increment, sums.total, initial, layout)
    return gamma @ u + (read * sums.prefix.exp()) @ before, final, gamma, before


def _backward(
    dy: Tensor,
    dfinal: Tensor,
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    before: Tensor,
    layout: Layout | None,
) -> tuple[Tensor, ...]:
    """Gradients of u, read, write, log_decay and the initial states."""
    sums = decay_sums(log_decay)
    from_start, to_end = sums.prefix.exp(), sums.suffix.exp()
    # The gradient of the state after each chunk is the same scan, run from the right.
    increment = (read * from_start).mT @ dy
    turned = None if layout is None else layout.reversed()
    dafter, dinitial = _states_before(increment.flip(1), sums.total.flip(1), dfinal.flip(1), turned)
    dafter, dinitial = dafter.flip(1), dinitial.flip(1)
    du = gamma.mT @ dy + (write * to_end) @ dafter

    dread_state = from_start * (dy @ before.mT)
    dwrite_state = to_end * (u @ dafter.mT)
    across = sums.total.exp() * (before * dafter).sum(-1)
    dsums = (read * dread_state, write * dwrite_state, across)
    dread, dwrite, dlog_decay = mix_backward(dy @ u.mT, read, write, sums, dsums)
    return du, dread + dread_state, dwrite + dwrite_state, dlog_decay, dinitial


def not_finite(x: Tensor) -> Tensor:
    """Whether the last axis holds an inf or NaN: times zero, both are NaN."""
    return (x * 0).sum(-1).isnan()


def finite(x: Tensor) -> Tensor:
    """x with zeros for inf and NaN."""
    return x.nan_to_num(0, 0, 0)


def spoilt(bad: Tensor, bad_state: Tensor, layout: Layout | None) -> tuple[Tensor, Tensor]:
    """Mask of tokens at or after a bad one (B, N, H, C), and of bad final states (B, S, H).

    bad: (B, N, H, C), bad tokens; bad_state: (B, S, H), bad initial states.
    """
    inside = bad.cumsum(-1)
    count = inside[..., -1].cumsum(1)
    before = count - inside[..., -1]
    if layout is None:
        before, final = before + bad_state, count[:, -1:] + bad_state
    else:
        base = before.index_select(1, layout.first) - bad_state.long()
        before = before - base.index_select(1, layout.sequence)
        final = count.index_select(1, layout.last) - base
    return inside + before[..., None] > 0, final > 0


def nan_where(bad: Tensor, like: Tensor) -> Tensor:
    """NaN or 0, to be added: unlike torch.where, a sum passes a NaN gradient on."""
    return torch.zeros_like(bad, dtype=like.dtype).masked_fill(bad, torch.nan)


def _clean(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Inputs of `_forward` with the non-finite values zeroed that would affect other tokens."""
    u, read, write, log_decay, initial = inputs
    log_decay = log_decay.nan_to_num(0, 0, -torch.inf)
    return finite(u), finite(read), finite(write), log_decay, finite(initial)


def without_autocast(x: Tensor) -> torch.autocast:
    """Disable autocast, which would round the products to 16 bits."""
    return torch.autocast(x.device.type, enabled=False)


def isolated_forward(
    inputs: Sequence[Tensor], layout: Layout | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """y and the state after each sequence; gamma and the states before chunks for the backward."""
    u, read, write, log_decay, initial = inputs
    # -inf is a valid decay; +inf and NaN are not.
    bad = not_finite(u) | not_finite(write) | not_finite(log_decay.amax(-1, True).clamp_min(0))
    after, bad_final = spoilt(bad, not_finite(initial.flatten(-2)), layout)
    # A bad read affects only its own token.
    bad_y = after | not_finite(read)
    with without_autocast(u):
        y, final, gamma, before = _forward(*_clean(inputs), layout=layout)
    y = y + nan_where(bad_y[..., None], y)
    return (y, final + nan_where(bad_final[..., None, None], y)), (gamma, before)


def isolated_backward(
    dy: Tensor,
    dfinal: Tensor,
    inputs: Sequence[Tensor],
    kept: Sequence[Tensor],
    layout: Layout | None,
) -> tuple[Tensor, ...]:
    """Gradients; a non-finite dy or read makes those of its sequence up to that token NaN."""
    bad, bad_state = not_finite(dy) | not_finite(inputs[1]), not_finite(dfinal.flatten(-2))
    turned = None if layout is None else layout.reversed()
    # Backward in time, inside the chunks too.
    up_to, first = spoilt(bad.flip(1, 3), bad_state.flip(1), turned)
    up_to, first = up_to.flip(1, 3)[..., None], first.flip(1)[..., None, None]
    clean = _clean(inputs)[:4]
    with without_autocast(dy):
        gradients = _backward(finite(dy), finite(dfinal), *clean, *kept, layout=layout)
    du, dread, dwrite, ddecay, dinitial = gradients
    nan = nan_where(up_to, dy)
    dread = dread + nan_where(bad[..., None], dy)
    return du + nan, dread, dwrite + nan, ddecay + nan, dinitial + nan_where(first, dy)
