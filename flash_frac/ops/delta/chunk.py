"""Backend "torch" of the delta rule: parallel inside chunks, a loop over chunks.

Rows are cut into chunks as for the scan (`scan/chunk.py`); `passes.py` computes on the chunks. For
torch.compile it is one operator.

Letters: B batch, T time, N chunks, H heads, C tokens of a chunk, G = B H, K key channels, D value
channels, S sequences of a row (1, or all packed sequences).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_frac.ops.delta.passes import isolated_backward, isolated_forward
from flash_frac.ops.scan.chunk import Passes, Slots, register_recomputed, run_chunks, slots_of
from flash_frac.ops.scan.reference import zero_state

DELTA = Passes(isolated_forward, isolated_backward)


def chunk_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "torch" of `delta_scan`, with the same arguments."""
    if initial_state is None:
        initial_state = zero_state(v, k, cu_seqlens)
    if v.numel() == 0:
        return torch.zeros_like(v), initial_state
    tokens = [x.to(initial_state.dtype) for x in (q, k, v, beta[..., None], log_decay[..., None])]
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        y, final = compiled_delta(*tokens, initial_state, cu_seqlens)
        return y.to(v.dtype), final
    slots, inputs = _chunked(tokens, initial_state, cu_seqlens)
    y, final = run_chunks(DELTA, inputs, slots.layout)
    return _to_tokens(y, slots, v.shape[0]).to(v.dtype), final.reshape(initial_state.shape)


def _chunked(
    tokens: Sequence[Tensor], initial: Tensor, cu_seqlens: Tensor | None
) -> tuple[Slots, list[Tensor]]:
    """Layout of the tokens, the inputs in that layout, and the initial states (S, G, K, D)."""
    slots = slots_of(tokens[0].shape[1], cu_seqlens)
    start = initial.flatten(0, 1)[None] if cu_seqlens is None else initial
    return slots, [*(_to_chunks(x, slots) for x in tokens), start]


def _to_chunks(x: Tensor, slots: Slots) -> Tensor:
    """(B, T, H, X) -> (N, G, C, X), contiguous, chunk by chunk for the loop."""
    return slots.cut(x).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def _to_tokens(x: Tensor, slots: Slots, batch: int) -> Tensor:
    """The inverse."""
    return slots.join(x.unflatten(1, (batch, -1)).permute(1, 0, 3, 2, 4))


@torch.library.custom_op("flash_frac::chunk_delta", mutates_args=())
def compiled_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The delta rule as one operator for torch.compile, which cannot trace the loop.

    The forward pass saves nothing but its inputs; the backward pass recomputes it.
    """
    slots, inputs = _chunked((q, k, v, beta, log_decay), initial, cu_seqlens)
    (y, final), _ = isolated_forward(inputs, slots.layout)
    return _to_tokens(y, slots, v.shape[0]).contiguous(), final.reshape(initial.shape)


@torch.library.custom_op("flash_frac::chunk_delta_backward", mutates_args=())
def compiled_backward(
    dy: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_decay and initial."""
    slots, inputs = _chunked((q, k, v, beta, log_decay), initial, cu_seqlens)
    _, kept = isolated_forward(inputs, slots.layout)
    dstates = dfinal.reshape(inputs[-1].shape)
    *gradients, dinitial = isolated_backward(
        _to_chunks(dy, slots), dstates, inputs, kept, slots.layout
    )
    dq, dk, dv, dbeta, ddecay = (_to_tokens(x, slots, v.shape[0]).contiguous() for x in gradients)
    return dq, dk, dv, dbeta, ddecay, dinitial.reshape(initial.shape)


register_recomputed(compiled_delta, compiled_backward, like=2)
