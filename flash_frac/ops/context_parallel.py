"""Context parallelism: one row of tokens cut into n slices, slice r held by rank r of a group.

A slice changes the state S that comes into it to P S + F, with

    P[m] = exp(sum_t log_decay[t, m])                              what it keeps of an old state
    F[m] = sum_t write[t, m] exp(sum_{s > t} log_decay[s, m]) u[t]     what it adds of its own

P and F of all slices are gathered, rank r follows S <- P_j S + F_j over j < r, and from there on
the scan of its slice is the ordinary one. The gradient of a gather is the sum over ranks of the
gradients of what each made of it, so that a loss reaches back through all slices before its own.

A layer moves, from each rank to each other, 4 B H M (D + 1) bytes for the scan and
bytes(dtype) B I (K - 1) for the convolution; the backward pass moves the same once more.
None of it depends on the length of the row. A delta layer moves 4 B H K (D + K) bytes for its scan,
with K key channels of a head. An attention layer moves the keys and values of all tokens.

Every rank must make the same calls in the same order, forward and backward: a rank whose tokens
have no loss multiplies by 0 and still calls backward(). Only the ranks' shares of a parameter's
gradient are computed; their sum is the gradient.

Packed documents: cu_seqlens (N + 1,) bounds the sequences of the local slice. The first of them
continues the last one of the slice before, and is empty (0 comes twice) where a document begins
with the slice. On rank 0 it begins afresh.

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
    # Builds of torch without distributed have the module, but nothing in it.
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
    """`frac_scan` of a row of which this rank holds one slice, in the order of ranks.

    Slices may differ in length, and in the number of sequences packed in them; all else is the
    same on every rank. To be called on every rank of the group, and so is backward().

    Args:
        u: (B, T, H, D) this rank's slice; read, write, log_decay: (B, T, H, M), as in `frac_scan`.
        group: the ranks that share the row.
        cu_seqlens: (N + 1,) bounds of the sequences packed in this slice (B = 1); the first one
            continues the last one of the slice before, and may be empty.
        backend: as in `frac_scan`.

    Returns:
        ScanOutput(y, state): y (B, T, H, D) of this slice; state (N, H, M, D) after the last token
        of each local sequence, so that the last rank has the states after the whole row.

    Example:
        >>> group = torch.distributed.group.WORLD
        >>> mine = [x.chunk(group.size(), 1)[group.rank()] for x in (u, read, write, log_decay)]
        >>> y, state = sharded_scan(*mine, group=group)
    """
    check_scan_inputs(u, read, write, log_decay, ("B", "T", "H", "D"))
    if u.shape[1] == 0:
        # The outputs of other ranks would wait for a gradient that no output here can carry.
        raise ValueError("u must hold at least one token; cut the row into fewer slices")
    start = _last_start(cu_seqlens, u)
    rank = _rank(group)
    added, kept = summarize(u, write, log_decay, start)
    # (n, B, H, M, D + 1): one exchange serves both.
    slices = _AllGather.apply(torch.cat([added, kept[..., None]], -1), group)
    # An empty sum and not zeros, because the exchange must be in the graph of rank 0 too.
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
    """`delta_scan` of a row of which this rank holds one slice, in the order of ranks.

    P of a slice is a matrix (K, K) a head: what becomes of an identity as state if all values are
    zero. It and F cost a scan each, of K and D channels, before the scan of the slice.

    Args:
        q, k: (B, T, H, K) this rank's slice; v: (B, T, H, D); beta, log_decay: (B, T, H).
        The rest as in `sharded_scan`, and so is what is returned.

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
    # If the last sequence begins in this slice, nothing of an old state is kept.
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
        start: where the last sequence of a packed row begins; P is then 0, and F is its own.
    """
    return _SliceSummary.apply(u, write, log_decay, start)


def window_before(
    x: Tensor, kernel: int, *, group: ProcessGroup, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The inputs x[-K + 1], ..., x[-1] of a causal convolution, which the rank before holds.

    A document that began within the last K - 1 tokens of that slice has zeros before it, as at
    the start of any sequence. To be called on every rank of the group, and so is backward().

    Args:
        x: (B, T, I) this rank's slice of the convolution's inputs, T >= K - 1.
        kernel: K, taps of the convolution.
        group, cu_seqlens: as in `sharded_scan`.

    Returns:
        (N, I, K - 1), the `window` of `causal_conv`: zeros on rank 0 and for all but the first of
        packed sequences.

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
    # Without a past there is nothing to exchange, on any rank.
    windows = _AllGather.apply(recent.mT, group) if past else recent.mT[None][:0]
    # An empty sum on rank 0, whose graph must hold the exchange too.
    before = windows[max(rank - 1, 0) : rank].sum(0)
    return _first_of(before, cu_seqlens)


class SliceBorders(NamedTuple):
    """Where this rank's slice lies in the row.

    Attributes:
        lengths: tokens of each rank's slice.
        offset: tokens before this slice, in the row.
        begin: where in the row the document began that goes on into this slice; 0 if the row is
            not packed.
    """

    lengths: list[int]
    offset: int
    begin: int


def slice_borders(
    x: Tensor, *, group: ProcessGroup, cu_seqlens: Tensor | None = None
) -> SliceBorders:
    """The borders of the slice x (B, T, ...); waits for a GPU, once for all layers of a model.

    Args:
        group, cu_seqlens: as in `sharded_scan`. To be called on every rank of the group.
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
    """x (B, H, T, D) of this rank behind that of the ranks before: (B, H, P + T, D).

    Every rank gets all slices, and drops those behind its own: a ring would hold fewer at a time.
    To be called on every rank of the group, and so is backward().

    Args:
        lengths: T of every rank.
    """
    rank, longest = _rank(group), max(lengths)
    slices = _AllGather.apply(F.pad(x, (0, 0, 0, longest - x.shape[2])), group)
    before = [part[:, :, :length] for part, length in zip(slices[:rank], lengths, strict=False)]
    # No token of the first slice on rank 0, whose graph must hold the exchange too.
    return torch.cat([slices[0, :, :, :0], *before, x], 2)


