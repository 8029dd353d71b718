"""The scan in plain PyTorch: parallel inside chunks, parallel across chunks.

With `l` the running sum of log_decay inside a chunk of C tokens, and S the state before the chunk,

    gamma[t, k] = sum_m read[t, m] write[k, m] exp(l[t, m] - l[k, m])        t >= k
    y[t]        = sum_k gamma[t, k] u[k] + sum_m read[t, m] exp(l[t, m]) S[m]
    S_next[m]   = exp(l[C, m]) S[m] + sum_k write[k, m] exp(l[C, m] - l[k, m]) u[k]

Every exponent is a difference of running sums and is <= 0. The states before all chunks come from a
scan over chunks that is itself grouped, so that no Python loop runs over chunks. The backward pass
is written out: autograd would keep the (C, C, M) exponentials of every chunk.

Letters: B batch, N chunks, H heads, C tokens of a chunk, D head channels, M modes, S sequences of a
row (1, or all packed sequences), G chunks of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.scan.reference import zero_state

# A token and head costs C*M exponentials and M*D/C elements of state; 16 measured fastest.
CHUNK = 16
GROUP = 16
# Exponentials made at a time: on a CPU they should stay in the cache, on a GPU fill the machine.
PIECE_CPU, PIECE_GPU = 1 << 19, 1 << 26


class Layout(NamedTuple):
    """Where the sequences of a row lie among its chunks.

    first: (S,) index of the first chunk of each sequence; last: (S,) of the last;
    starts: (N,) bool, True where a chunk begins a sequence, or None when each row is one sequence.
    """

    first: Tensor
    last: Tensor
    starts: Tensor | None

    def reversed(self, num_chunks: int) -> Layout:
        """The layout of the same chunks in reversed order."""
        starts = None
        if self.starts is not None:
            starts = torch.zeros_like(self.starts)
            starts[self.last] = True
            starts = starts.flip(0)
        return Layout(num_chunks - 1 - self.last, num_chunks - 1 - self.first, starts)


def _decay_between(l_XCM: Tensor) -> Tensor:
    """exp(l[t] - l[k]) as (X, t, k, M); above the diagonal it is 1, for the caller to mask."""
    return (l_XCM[:, :, None] - l_XCM[:, None]).clamp_max_(0).exp_()


def _decay_to_end(log_decay_BNHCM: Tensor) -> Tensor:
    """Decay of each token's write until the end of its chunk, summed from there."""
    later = F.pad(log_decay_BNHCM[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp_()


def _pieces(l_XCM: Tensor) -> list[slice]:
    num, C, M = l_XCM.shape
    elements = PIECE_CPU if l_XCM.device.type == "cpu" else PIECE_GPU
    size = max(1, elements // (C * C * M))
    return [slice(start, start + size) for start in range(0, num, size)]


def _mix(read_XCM: Tensor, write_XCM: Tensor, l_XCM: Tensor) -> Tensor:
    """gamma (X, C, C), zero above the diagonal."""
    parts = []
    for piece in _pieces(l_XCM):
        weighted = _decay_between(l_XCM[piece]).mul_(write_XCM[piece][:, None])
        parts.append((weighted @ read_XCM[piece][..., None]).squeeze(-1))
    return torch.cat(parts).tril_()


def _mix_backward(
    dgamma_XCC: Tensor, read_XCM: Tensor, write_XCM: Tensor, l_XCM: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of read and write in gamma, from a dgamma zero on and above the diagonal."""
    dread, dwrite = [], []
    for piece in _pieces(l_XCM):
        product = _decay_between(l_XCM[piece]).mul_(dgamma_XCC[piece][..., None])
        dread.append((product * write_XCM[piece][:, None]).sum(2))
        dwrite.append(product.mul_(read_XCM[piece][:, :, None]).sum(1))
    return torch.cat(dread), torch.cat(dwrite)


def _scan_chunks(state_BNHMD: Tensor, log_decay_BNHM: Tensor, starts_N: Tensor | None) -> Tensor:
    """state[i] += exp(log_decay[i]) state[i - 1] along N, but not where `starts` is True.

    Groups of G chunks are scanned by a matrix product each, and the group totals by recursion.
    """
    num_chunks = state_BNHMD.shape[1]
    pad = -num_chunks % GROUP
    if pad:
        state_BNHMD = F.pad(state_BNHMD, (0, 0, 0, 0, 0, 0, 0, pad))
        log_decay_BNHM = F.pad(log_decay_BNHM, (0, 0, 0, 0, 0, pad))
        starts_N = None if starts_N is None else F.pad(starts_N, (0, pad))
    # (B, N/G, H, M, G, D) and (B, N/G, H, M, G)
    state = state_BNHMD.unflatten(1, (-1, GROUP)).permute(0, 1, 3, 4, 2, 5)
    log_decay = log_decay_BNHM.unflatten(1, (-1, GROUP)).permute(0, 1, 3, 4, 2)
    total = log_decay.cumsum(-1)
    # Summed from j + 1 to i one by one: differences of totals would lose the digits of slow modes.
    between = log_decay[..., None].expand(*log_decay.shape, GROUP).tril(-1).cumsum(-2)
    weights = between.exp_().tril_()
    carry_in = total.exp()
    group_starts = None
    if starts_N is not None:
        segment = starts_N.unflatten(0, (-1, GROUP)).cumsum(-1)[None, :, None, None]
        weights = weights * (segment[..., :, None] == segment[..., None, :])
        carry_in = carry_in * (segment == 0)
        group_starts = segment[0, :, 0, 0, -1] > 0
    state = weights @ state
    if state.shape[1] > 1:
        group_state = _scan_chunks(state[..., -1, :], total[..., -1], group_starts)
        before = torch.cat([torch.zeros_like(group_state[:, :1]), group_state[:, :-1]], 1)
        state = state.addcmul_(carry_in[..., None], before[..., None, :])
    return state.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :num_chunks]


def _states_before(
    increment_BNHMD: Tensor, log_decay_BNHM: Tensor, initial_BSHMD: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """States before every chunk (B, N, H, M, D), and after every sequence (B, S, H, M, D)."""
    kept = log_decay_BNHM.index_select(1, layout.first).exp()[..., None] * initial_BSHMD
    after = _scan_chunks(
        increment_BNHMD.index_add(1, layout.first, kept), log_decay_BNHM, layout.starts
    )
    before = after.roll(1, 1).index_copy_(1, layout.first, initial_BSHMD)
    return before, after.index_select(1, layout.last)


def _forward(
    u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, initial: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, the states after all sequences, gamma, and the states before all chunks."""
    l_ = log_decay.cumsum(3)
    to_end = _decay_to_end(log_decay)
    gamma = _mix(*(x.flatten(0, 2) for x in (read, write, l_))).unflatten(0, u.shape[:3])
    increment = (write * to_end).transpose(-1, -2) @ u
    before, final = _states_before(increment, l_[..., -1, :], initial, layout)
    return gamma @ u + (read * l_.exp()) @ before, final, gamma, before


def _backward(
    dy: Tensor,
    dfinal: Tensor,
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    gamma: Tensor,
    before: Tensor,
    layout: Layout,
) -> tuple[Tensor, ...]:
    """Gradients of u, read, write, log_decay and the initial states."""
    lead, dy = u.shape[:3], dy.contiguous()
    l_ = log_decay.cumsum(3)
    from_start, to_end = l_.exp(), _decay_to_end(log_decay)
    # The gradient of the state after each chunk is the same scan, run from the right.
    increment = (read * from_start).transpose(-1, -2) @ dy
    dafter, dinitial = _states_before(
        increment.flip(1), l_[..., -1, :].flip(1), dfinal, layout.reversed(u.shape[1])
    )
    dafter = dafter.flip(1)
    du = gamma.transpose(-1, -2) @ dy + (write * to_end) @ dafter

    dgamma = dy @ u.transpose(-1, -2)
    same_token = dgamma.diagonal(dim1=-2, dim2=-1)[..., None]
    # A token's own term has no decay in it; left out here, fast modes get an exact zero below.
    dread, dwrite = _mix_backward(
        dgamma.tril(-1).flatten(0, 2), *(x.flatten(0, 2) for x in (read, write, l_))
    )
    dread, dwrite = dread.unflatten(0, lead), dwrite.unflatten(0, lead)
    dread_state = from_start * (dy @ before.transpose(-1, -2))
    dwrite_state = to_end * (u @ dafter.transpose(-1, -2))

    # log_decay[s] scales each path from a write at k < s to a read at t >= s: inside the chunk,
    # into it, out of it, and across it.
    ending = read * (dread + dread_state) - write * dwrite
    leaving = write * dwrite_state
    across = l_[..., -1, :].exp() * (before * dafter).sum(-1)
    dlog_decay = ending.flip(3).cumsum(3).flip(3) + across[..., None, :]
    dlog_decay += F.pad(leaving[..., :-1, :], (0, 0, 1, 0)).cumsum(3)

    dread += same_token * write + dread_state
    dwrite += same_token * read + dwrite_state
    return du, dread, dwrite, dlog_decay, dinitial


class ChunkScan(torch.autograd.Function):
    """The chunked scan of (B, N, H, C, ...) inputs, initial states and a layout, with its gradient.

    Mixed-precision regions are left at the door: they would round the products to 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        u, read, write, log_decay, initial, *layout = args
        with torch.autocast(u.device.type, enabled=False):
            y, final, gamma, before = _forward(u, read, write, log_decay, initial, Layout(*layout))
        ctx.save_for_backward(u, read, write, log_decay, gamma, before, *layout)
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        u, read, write, log_decay, gamma, before, *layout = ctx.saved_tensors
        dy, dfinal = grad_outputs
        with torch.autocast(dy.device.type, enabled=False):
            gradients = _backward(
                dy, dfinal, u, read, write, log_decay, gamma, before, Layout(*layout)
            )
        return *gradients, None, None, None


def _chunk_slots(
    cu_seqlens: Tensor, num_tokens: int, num_chunks: int
) -> tuple[Layout, Tensor, Tensor]:
    """Lay packed sequences out so that each begins at a chunk.

    Returns the layout, the token of each slot (N*C,), -1 for none, and the slot of each token (T,).
    Shapes depend on T and the number of sequences alone: nothing is read back from the device.
    """
    device = cu_seqlens.device
    start, length = cu_seqlens[:-1], cu_seqlens.diff()
    chunks = ((length + CHUNK - 1) // CHUNK).clamp_min(1)
    after = chunks.cumsum(0)
    first = after - chunks
    # Chunks left over at the end carry no token and belong to the last sequence.
    last = torch.cat([after[:-1] - 1, after.new_full((1,), num_chunks - 1)])
    starts = torch.zeros(num_chunks, dtype=torch.bool, device=device)
    starts[first] = True

    chunk = torch.arange(num_chunks, device=device)
    sequence = torch.searchsorted(first, chunk, right=True) - 1
    offset = ((chunk - first[sequence]) * CHUNK)[:, None] + torch.arange(CHUNK, device=device)
    token = start[sequence, None] + offset
    token = token.where(offset < length[sequence, None], -1).flatten()

    index = torch.arange(num_tokens, device=device)
    sequence = torch.searchsorted(cu_seqlens, index, right=True) - 1
    return Layout(first, last, starts), token, first[sequence] * CHUNK + index - start[sequence]


def _to_chunks(x: Tensor) -> Tensor:
    """(B, N*C, H, X) -> (B, N, H, C, X), contiguous."""
    return x.unflatten(1, (-1, CHUNK)).transpose(2, 3).contiguous()


def chunk_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "torch" of `frac_scan`: the same arguments."""
    if initial_state is None:
        initial_state = zero_state(u, read, cu_seqlens)
    dtype, num_tokens = u.dtype, u.shape[1]
    if num_tokens == 0:
        return torch.zeros_like(u), initial_state
    inputs = [x.to(initial_state.dtype) for x in (u, read, write, log_decay)]
    slot = None
    if cu_seqlens is None:
        num_chunks = -(-num_tokens // CHUNK)
        if pad := num_chunks * CHUNK - num_tokens:
            inputs = [F.pad(x, (0, 0, 0, 0, 0, pad)) for x in inputs]
        ends = torch.tensor([0, num_chunks - 1], device=u.device)
        layout, initial = Layout(ends[:1], ends[1:], None), initial_state[:, None]
    else:
        num_chunks = num_tokens // CHUNK + len(cu_seqlens) - 1
        layout, token, slot = _chunk_slots(cu_seqlens.long(), num_tokens, num_chunks)
        empty = (token < 0)[:, None, None]
        # An empty slot is an identity step: no write and no decay.
        inputs = [x[:, token].masked_fill(empty, 0) for x in inputs]
        initial = initial_state[None]
    y, final = ChunkScan.apply(*(_to_chunks(x) for x in inputs), initial, *layout)
    y = y.transpose(2, 3).flatten(1, 2)
    y = y[:, :num_tokens] if slot is None else y[:, slot]
    return y.to(dtype), final.flatten(0, 1)
