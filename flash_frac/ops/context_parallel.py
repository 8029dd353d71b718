"""Context parallelism: one row of tokens cut into n slices, slice r held by rank r of a group.

A slice maps its incoming state S to P S + F, with

    P[m] = exp(sum_t log_decay[t, m])                              share of the old state kept
    F[m] = sum_t write[t, m] exp(sum_{s > t} log_decay[s, m]) u[t]     contribution of the slice

All ranks gather P and F of all slices. Rank r iterates S <- P_j S + F_j over j < r, then scans its
slice as usual. The gradient of a gather is the sum of the gradients from all ranks, so a loss
reaches back through all slices before its own.

Each rank sends every other, per layer, 4 B H M (D + 1) bytes for the scan and bytes(dtype) B I
(K - 1) for the convolution; the backward pass sends the same again. Neither depends on the length
of the row. A delta layer sends 4 B H K (D + K) bytes for its scan, with K key channels per head. An
attention layer sends the keys and values of all tokens.

Every rank must make the same calls in the same order, forward and backward: a rank whose tokens
have no loss multiplies by 0 and still calls backward(). Each rank computes its share of a
parameter's gradient; the gradient is their sum.

Packed documents: cu_seqlens (N + 1,) bounds the sequences of the local slice. The first sequence
continues the last one of the previous slice, and is empty (0 comes twice) if a document starts
with the slice. On rank 0 it starts from zeros.

Letters: B batch, T time (of a slice), H heads, D head channels, M modes, I channels, K taps (or key
channels of a delta head), N sequences (B, or those packed in a slice).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.backends import refuse_second_derivative
from flash_frac.ops.delta.api import check_delta_inputs, delta_scan
from flash_frac.ops.scan.api import ScanOutput, check_cu_seqlens, check_scan_inputs, frac_scan

if TYPE_CHECKING:
    # Builds of torch without distributed have the module, but it is empty.
    from torch.distributed import ProcessGroup


def sharded_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    group: ProcessGroup,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> ScanOutput:
    """`frac_scan` of a row that is sliced over ranks, in rank order.

    Slices may differ in length and in their number of packed sequences; everything else is the
    same on every rank. Call it, and backward(), on every rank of the group.

    Args:
        u: (B, T, H, D) this rank's slice; read, write, log_decay: (B, T, H, M), as in `frac_scan`.
        group: the ranks that share the row.
        cu_seqlens: (N + 1,) bounds of the sequences packed in this slice (B = 1); the first one
            continues the last one of the previous slice, and may be empty.
        backend: as in `frac_scan`.

    Returns:
        ScanOutput(y, state): y (B, T, H, D) of this slice; state (N, H, M, D) after the last token
        of each local sequence; on the last rank these are the states after the whole row.

    Example:
        >>> group = torch.distributed.group.WORLD
        >>> mine = [x.chunk(group.size(), 1)[group.rank()] for x in (u, read, write, log_decay)]
        >>> y, state = sharded_scan(*mine, group=group)
    """
    check_scan_inputs(u, read, write, log_decay, ("B", "T", "H", "D"))
    if u.shape[1] == 0:
        # Other ranks would wait for this rank's gradient, and an empty output has none.
        raise ValueError("u must hold at least one token; cut the row into fewer slices")
    start = _last_start(cu_seqlens, u)
    rank = _rank(group)
    added, kept = summarize(u, write, log_decay, start)
    # (n, B, H, M, D + 1): one exchange serves both.
    slices = _AllGather.apply(torch.cat([added, kept[..., None]], -1), group)
    # An empty sum, not zeros, because the exchange must be in rank 0's graph too.
    state = slices[:0, ..., :-1].sum(0)
    for j in range(rank):
        state = torch.addcmul(slices[j, ..., :-1], slices[j, ..., -1:], state)
    return frac_scan(
        u,
        read,
        write,
        log_decay,
        initial_state=_first_of(state, cu_seqlens),
        cu_seqlens=cu_seqlens,
        backend=backend,
    )


def sharded_delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    group: ProcessGroup,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> ScanOutput:
    """`delta_scan` of a row that is sliced over ranks, in rank order.

    P of a slice is a (K, K) matrix per head: the final state when the initial one is the identity
    and all values are zero. P and F cost one scan each, of K and D channels, before the main scan.

    Args:
        q, k: (B, T, H, K) this rank's slice; v: (B, T, H, D); beta, log_decay: (B, T, H).
        Other arguments and the result are as in `sharded_scan`.

    Example:
        >>> mine = [x.chunk(group.size(), 1)[group.rank()] for x in (q, k, v, beta, log_decay)]
        >>> y, state = sharded_delta_scan(*mine, group=group)
    """
    check_delta_inputs(q, k, v, beta, log_decay, ("B", "T", "H"))
    if v.shape[1] == 0:
        raise ValueError("v must hold at least one token; cut the row into fewer slices")
    gates, channels, rank = (beta, log_decay), v.shape[-1], _rank(group)
    added = delta_scan(q, k, v, *gates, cu_seqlens=cu_seqlens, backend=backend).state[-v.shape[0] :]
    kept = added.new_zeros(*added.shape[:3], k.shape[-1])
    # If the last sequence begins in this slice, none of the old state is kept.
    if _last_start(cu_seqlens, v) is None:
        kept.diagonal(dim1=-2, dim2=-1).fill_(1)
        blank = torch.zeros_like(k)
        kept = delta_scan(q, k, blank, *gates, initial_state=kept, backend=backend).state
    slices = _AllGather.apply(torch.cat([added, kept], -1), group)
    state = slices[:0, ..., :channels].sum(0)
    with torch.autocast(v.device.type, enabled=False):
        for j in range(rank):
            state = slices[j, ..., channels:] @ state + slices[j, ..., :channels]
    state = _first_of(state, cu_seqlens)
    return delta_scan(q, k, v, *gates, initial_state=state, cu_seqlens=cu_seqlens, backend=backend)


def summarize(
    u: Tensor, write: Tensor, log_decay: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """F (B, H, M, D) and P (B, H, M): a state S before the tokens becomes P S + F after them.

    Args:
        u: (B, T, H, D); write, log_decay: (B, T, H, M), as in `frac_scan`.
        start: first token of the last packed sequence; P is then 0, and F covers that sequence.
    """
    return _SliceSummary.apply(u, write, log_decay, start)


def window_before(
    x: Tensor, kernel: int, *, group: ProcessGroup, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The inputs x[-K + 1], ..., x[-1] of a causal convolution, from the previous rank.

    A document that began within the last K - 1 tokens of that slice has zeros before it, as at
    the start of any sequence. Call it, and backward(), on every rank of the group.

    Args:
        x: (B, T, I) this rank's slice of the convolution's inputs, T >= K - 1.
        kernel: K, taps of the convolution.
        group, cu_seqlens: as in `sharded_scan`.

    Returns:
        (N, I, K - 1), the `window` of `causal_conv`: zeros on rank 0, and for all packed
        sequences but the first.

    Example:
        >>> window = window_before(x, 4, group=group)
        >>> u, _ = causal_conv(x, weight, bias, window=window)
    """
    if x.ndim != 3:
        raise ValueError(f"x must have shape (B, T, I), got {tuple(x.shape)}")
    start = _last_start(cu_seqlens, x)
    num_tokens, past = x.shape[1], kernel - 1
    if num_tokens < past:
        raise ValueError(
            f"x must hold at least kernel - 1 = {past} tokens, got {num_tokens}; "
            "cut the row into fewer slices"
        )
    rank = _rank(group)
    recent = x[:, num_tokens - past :]
    if start is not None:
        token = torch.arange(num_tokens - past, num_tokens, device=x.device)
        recent = recent.masked_fill((token < start)[:, None], 0)
    # One tap has no past, so no rank has anything to exchange.
    windows = _AllGather.apply(recent.mT, group) if past else recent.mT[None][:0]
    # An empty sum on rank 0, because the exchange must be in its graph too.
    before = windows[max(rank - 1, 0) : rank].sum(0)
    return _first_of(before, cu_seqlens)


