"""Inputs and errors for tests, benchmarks and `frac doctor`, which check or time the scans."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.control.reference import Dynamics, mode_log_decay


class ScanInputs(NamedTuple):
    """Arguments of `frac_scan`: u (B, T, H, D); read, write, log_decay (B, T, H, M)."""

    u: Tensor
    read: Tensor
    write: Tensor
    log_decay: Tensor

    def to(self, dtype: torch.dtype) -> ScanInputs:
        """All in `dtype`, but log_decay never below float32."""
        wide = torch.promote_types(dtype, torch.float32)
        u, read, write = (x.to(dtype) for x in self[:3])
        return ScanInputs(u, read, write, self.log_decay.to(wide))


def random_inputs(
    batch: int,
    time: int,
    heads: int,
    modes: int,
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rho_eps: float = 0.0,
) -> ScanInputs:
    """Random inputs whose controls span their full range: some modes decay in a token, some never.

    delta is log-uniform in [1e-4, 1], alpha uniform in [0.1, 0.9], lam log-uniform in [1/4, 4], so
    that lam^(1/alpha) spans 1e-6 to 1e6; timescales are geometric from 1 to 2^17. Drawn in float64
    on the CPU and then rounded, so that every dtype and device sees the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    size = (batch, time, heads)
    delta = torch.exp(math.log(1e-4) * uniform(*size))
    alpha = 0.1 + 0.8 * uniform(*size)
    lam = torch.exp(math.log(4) * (2 * uniform(*size) - 1))
    log_tau = torch.linspace(0, 17 * math.log(2), modes, dtype=torch.float64)
    log_decay = mode_log_decay(Dynamics(delta, alpha, lam), log_tau, rho_eps=rho_eps)
    read, write = ((3 * uniform(*size, modes)).softmax(-1) for _ in range(2))
    u = torch.randn(*size, channels, generator=generator, dtype=torch.float64)
    inputs = ScanInputs(u, read, -torch.expm1(log_decay) * write, log_decay)
    return ScanInputs(*(x.to(device) for x in inputs.to(dtype)))


class DeltaInputs(NamedTuple):
    """Arguments of `delta_scan`: q, k (B, T, H, K); v (B, T, H, D); beta, log_decay (B, T, H)."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor

    def to(self, dtype: torch.dtype) -> DeltaInputs:
        """All in `dtype`, but log_decay never below float32."""
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v, beta = (x.to(dtype) for x in self[:4])
        return DeltaInputs(q, k, v, beta, self.log_decay.to(wide))


def random_delta_inputs(
    batch: int,
    time: int,
    heads: int,
    keys: int,
    channels: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DeltaInputs:
    """Random inputs of the delta rule, drawn like those of `random_inputs`.

    Queries and keys have unit length, beta is uniform in [0, 1], and -log_decay is log-uniform in
    [1e-4, 1]: some tokens forget most of the state, some nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    size, wide = (batch, time, heads), torch.float64
    q, k = (
        F.normalize(torch.randn(*size, keys, generator=generator, dtype=wide), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(*size, channels, generator=generator, dtype=wide)
    beta, share = (torch.rand(*size, generator=generator, dtype=wide) for _ in range(2))
    inputs = DeltaInputs(q, k, v, beta, -torch.exp(math.log(1e-4) * share))
    return DeltaInputs(*(x.to(device) for x in inputs.to(dtype)))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in the Euclidean norm, in float64; 0 for empty tensors."""
    difference = (value.double() - reference.double()).norm()
    return 0.0 if difference == 0 else (difference / reference.double().norm()).item()
