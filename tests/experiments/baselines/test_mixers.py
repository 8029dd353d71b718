"""Contracts of every baseline: the recurrence, any split, causality, the state alone."""

import copy
import math

import pytest
import torch

from experiments.baselines import absorb, make_mixer
from flash_frac.ops.testing import relative_error
from tests.experiments.baselines import references

SIZES = {"num_heads": 3, "head_dim": 4}
CASES = {
    "attention": {},
    "attention-no-rope": {"rope": False, "bias": True},
    "attention-qk-norm": {"qk_norm": True},
    "mamba2": {"state_size": 5},
    "mamba3": {"state_size": 8},
    "mamba3-all-turn": {"state_size": 6, "rope_fraction": 1.0},
    "gated_deltanet": {},
    "gated_deltanet-narrow": {"expand_v": 1.0},
}
WIDTH = 12
NAMES = [*CASES, "frac"]


def mixer_of(case, dtype=torch.float64):
    name = case.split("-")[0]
    return make_mixer(name, WIDTH, **SIZES, **CASES.get(case, {})).to(dtype)


def reference_of(case):
    return getattr(references, case.split("-")[0])


def tensors(state):
    return list(state) if isinstance(state, tuple) else list(vars(state).values())


def assert_same_state(actual, expected):
    for a, b in zip(tensors(actual), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def outputs_and_gradients(function, mixer, x):
    """y, the recurrent tensors of the state, and the gradients of a random scalar of both."""
    x = x.detach().requires_grad_()
    y, states = function(x)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (y, *states)]
    loss = sum((w.to(t.dtype) * t).sum() for w, t in zip(weights, (y, *states), strict=True))
    parameters = list(mixer.parameters())
    return [y, *states, *torch.autograd.grad(loss, [x, *parameters])]