class SliceBorders(NamedTuple):
    """Position of this rank's slice in the row.

    Attributes:
        lengths: number of tokens of each rank's slice.
        offset: number of tokens in the row before this slice.
        begin: position in the row where the document that continues into this slice began; 0 if
            the row is not packed.
    """

    lengths: list[int]
    offset: int
    begin: int


def slice_borders(
    x: Tensor, *, group: ProcessGroup, cu_seqlens: Tensor | None = None
) -> SliceBorders:
    """The borders of the slice x (B, T, ...). Syncs with the GPU, so call it once for all layers.

    Args:
        group, cu_seqlens: as in `sharded_scan`. Call it on every rank of the group.
    """
    start = _last_start(cu_seqlens, x)
    start = torch.tensor(-1) if start is None else start
    mine = torch.stack([torch.tensor(x.shape[1], device=x.device), start.to(x.device)]).long()
    rank, begin, offset = _rank(group), 0, 0
    lengths, starts = _AllGather.apply(mine, group).t().tolist()
    for length, start in zip(lengths[:rank], starts[:rank], strict=True):
        begin, offset = (begin if start < 0 else offset + start), offset + length
    return SliceBorders(lengths, offset, begin)


def with_tokens_before(x: Tensor, lengths: Sequence[int], *, group: ProcessGroup) -> Tensor:
    """x (B, H, T, D) of the previous ranks followed by this rank's: (B, H, P + T, D).

    Every rank receives all slices and drops the later ones; a ring would hold fewer at a time.
    Call it, and backward(), on every rank of the group.

    Args:
        lengths: T of every rank.
    """
    rank, longest = _rank(group), max(lengths)
    slices = _AllGather.apply(F.pad(x, (0, 0, 0, longest - x.shape[2])), group)
    before = [part[:, :, :length] for part, length in zip(slices[:rank], lengths, strict=False)]
    # Rank 0 takes zero tokens of the first slice, because its graph must hold the exchange too.
    return torch.cat([slices[0, :, :, :0], *before, x], 2)


