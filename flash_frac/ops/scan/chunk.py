"""Backend "torch" of the scan: parallel inside chunks, parallel across chunks.

Rows are cut into chunks; `passes.py` computes on the chunks. The backward pass is explicit, because
autograd would keep the factors of every level. For double gradients, torch.func and torch.export,
autograd or the tracer differentiates the same operations. For torch.compile the scan is one
operator.

Letters: B batch, T time, N chunks, H heads, C tokens of a chunk, D head channels, M modes,
S sequences of a row (1, or all packed sequences).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash_frac.ops.scan.levels import CHUNK
from flash_frac.ops.scan.passes import (
    Layout,
    blocks,
    isolated_backward,
    isolated_forward,
    trim,
)
from flash_frac.ops.scan.reference import zero_state


class Passes(NamedTuple):
    """The two passes over chunks, such as `isolated_forward` and `isolated_backward`."""

    forward: Callable[..., tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, ...]]


SCAN = Passes(isolated_forward, isolated_backward)


class ChunkScan(torch.autograd.Function):
    """Differentiable passes over chunked inputs; the initial states come last."""

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, layout: Layout | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        (y, final), kept = passes.forward(inputs, layout)
        ctx.passes, ctx.layout, ctx.num_inputs = passes, layout, len(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return y, final

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dy: Tensor, dfinal: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing recomputes saved tensors, and frees them once read.
        saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        if torch.is_grad_enabled():
            gradients = _differentiable(ctx.passes, inputs, ctx.layout, dy, dfinal)
        else:
            gradients = ctx.passes.backward(dy, dfinal, inputs, kept, ctx.layout)
        return None, None, *gradients


def run_chunks(
    passes: Passes, inputs: Sequence[Tensor], layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """y and the state after each sequence, from chunked inputs and initial states."""
    if _is_transformed():
        return passes.forward(inputs, layout)[0]
    return ChunkScan.apply(passes, layout, *inputs)  # pyright: ignore[reportReturnType]


def _differentiable(
    passes: Passes, inputs: Sequence[Tensor], layout: Layout | None, dy: Tensor, dfinal: Tensor
) -> list[Tensor | None]:
    """Differentiable gradients, for `create_graph=True`."""
    # Views, because one input may depend on another.
    inputs = tuple(x.view_as(x) for x in inputs)
    needed = [x for x in inputs if x.requires_grad]
    outputs, _ = passes.forward(inputs, layout)
    with torch.autocast(dy.device.type, enabled=False):
        found = iter(torch.autograd.grad(outputs, needed, (dy, dfinal), create_graph=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _chunk_slots(
    cu_seqlens: Tensor, num_tokens: int, num_chunks: int
) -> tuple[Layout, Tensor, Tensor]:
    """Lay packed sequences out so that each begins at a chunk.

    Returns the layout, the token of each slot (N*C,), -1 for none, and the slot of each token (T,).
    Shapes depend only on T and the number of sequences: nothing is read back from the device.
    """
    device = cu_seqlens.device
    start, length = cu_seqlens[:-1], cu_seqlens.diff()
    chunks = ((length + CHUNK - 1) // CHUNK).clamp_min(1)
    after = chunks.cumsum(0)
    first = after - chunks
    # Chunks left over at the end carry no token and belong to the last sequence.
    last = torch.cat([after[:-1] - 1, after.new_full((1,), num_chunks - 1)])

    chunk = torch.arange(num_chunks, device=device)
    sequence = torch.searchsorted(first, chunk, right=True) - 1
    offset = ((chunk - first[sequence]) * CHUNK)[:, None] + torch.arange(CHUNK, device=device)
    token = start[sequence, None] + offset
    token = token.where(offset < length[sequence, None], -1).flatten()

    index = torch.arange(num_tokens, device=device)
    of_token = torch.searchsorted(cu_seqlens, index, right=True) - 1
    slot = first[of_token] * CHUNK + index - start[of_token]
    return Layout(first, last, sequence), token, slot


class Slots(NamedTuple):
    """Layout of the T tokens of a row in N chunks.

    layout: None without packing; then tokens are consecutive, and token and slot are None too.
    token: (N*C,) the token of each slot, -1 for none; slot: (T,) the slot of each token.
    """

    num_tokens: int
    layout: Layout | None
    token: Tensor | None
    slot: Tensor | None

    def cut(self, x: Tensor) -> Tensor:
        """(B, T, H, X) -> (B, N, C, H, X). An empty slot is an identity step: zeros."""
        if self.token is None:
            return blocks(x, 1, CHUNK)
        x = x[:, self.token].masked_fill((self.token < 0)[:, None, None], 0)
        return x.unflatten(1, (-1, CHUNK))

    def join(self, x: Tensor) -> Tensor:
        """The inverse."""
        x = x.flatten(1, 2)
        return trim(x, self.num_tokens) if self.slot is None else x[:, self.slot]

    def to_chunks(self, x: Tensor) -> Tensor:
        """(B, T, H, X) -> (B, N, H, C, X), contiguous."""
        return self.cut(x).transpose(2, 3).contiguous()

    def to_tokens(self, x: Tensor) -> Tensor:
        """The inverse."""
        return self.join(x.transpose(2, 3))


def slots_of(num_tokens: int, cu_seqlens: Tensor | None) -> Slots:
    """Layout of the tokens of a row."""
    if cu_seqlens is None:
        return Slots(num_tokens, None, None, None)
    num_chunks = num_tokens // CHUNK + len(cu_seqlens) - 1
    return Slots(num_tokens, *_chunk_slots(cu_seqlens.long(), num_tokens, num_chunks))


def _is_transformed() -> bool:
    """Whether a transform is active that our autograd.Function would block."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.compiler.is_exporting()
    )


