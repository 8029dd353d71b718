"""The textbook forms that the torch backend is timed against on a CPU.

Both loop over chunks of 32 tokens in Python, use differences of cumulative sums of log_decay, and
leave gradients to autograd.
Letters: B batch, T time, H heads, M modes, K key channels, D channels, C chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_frac.ops.testing import DeltaInputs, ScanInputs


def plain_chunk_scan(inputs: ScanInputs, chunk: int = 32) -> tuple[Tensor, Tensor]:
    """The scan as in the paper's appendix, with all of gamma at once."""
    batch, num_tokens, heads, channels = inputs.u.shape
    state = inputs.u.new_zeros(batch, heads, inputs.read.shape[-1], channels)
    future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)[..., None]
    outputs = []
    for start in range(0, num_tokens, chunk):
        u, read, write, log_decay = (x[:, start : start + chunk].transpose(1, 2) for x in inputs)
        size = u.shape[2]
        total = log_decay.cumsum(2)
        between = total[:, :, :, None] - total[:, :, None]
        decay = between.masked_fill(future[:size, :size], -torch.inf).exp()
        gamma = torch.einsum("bhtm,bhkm,bhtkm->bhtk", read, write, decay)
        outputs.append((gamma @ u + (read * total.exp()) @ state).transpose(1, 2))
        last = total[:, :, -1:]
        state = last.transpose(2, 3).exp() * state
        state = state + (write * (last - total).exp()).transpose(2, 3) @ u
    return torch.cat(outputs, 1), state


def plain_chunk_delta(inputs: DeltaInputs, chunk: int = 32) -> tuple[Tensor, Tensor]:
    """The delta rule in WY form; torch.linalg solves the system of each chunk."""
    batch, num_tokens, heads, channels = inputs.v.shape
    state = inputs.v.new_zeros(batch, heads, inputs.k.shape[-1], channels)
    future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    outputs = []
    for start in range(0, num_tokens, chunk):
        q, k, v, beta, log_decay = (x[:, start : start + chunk].transpose(1, 2) for x in inputs)
        size, total = v.shape[2], log_decay.cumsum(2)[..., None]
        between = (total - total.mT).masked_fill(future[:size, :size], -torch.inf)
        decay, from_start = between.exp(), total.exp()
        right = beta[..., None] * (v - (from_start * k) @ state)
        below = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
        u = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
        y = (from_start * q) @ state + ((q @ k.mT) * decay) @ u
        outputs.append(y.transpose(1, 2))
        last = total[:, :, -1:]
        state = last.exp() * state + ((last - total).exp() * k).mT @ u
    return torch.cat(outputs, 1), state