def _rank(group: ProcessGroup) -> int:
    """Rank of this process in the group, which is the position of its slice in the row."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "group must hold this process; pass the one of the groups that it is a member of"
        )
    return rank


def _last_start(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """First token of the slice's last sequence; None if one sequence fills the whole slice."""
    if cu_seqlens is None or check_cu_seqlens(cu_seqlens, x) == 1:
        return None
    return cu_seqlens[-2]


def _first_of(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x (1, ...) for the first of the N packed sequences and zeros for the rest; or x itself."""
    if cu_seqlens is None:
        return x
    return torch.cat([x, x.new_zeros(cu_seqlens.shape[0] - 2, *x.shape[1:])])


class _AllGather(torch.autograd.Function):
    """x (...) of every rank as (n, ...); its gradient is the sum of the gradients of all ranks.

    Uses lists of tensors, because collectives on one tensor are renamed between releases.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, group = args
        ctx.group = group
        gathered = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous(), group=group)
        return gathered

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        parts = grad_outputs[0].contiguous().unbind()
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, list(parts), group=ctx.group)
        return total, None


def _from(start: Tensor | None, x: Tensor) -> Tensor:
    """x (B, T, H, ...) with tokens before `start` set to zero, even if NaN."""
    if start is None:
        return x
    token = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((token < start)[:, None, None], 0)


def _decay_to_end(log_decay: Tensor, start: Tensor | None) -> Tensor:
    """exp(sum of log_decay after each token) (B, T, H, M), and 0 for tokens before `start`."""
    from_here = log_decay.flip(1).cumsum(1).flip(1)
    # Shifted, not subtracted: a difference would lose digits of a slow mode.
    decay = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1).exp_()
    return _from(start, decay)


class _SliceSummary(torch.autograd.Function):
    """F (B, H, M, D) and P (B, H, M) of u, write, log_decay and the last sequence's first token.

    If more than one sequence lies in the slice, P is exactly 0 and F is that of the last one.
    The gradient is explicit, because autograd would keep wide copies of all inputs. Autocast is
    disabled inside, because it would round the products to 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        u, write, log_decay, start = args
        wide = torch.promote_types(u.dtype, torch.float32)
        ctx.save_for_backward(u, write, log_decay, start)
        u, write, log_decay = (_from(start, x.to(wide)) for x in (u, write, log_decay))
        with torch.autocast(u.device.type, enabled=False):
            weight = write * _decay_to_end(log_decay, start)
            added = torch.einsum("bthm,bthd->bhmd", weight, u)
            total = log_decay.sum(1)
        return added, total.exp() if start is None else torch.zeros_like(total)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("sharded_scan", "scan whole rows")
        *inputs, start = ctx.saved_tensors
        dadded, dkept = grad_outputs
        u, write, log_decay = (_from(start, x.to(dadded.dtype)) for x in inputs)
        with torch.autocast(u.device.type, enabled=False):
            decay = _decay_to_end(log_decay, start)
            weight = write * decay
            du = torch.einsum("bthm,bhmd->bthd", weight, dadded)
            dweight = torch.einsum("bthd,bhmd->bthm", u, dadded)
            # log_decay[s] scales all writes at t < s, and the incoming state.
            passing = (dweight * weight).cumsum(1)
            dlog_decay = torch.cat([torch.zeros_like(passing[:, :1]), passing[:, :-1]], 1)
            if start is None:
                dlog_decay += (dkept * log_decay.sum(1).exp())[:, None]
            gradients = (du, dweight.mul_(decay), dlog_decay)
        return *(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)), None