def _rank(group: ProcessGroup) -> int:
    """The place of this process in the group, which is that of its slice in the row."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "group must hold this process; pass the one of the groups that it is a member of"
        )
    return rank


def _last_start(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """Where in the slice its last sequence begins; None if one sequence fills the whole slice."""
    if cu_seqlens is None or check_cu_seqlens(cu_seqlens, x) == 1:
        return None
    return cu_seqlens[-2]


def _first_of(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x (1, ...) for the first of the N packed sequences and zeros for the rest; or x itself."""
    if cu_seqlens is None:
        return x
    return torch.cat([x, x.new_zeros(cu_seqlens.shape[0] - 2, *x.shape[1:])])


class _AllGather(torch.autograd.Function):
    """x (...) of every rank as (n, ...); its gradient is the sum of what all ranks send back.

    Lists of tensors, because the names of the collectives for one tensor change between releases.
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
    """x (B, T, H, ...) with zeros for tokens before `start`, whatever they were."""
    if start is None:
        return x
    token = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((token < start)[:, None, None], 0)


def _decay_to_end(log_decay: Tensor, start: Tensor | None) -> Tensor:
    """exp(sum of log_decay after each token) (B, T, H, M), and 0 for tokens before `start`."""
    from_here = log_decay.flip(1).cumsum(1).flip(1)
    # Shifted, not subtracted: the difference would lose the digits of a slow mode.
    decay = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1).exp_()
    return _from(start, decay)


class _SliceSummary(torch.autograd.Function):
    """F (B, H, M, D) and P (B, H, M) of u, write, log_decay and the last sequence's first token.

    If more than one sequence lies in the slice, P is exactly 0 and F is that of the last one.
    The gradient is written out: autograd would keep wide copies of all inputs. Mixed-precision
    regions are left at the door: they would round the products to 16 bits.
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
            # log_decay[s] scales what is written at all t < s, and the state that comes in.
            passing = (dweight * weight).cumsum(1)
            dlog_decay = torch.cat([torch.zeros_like(passing[:, :1]), passing[:, :-1]], 1)
            if start is None:
                dlog_decay += (dkept * log_decay.sum(1).exp())[:, None]
            gradients = (du, dweight.mul_(decay), dlog_decay)
        return *(g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)), None
