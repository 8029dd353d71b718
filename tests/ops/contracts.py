"""Every operator as a function of tokens, for the contract tests.

Letters: B batch, T time, H heads, D head channels, M modes, K taps, N sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from flash_frac.ops import (
    ControlSettings,
    causal_conv,
    controls_from_logits,
    delta_scan,
    delta_step,
    frac_scan,
    frac_step,
    gated_norm,
    norm,
    swiglu,
)
from flash_frac.ops.testing import random_delta_inputs, random_inputs

H, D, M, K = 2, 9, 8, 4
# Of the delta rule; with fewer, chunks of tokens cancel (tests/ops/test_delta.py).
KEYS = 16


class Inputs(NamedTuple):
    """tokens (B, T, ...), parameters, and the state (N, ...) of the sequences, or None."""

    tokens: list
    parameters: list
    state: torch.Tensor | None

    def part(self, rows, times):
        """Some tokens of some rows, which have as many states."""
        state = None if self.state is None else self.state[rows]
        return Inputs([x[rows][:, times] for x in self.tokens], self.parameters, state)


class Contract(NamedTuple):
    """An operator as a function of tokens.

    draw(batch, time, num_states) gives `Inputs` in float64. run(inputs, backend, cu_seqlens, mask)
    gives a list of outputs (B, T, ...) and the new state, or None; so does `specification`. `packs`
    says whether there are boundaries, and `begins` whether the state may be None.
    """

    draw: Callable
    run: Callable
    specification: Callable
    packs: bool = True
    begins: bool = False


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def draw_scan(batch, time, num):
    seed = int(torch.randint(2**31, ()))
    sizes = (batch, time, H, M, D)
    tokens = random_inputs(*sizes, dtype=torch.float64, seed=seed)
    return Inputs(list(tokens), [], normal(num, H, M, D))


def masked(tokens, mask):
    """What the controls make of padding: nothing is written, and nothing decays."""
    if mask is None:
        return tokens
    return [*tokens[:2], *(x.masked_fill((mask == 0)[..., None, None], 0) for x in tokens[2:])]


def run_scan(inputs, backend, cu_seqlens=None, mask=None):
    options = {"initial_state": inputs.state, "cu_seqlens": cu_seqlens, "backend": backend}
    y, state = frac_scan(*masked(inputs.tokens, mask), **options)
    return [y], state


def run_steps(inputs, backend, mask=None):
    tokens, state, outputs = masked(inputs.tokens, mask), inputs.state, [inputs.tokens[0][:, :0]]
    for t in range(tokens[0].shape[1]):
        y, state = frac_step(*(x[:, t] for x in tokens), state, backend=backend)
        outputs.append(y[:, None])
    return [torch.cat(outputs, 1)], state


def draw_delta(batch, time, num):
    seed = int(torch.randint(2**31, ()))
    tokens = random_delta_inputs(batch, time, H, KEYS, D, dtype=torch.float64, seed=seed)
    return Inputs(list(tokens), [], normal(num, H, KEYS, D))


def delta_masked(tokens, mask):
    """Padding of the delta rule: nothing is written, and nothing decays."""
    if mask is None:
        return tokens
    return [*tokens[:3], *(x.masked_fill((mask == 0)[..., None], 0) for x in tokens[3:])]


def run_delta(inputs, backend, cu_seqlens=None, mask=None):
    options = {"initial_state": inputs.state, "cu_seqlens": cu_seqlens, "backend": backend}
    y, state = delta_scan(*delta_masked(inputs.tokens, mask), **options)
    return [y], state


def run_delta_steps(inputs, backend, mask=None):
    tokens, state = delta_masked(inputs.tokens, mask), inputs.state
    outputs = [inputs.tokens[2][:, :0]]
    for t in range(tokens[0].shape[1]):
        y, state = delta_step(*(x[:, t] for x in tokens), state, backend=backend)
        outputs.append(y[:, None])
    return [torch.cat(outputs, 1)], state


def draw_controls(batch, time, num, *, own_tau=False):
    logits = [3 * normal(batch, time, 3 * H), normal(batch, time, 2 * H * M)]
    log_tau = torch.linspace(0, 11, M, dtype=torch.float64)
    if own_tau:
        log_tau = log_tau + normal(H, 1)
    return Inputs(logits, [normal(H), normal(1), normal(1), log_tau], None)


def run_controls(inputs, backend, cu_seqlens=None, mask=None, settings=None):
    settings = settings or ControlSettings()
    options = {"settings": settings, "mask": mask, "backend": backend}
    return list(controls_from_logits(*inputs.tokens, *inputs.parameters, **options)), None


def draw_conv(batch, time, num):
    parameters = [normal(H * D, 1, K), normal(H * D)]
    return Inputs([normal(batch, time, H * D)], parameters, normal(num, H * D, K - 1))


def run_conv(inputs, backend, cu_seqlens=None, mask=None):
    options = {"window": inputs.state, "cu_seqlens": cu_seqlens, "mask": mask, "backend": backend}
    u, window = causal_conv(*inputs.tokens, *inputs.parameters, **options)
    return [u], window


def draw_norm(batch, time, num):
    return Inputs([normal(batch, time, H * D)], [normal(H * D)], None)


def run_norm(inputs, backend, cu_seqlens=None, mask=None):
    return [norm(*inputs.tokens, *inputs.parameters, 1e-6, backend=backend)], None


def draw_gated_norm(batch, time, num):
    x, u = (normal(batch, time, H, D) for _ in range(2))
    return Inputs([x, normal(batch, time, H * D), u], [normal(H * D), normal(H, D)], None)


def run_gated_norm(inputs, backend, cu_seqlens=None, mask=None):
    (x, gate, u), (weight, skip) = inputs.tokens, inputs.parameters
    return [gated_norm(x, gate, weight, 1e-6, 0.5, skip=(skip, u), backend=backend)], None


def draw_swiglu(batch, time, num):
    return Inputs([2 * normal(batch, time, H * D), normal(batch, time, H * D)], [], None)


def run_swiglu(inputs, backend, cu_seqlens=None, mask=None):
    return [swiglu(*inputs.tokens, backend=backend)], None


def controls_contract(settings, *, own_tau=False):
    run = partial(run_controls, settings=settings)
    return Contract(partial(draw_controls, own_tau=own_tau), run, run)


CONTRACTS = {
    "scan": Contract(draw_scan, run_scan, run_scan, begins=True),
    # One after the other, steps are the scan.
    "step": Contract(draw_scan, run_steps, run_scan, packs=False),
    "delta": Contract(draw_delta, run_delta, run_delta, begins=True),
    "delta_step": Contract(draw_delta, run_delta_steps, run_delta, packs=False),
    "controls": Contract(draw_controls, run_controls, run_controls),
    "conv": Contract(draw_conv, run_conv, run_conv, begins=True),
    "norm": Contract(draw_norm, run_norm, run_norm),
    "gated_norm": Contract(draw_gated_norm, run_gated_norm, run_gated_norm),
    "swiglu": Contract(draw_swiglu, run_swiglu, run_swiglu),
}
# The same operator with other settings.
OTHER_CONTROLS = {
    "equal variance": controls_contract(ControlSettings(beta="equal_variance")),
    "wide delta": controls_contract(ControlSettings(dt_max=64.0, write_prior=False)),
    "own timescales": controls_contract(ControlSettings(), own_tau=True),
    "own timescales, exact prior": controls_contract(
        ControlSettings(prior="exact", write_prior=False), own_tau=True
    ),
    "the paper's clock": controls_contract(
        ControlSettings(lambda_map="softplus", alpha_min=0.001, alpha_max=1.0)
    ),
}
