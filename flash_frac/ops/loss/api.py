"""LM head and cross-entropy without the logits of all tokens in memory.

Chunk by chunk of tokens, logits = hidden weight^T become the loss and its gradient,

    loss = logsumexp(logits) - logits[label],      dlogits = softmax(logits) - onehot(label),

and dlogits immediately become the gradients of hidden and weight; the backward pass only scales
them. The matrix products are torch's. Between them, backend "triton" runs one kernel that writes
dlogits over the logits. Besides the gradients it holds one chunk of logits: 262 MB for 4096 tokens
and V = 32000 in bfloat16. Plain torch also holds the chunk in float32. The gradient of the weight
is summed over chunks in float32: 4 V E bytes, and as many again for one chunk's share.
Letters: N tokens, E width, V vocabulary.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.backends import choose

# Default number of tokens whose logits are in memory at a time.
CHUNK_TOKENS = 4096


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: Tensor | None = None,
    chunk_tokens: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """F.cross_entropy(hidden @ weight.T, labels), with the loss and its sums in float32.

    Args:
        hidden: (..., E). Products use its dtype, or the autocast dtype inside autocast.
        weight: (V, E), in the dtype of hidden, except inside autocast.
        labels: (...) token ids, or ignore_index for no prediction. They are not shifted here.
        reduction: "mean" over the labels that are not ignored (NaN if all are), or "sum".
        num_items: divides the sum instead of the number of labels that are not ignored, for a
            batch that is spread over several calls or devices.
        chunk_tokens: number of tokens whose logits are in memory at a time; None for 4096.
        backend: as in `frac_scan`.

    Returns:
        The loss, float32 (float64 for float64 inputs).

    Example:
        >>> loss = linear_cross_entropy(hidden, lm_head.weight, labels)
        >>> loss.backward()
    """
    _check(hidden, weight, labels, reduction, num_items, chunk_tokens)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    elif weight.dtype != dtype:
        raise ValueError(f"weight must have the dtype of hidden, {dtype}, got {weight.dtype}")
    # The kernel reads the product's result, and an empty batch has none.
    example = hidden.new_empty(min(1, hidden.numel()), dtype=dtype)
    summed = choose("loss", backend, example)
    total = summed(
        hidden.flatten(0, -2), weight, labels.flatten(), ignore_index, chunk_tokens, dtype
    )
    if reduction == "sum":
        return total
    if num_items is not None:
        return total / num_items
    count = (labels != ignore_index).sum()
    # As in F.cross_entropy, a batch without labels gives NaN, and gradients of 0.
    return torch.where(count > 0, total / count.clamp_min(1), torch.nan)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    chunk_tokens: int | None,
    dtype: torch.dtype,
    *,
    fused: bool,
) -> Tensor:
    """The sum of the losses of hidden (N, E); products in `dtype`."""
    graph = torch.is_grad_enabled()
    return _summed_loss(
        hidden,
        weight,
        labels,
        ignore_index,
        chunk_tokens or CHUNK_TOKENS,
        dtype,
        graph and hidden.requires_grad,
        graph and weight.requires_grad,
        fused,
    )[0]


def torch_loss(*arguments: Any) -> Tensor:
    """The sum of the losses: hidden (N, E), weight, labels (N,) and options of `_loss`."""
    return _loss(*arguments, fused=False)


def triton_loss(*arguments: Any) -> Tensor:
    """Like `torch_loss`, with a kernel between the products."""
    return _loss(*arguments, fused=True)


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    reduction: str,
    num_items: Tensor | None,
    chunk_tokens: int | None,
) -> None:
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must have shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must have shape (V, {hidden.shape[-1]}), got {tuple(weight.shape)}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if num_items is not None and reduction == "sum":
        raise ValueError("num_items divides the sum, so it needs reduction='mean'")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")


@torch.library.custom_op("flash_frac::summed_cross_entropy", mutates_args=())
def _summed_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    dtype: torch.dtype,
    need_hidden: bool,
    need_weight: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and its gradients for hidden (N, E) and weight (V, E), or empty."""
    wide = torch.promote_types(dtype, torch.float32)
    matrix = weight.to(dtype)
    chunk_loss = _fused_chunk_loss if fused else _chunk_loss
    total = hidden.new_zeros((), dtype=wide)
    dhidden = hidden.new_empty(hidden.shape if need_hidden else 0, dtype=dtype)
    dweight = weight.new_zeros(weight.shape if need_weight else 0, dtype=wide)
    for start in range(0, hidden.shape[0], chunk_tokens):
        tokens = slice(start, start + chunk_tokens)
        total += chunk_loss(
            hidden[tokens].to(dtype),
            matrix,
            labels[tokens],
            ignore_index,
            dhidden[tokens] if need_hidden else None,
            dweight if need_weight else None,
        )
    return total, dhidden, dweight