def chunked(case, mixer):
    count = 1 if "mamba2" in case or "deltanet" in case else None

    def run(x):
        y, state = mixer(x)
        return y, tensors(state)[:count]

    return run


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 150])
@pytest.mark.parametrize("case", CASES)
def test_is_its_recurrence(case, num_tokens):
    mixer = mixer_of(case)
    x = torch.randn(2, num_tokens, WIDTH, dtype=torch.float64)
    actual = outputs_and_gradients(chunked(case, mixer), mixer, x)
    expected = outputs_and_gradients(lambda x: reference_of(case)(mixer, x), mixer, x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_float32_is_as_exact_as_the_recurrence(case):
    """Against float64, at most twice the error of the recurrence in float32, and a rounding.

    Errors are root mean squares over draws. The few numbers of a bias are sums of many terms that
    cancel: their rounding is that of the terms, which add up like the steps of a random walk.
    """
    eps, errors = torch.finfo(torch.float32).eps, []
    for seed in range(4):
        torch.manual_seed(seed)
        narrow, reference = mixer_of(case, torch.float32), reference_of(case)
        wide = copy.deepcopy(narrow).double()
        x = torch.randn(2, 200, WIDTH)
        exact = outputs_and_gradients(lambda x: reference(wide, x), wide, x.double())  # noqa: B023
        plain = outputs_and_gradients(lambda x: reference(narrow, x), narrow, x)  # noqa: B023
        actual = outputs_and_gradients(chunked(case, narrow), narrow, x)
        pairs = zip(actual, plain, exact, strict=True)
        errors.append([(relative_error(a, c), relative_error(b, c)) for a, b, c in pairs])
    mine, theirs = torch.tensor(errors, dtype=torch.float64).square().mean(0).sqrt().T
    for error, allowed, tensor in zip(mine, theirs, exact, strict=True):
        terms = x.numel() / tensor.numel() if tensor.numel() < 64 else 1
        assert error <= 2 * (allowed + eps / 2 * terms**0.5)


@pytest.mark.parametrize("case", CASES)
def test_a_token_repeated_for_long(case):
    """All keys equal, as in a long background: float32 stays as close as the recurrence does."""
    narrow = mixer_of(case, torch.float32)
    x = torch.randn(1, 1, WIDTH).expand(2, 400, -1)
    reference = reference_of(case)
    exact = reference(copy.deepcopy(narrow).double(), x.double())[0]
    error, plain = (relative_error(y, exact) for y in (narrow(x)[0], reference(narrow, x)[0]))
    assert error <= 2 * (plain + torch.finfo(torch.float32).eps / 2)


@pytest.mark.parametrize("case", [case for case in CASES if "attention" not in case])
def test_forgetting_at_once_is_finite(case):
    """Decays of exp(-100) a token: no infinity meets a zero, in values or in gradients."""
    mixer = mixer_of(case, torch.float32)
    torch.nn.init.constant_(mixer.dt_bias, 100.0)
    x = torch.randn(2, 130, WIDTH)
    y, state = mixer(x)
    y.sum().backward()
    found = [y, *tensors(state), *tensors(absorb(mixer, x)), *(p.grad for p in mixer.parameters())]
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("case", NAMES)
def test_pieces_are_the_whole(case):
    mixer = mixer_of(case)
    x = torch.randn(2, 170, WIDTH, dtype=torch.float64)
    whole, last = mixer(x)
    state, parts = None, []
    for piece in x.split([1, 2, 70, 1, 96], 1):
        y, state = mixer(piece, state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)
    assert_same_state(state, last)


@pytest.mark.parametrize("case", NAMES)
def test_absorb_is_the_state_of_forward(case):
    mixer = mixer_of(case)
    x = torch.randn(2, 170, WIDTH, dtype=torch.float64)
    state = absorb(mixer, x[:, :100])
    assert_same_state(state, mixer(x[:, :100])[1])
    assert_same_state(absorb(mixer, x[:, 100:], state), mixer(x)[1])


@pytest.mark.parametrize("case", CASES)
def test_the_future_is_not_seen(case):
    mixer = mixer_of(case)
    x = torch.randn(1, 100, WIDTH, dtype=torch.float64)
    changed = x.clone()
    changed[:, 70:] = torch.randn_like(changed[:, 70:])
    assert torch.equal(mixer(x)[0][:, :70], mixer(changed)[0][:, :70])


@pytest.mark.parametrize("case", CASES)
def test_in_autocast_the_scan_stays_in_float32(case):
    mixer = mixer_of(case, torch.float32)
    x = torch.randn(2, 100, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = mixer(x)
        y.sum().backward()
    assert y.dtype == torch.bfloat16
    if "attention" not in case:
        assert state.recurrent.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize("case", CASES)
def test_errors_name_the_remedy(case):
    mixer = mixer_of(case)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 12\), got \(2, 3, 4\)"):
        mixer(torch.zeros(2, 3, 4))
    # The library's layers take no tokens as well.
    if "deltanet" not in case:
        with pytest.raises(ValueError, match="at least one token"):
            mixer(torch.zeros(2, 0, WIDTH))
    state = mixer(torch.zeros(2, 3, WIDTH, dtype=torch.float64))[1]
    with pytest.raises(ValueError, match="another model or batch"):
        mixer(torch.zeros(3, 1, WIDTH, dtype=torch.float64), state=state)
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        make_mixer(case.split("-")[0], WIDTH, num_heads=0, head_dim=4)


def test_elapsed_time_multiplies_the_step_of_mamba2():
    """Twice the time is twice the rate, and twice what is written."""
    mixer, x = mixer_of("mamba2"), torch.randn(2, 9, WIDTH).double()
    faster = copy.deepcopy(mixer)
    with torch.no_grad():
        faster.A_log.add_(math.log(2))
    elapsed = torch.full((2, 9), 2.0)
    state, expected = mixer(x, elapsed=elapsed)[1], faster(x)[1]
    torch.testing.assert_close(state.recurrent, 2 * expected.recurrent)
    assert_same_state(absorb(mixer, x, elapsed=elapsed), state)