def chunk_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Backend "torch" of `frac_scan`, with the same arguments."""
    if initial_state is None:
        initial_state = zero_state(u, read, cu_seqlens)
    if u.numel() == 0:
        return torch.zeros_like(u), initial_state
    inputs = [x.to(initial_state.dtype) for x in (u, read, write, log_decay)]
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        y, final = compiled_scan(*inputs, initial_state, cu_seqlens)
        return y.to(u.dtype), final
    slots, chunks, initial = _chunked(tuple(inputs), initial_state, cu_seqlens)
    y, final = run_chunks(SCAN, (*chunks, initial), slots.layout)
    return slots.to_tokens(y).to(u.dtype), final.flatten(0, 1)


@torch.library.custom_op("flash_frac::chunk_scan", mutates_args=())
def compiled_scan(
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The scan as one operator, for torch.compile.

    Compiling a training step of three small layers takes inductor 12 s this way, and 70 s if it
    traces into the scan. The forward pass saves nothing but its inputs; the backward pass
    recomputes it.
    """
    slots, chunks, start = _chunked((u, read, write, log_decay), initial, cu_seqlens)
    (y, final), _ = isolated_forward((*chunks, start), slots.layout)
    return slots.to_tokens(y).contiguous(), final.flatten(0, 1)


def _chunked(
    inputs: tuple[Tensor, ...], initial: Tensor, cu_seqlens: Tensor | None
) -> tuple[Slots, list[Tensor], Tensor]:
    """Layout of the tokens, the inputs in that layout, and the initial states (B, S, H, M, D)."""
    slots = slots_of(inputs[0].shape[1], cu_seqlens)
    start = initial[:, None] if cu_seqlens is None else initial[None]
    return slots, [slots.to_chunks(x) for x in inputs], start


@torch.library.custom_op("flash_frac::chunk_scan_backward", mutates_args=())
def compiled_backward(
    dy: Tensor,
    dfinal: Tensor,
    u: Tensor,
    read: Tensor,
    write: Tensor,
    log_decay: Tensor,
    initial: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, read, write, log_decay and initial."""
    slots, chunks, start = _chunked((u, read, write, log_decay), initial, cu_seqlens)
    inputs = (*chunks, start)
    _, kept = isolated_forward(inputs, slots.layout)
    *gradients, dinitial = isolated_backward(
        slots.to_chunks(dy), dfinal.view_as(start), inputs, kept, slots.layout
    )
    du, dread, dwrite, ddecay = (slots.to_tokens(x).contiguous() for x in gradients)
    return du, dread, dwrite, ddecay, dinitial.flatten(0, 1)


def register_recomputed(forward: Any, backward: Any, *, like: int) -> None:
    """Register shapes and gradient of an operator for torch.compile, which saves only its inputs.

    Args:
        forward: forward(*tensors, initial, cu_seqlens) returns y and the final states.
        backward: backward(dy, dfinal, *inputs of forward) returns gradients of all but the last.
        like: index of the input that has the shape and dtype of y.
    """

    def empty_like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def keep(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs)

    def gradients(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple:
        return *backward(dy, dfinal, *ctx.saved_tensors), None

    forward.register_fake(lambda *inputs: (empty_like(inputs[like]), torch.empty_like(inputs[-2])))
    backward.register_fake(lambda dy, dfinal, *inputs: tuple(map(empty_like, inputs[:-1])))
    forward.register_autograd(gradients, setup_context=keep)


register_recomputed(compiled_scan, compiled_backward, like=0)