def _chunk_loss(
    x: Tensor,
    matrix: Tensor,
    labels: Tensor,
    ignore_index: int,
    dx: Tensor | None,
    dweight: Tensor | None,
) -> Tensor:
    """The sum of a chunk's losses; writes its gradient to dx and adds the other to dweight.

    A separate function, so that the logits of a chunk are freed before the next ones are allocated.
    """
    label = labels[:, None]
    ignored = label == ignore_index
    label = label.masked_fill(ignored, 0)
    logits = x @ matrix.T
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(x.dtype, torch.float32))
    log_p_label = log_p.gather(1, label)
    if dx is not None or dweight is not None:
        # dlogits reuses the memory of the logits; at the label, p - 1 without cancellation.
        dlogits = torch.exp(log_p, out=logits)
        dlogits.scatter_(1, label, torch.expm1(log_p_label).to(x.dtype))
        # Ignored tokens are zeroed in tensors of width E, which is less work than width V.
        if dx is not None:
            torch.mm(dlogits, matrix, out=dx).masked_fill_(ignored, 0)
        if dweight is not None:
            _add_product(dweight, dlogits, x.masked_fill(ignored, 0))
    return -log_p_label.masked_fill(ignored, 0).sum()


def _fused_chunk_loss(
    x: Tensor,
    matrix: Tensor,
    labels: Tensor,
    ignore_index: int,
    dx: Tensor | None,
    dweight: Tensor | None,
) -> Tensor:
    """`_chunk_loss` with one kernel between the products."""
    from flash_frac.ops.loss.kernels import cross_entropy_

    logits = x @ matrix.T
    losses = cross_entropy_(logits, labels, ignore_index, dx is not None or dweight is not None)
    if dx is not None:
        torch.mm(logits, matrix, out=dx)
    if dweight is not None:
        # An ignored token that is not finite would survive a gradient of 0: 0 times inf is NaN.
        _add_product(dweight, logits, x.masked_fill((labels == ignore_index)[:, None], 0))
    return losses.sum()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right, in the dtype of total, which may be wider than the factors'."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    elif left.is_cuda:
        # Not addmm: only newer versions of torch let it accumulate into a wider dtype.
        total += torch.mm(left.T, right, out_dtype=total.dtype)
    else:
        # Only CUDA can write a product in a wider dtype.
        total.addmm_(left.T.to(total.dtype), right.to(total.dtype))


@_summed_loss.register_fake
def _(hidden, weight, labels, ignore_index, chunk_tokens, dtype, need_hidden, need_weight, fused):
    wide = torch.promote_types(dtype, torch.float32)
    dhidden = hidden.new_empty(hidden.shape if need_hidden else 0, dtype=dtype)
    dweight = weight.new_empty(weight.shape if need_weight else 0, dtype=wide)
    return hidden.new_empty((), dtype=wide), dhidden, dweight


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    hidden, weight, *_, need_hidden, need_weight, _ = inputs
    ctx.dtypes = hidden.dtype if need_hidden else None, weight.dtype if need_weight else None
    ctx.ignore_index, ctx.dtype = inputs[3], inputs[5]
    ctx.save_for_backward(*output[1:], *inputs[:3])


def _differentiable(ctx, dtotal):
    """Differentiable gradients, for `create_graph=True`; needs the logits of all tokens."""
    *_, hidden, weight, labels = ctx.saved_tensors
    # Views, because hidden may depend on the weight if embeddings are tied.
    hidden, weight = hidden.view_as(hidden), weight.view_as(weight)
    logits = hidden.to(ctx.dtype) @ weight.to(ctx.dtype).T
    wide = logits.to(torch.promote_types(ctx.dtype, torch.float32))
    total = F.cross_entropy(wide, labels, ignore_index=ctx.ignore_index, reduction="sum")
    needed = [x for x, dtype in zip((hidden, weight), ctx.dtypes, strict=True) if dtype is not None]
    found = iter(torch.autograd.grad(total, needed, dtotal, create_graph=True))
    return (None if dtype is None else next(found) for dtype in ctx.dtypes)


def _gradients(ctx, dtotal, *unused):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and dtotal is not None:
        return *_differentiable(ctx, dtotal), *(None for _ in range(7))

    def scaled(gradient, dtype):
        if dtype is None or dtotal is None:
            return None
        # A scale with an axis is not cast to the gradient's dtype, so only the result is rounded.
        return torch.mul(gradient, dtotal[None], out=torch.empty_like(gradient, dtype=dtype))

    gradients = map(scaled, ctx.saved_tensors[:2], ctx.dtypes)
    return *gradients, *(None for _ in range(7))


_summed_loss.register_autograd(_gradients, setup_context=_save)
