"""Measured impulse responses and horizons, against direct scans and closed forms."""

import math

import numpy as np
import pytest
import torch

from flash_frac import frac_scan
from flash_frac.inspect import horizon, impulse_response, log_spaced_lags
from flash_frac.inspect.response import cumulative_weight, source_positions
from flash_frac.inspect.statistics import visit_layers
from flash_frac.ops import Controls

from .conftest import tiny


def random_controls(*shape):
    read, write = (torch.rand(shape, dtype=torch.float64).softmax(-1) for _ in range(2))
    return Controls(read, write, -torch.rand(shape, dtype=torch.float64) / 5)


def by_scan(controls, lags):
    """The mean over all source tokens of what the scan answers to an impulse at each."""
    rows, tokens, heads, _ = controls.read.shape
    sums = np.zeros((heads, len(lags)))
    for k in range(tokens):
        u = torch.zeros(rows, tokens, heads, 1, dtype=torch.float64)
        u[:, k] = 1
        answer = frac_scan(u, *controls, backend="recurrent").y.sum(0)[..., 0].numpy()
        for i, lag in enumerate(lags):
            if k + lag < tokens:
                sums[:, i] += answer[k + lag]
    return sums / (rows * (tokens - np.asarray(lags)))


def test_response_equals_the_scan_on_impulses():
    model, lags, seen = tiny().double(), np.array([0, 1, 2, 5, 11, 19]), []

    def visit(layer, mixer, inner_x, u):
        controls = mixer.controls(inner_x, u)
        seen.append(impulse_response(controls, lags))
        np.testing.assert_allclose(seen[-1], by_scan(controls, lags), rtol=1e-11)

    visit_layers(model, torch.randint(0, 32, (2, 20)), visit)
    assert len(seen) == 2 and seen[0].shape == (2, 6) and seen[0].dtype == np.float64


def test_constant_controls_give_the_closed_form():
    rates = torch.tensor([[0.5, 0.01, 1e-4], [0.2, 0.02, 2e-3]], dtype=torch.float64)
    read = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    shape = (1, 700, 2, 3)
    controls = Controls(
        read.expand(shape), (0.1 + read).expand(shape).contiguous(), -rates.expand(shape)
    )
    lags = log_spaced_lags(700)
    expected = (read * (0.1 + read) * torch.exp(-rates[:, None] * torch.tensor(lags)[:, None])).sum(
        -1
    )
    for sources in (1, 100, 1000):
        found = impulse_response(controls, lags, max_sources=sources)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-10)


def test_long_sums_of_fast_decays_do_not_overflow():
    controls = random_controls(1, 3000, 1, 2)
    controls = controls._replace(log_decay=1000 * controls.log_decay)
    response = impulse_response(controls, log_spaced_lags(3000))
    assert np.isfinite(response).all() and response[0, 0] > 0 and response[0, -1] == 0


def test_fewer_sources_estimate_the_same():
    controls, lags = random_controls(2, 2000, 2, 3), np.array([0, 1, 3, 10])
    few, all_ = (impulse_response(controls, lags, max_sources=n) for n in (500, 5000))
    np.testing.assert_allclose(few, all_, rtol=0.05)
    assert not np.array_equal(few, all_)


def test_every_lag_has_enough_sources():
    lags = log_spaced_lags(4096)
    assert lags[:4].tolist() == [0, 1, 2, 3] and lags[-1] == 4064 and 60 <= len(lags) <= 70
    assert (np.diff(lags) > 0).all()
    for lag in lags:
        k = source_positions(4096, lag, 512)
        assert 32 <= len(np.unique(k)) == len(k) <= 512 and k[0] == 0 and k[-1] + lag == 4095
    assert log_spaced_lags(16)[-1] == 8
    assert source_positions(100, 40, 3).tolist() == [0, 30, 59]


def test_horizon_of_an_exponential():
    rho, lags = 0.99, np.arange(5000)
    found = horizon(lags, 3 * rho**lags)
    # Up to lag n lies 1 - rho^(n + 1), straight between integers.
    assert found.half == pytest.approx(math.log(0.5) / math.log(rho), abs=0.01)
    assert found.ninety == pytest.approx(math.log(0.1) / math.log(rho), abs=0.01)
    assert found.mean == pytest.approx(rho / (1 - rho), rel=1e-6)
    assert found.last_half < 1e-9


def test_horizon_of_a_power_law_at_few_lags_is_that_at_all():
    every, few = np.arange(4001), log_spaced_lags(4032, num_lags=20)
    law = np.concatenate([[2.0], every[1:] ** -0.7])
    assert few[-1] == 4000 and len(few) < 25
    np.testing.assert_allclose(horizon(few, law[few]), horizon(every, law), rtol=1e-9)


def test_horizon_of_flat_and_of_no_memory():
    flat = horizon(np.arange(100), np.ones(100))
    assert flat == pytest.approx((50, 90, 49.5, 0.5))
    assert horizon(np.arange(4), np.array([1.0, 0, 0, 0])) == pytest.approx((0.5, 0.9, 0, 0))
    assert horizon(np.arange(4), np.zeros(4)) == (0, 0, 0, 0)


def test_cumulative_weight_of_flat_and_of_no_memory():
    lags = np.array([0, 1, 4, 9])
    np.testing.assert_allclose(cumulative_weight(lags, np.ones(4)), np.arange(11) / 10)
    assert not cumulative_weight(lags, np.zeros(4)).any()


@pytest.mark.parametrize("where", ["forward", "visit"])
def test_layers_are_restored_after_errors(where):
    model = tiny().train()

    def visit(layer, mixer, inner_x, u):
        if where == "visit" and layer == 1:
            raise RuntimeError("from the visit")

    tokens = torch.randint(0, 32, (1, 20)) + (32 if where == "forward" else 0)
    with pytest.raises((RuntimeError, ValueError), match=r"from the visit|input_ids must be in"):
        visit_layers(model, tokens, visit)
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(after or before for after, before in hooks)
    assert model.training and torch.is_grad_enabled()


def test_errors_name_the_argument():
    controls = random_controls(1, 8, 1, 2)
    with pytest.raises(ValueError, match=r"lags must be integers in \[0, T = 8\)"):
        impulse_response(controls, np.array([8]))
    with pytest.raises(ValueError, match="max_sources must be"):
        impulse_response(controls, np.array([1]), max_sources=0)
    with pytest.raises(ValueError, match="use a longer text"):
        log_spaced_lags(3)
    with pytest.raises(ValueError, match="lags must increase from 0 and 1"):
        horizon(np.array([1, 2]), np.ones(2))
