"""Banks: the geometric one, the stored ones, and how to choose one."""

import math

import numpy as np
import pytest

from flash_frac.theory import (
    bank_info,
    bank_names,
    geometric_bank,
    head_banks,
    named_bank,
    resolve_bank,
)
from flash_frac.theory.minimax import fit_on_grid, mean_minimax_error, relaxation, window_grid


def test_geometric_bank_of_the_paper():
    tau = geometric_bank(16)
    assert tau.shape == (16,) and tau[0] == 1.0 and tau[-1] == 2.0**17
    np.testing.assert_allclose(tau[1:] / tau[:-1], 2 ** (17 / 15), rtol=1e-14)


def test_head_banks_share_the_range():
    """Each is geometric, and starts in the middle of the one before, on the log axis."""
    tau = head_banks(8, 17, 1.0, 2.0**18)
    assert tau.shape == (8, 17) and tau[0, 0] == 1.0 and tau[-1, -1] == 2.0**18
    np.testing.assert_allclose(tau[:, 1:] / tau[:, :-1], 2 ** (4 / 16), rtol=1e-12)
    np.testing.assert_allclose(tau[1:, :9], tau[:-1, 8:], rtol=1e-12)
    np.testing.assert_allclose(head_banks(1, 16), [geometric_bank(16)])
    np.testing.assert_array_equal(resolve_bank("per_head", 5, 1.0, 9.0, 3), head_banks(3, 5, 1, 9))
    with pytest.raises(ValueError, match="num_heads must be an integer >= 1, got 0"):
        head_banks(0, 16)


def test_geometric_bank_of_one_mode_is_the_geometric_mean():
    np.testing.assert_allclose(geometric_bank(1, 1.0, 100.0), [10.0], rtol=1e-15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "num_modes must be an integer >= 1, got 0"),
        ((2.0,), r"num_modes must be an integer >= 1, got 2\.0"),
        ((4, 0.0), r"tau_min must be finite and > 0, got 0\.0"),
        ((4, 1.0, math.inf), "tau_max must be finite and > 0, got inf"),
        ((4, 2.0, 1.0), r"tau_max must be > tau_min, got tau_min 2\.0 and tau_max 1\.0"),
    ],
)
def test_geometric_bank_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        geometric_bank(*arguments)


def test_names_say_window_modes_and_constraint():
    windows = {"W1": (4.0, 6553.6), "W2": (0.01, 1e6), "W3": (0.1, 6553.6)}
    assert len(bank_names()) == 8
    for name in bank_names():
        window, modes, constraint = name.split("_", 2)
        info = bank_info(name)
        assert info.window == windows[window]
        assert info.tau.shape == (int(modes[1:]),)
        assert info.constraint == constraint
        assert np.all(np.diff(info.tau) > 0)


@pytest.mark.parametrize("name", bank_names())
def test_stored_errors_are_reproduced(name):
    """Mean over the paper's 90 orders; stored from a finer grid, hence 0.1-0.3% more."""
    info = bank_info(name)
    got = mean_minimax_error(info.tau, window=info.window, constraint=info.constraint)
    assert got == pytest.approx(info.mean_error, rel=5e-3)


@pytest.mark.parametrize("name", bank_names())
def test_stored_banks_have_coefficients_that_meet_their_constraint(name):
    info = bank_info(name)
    s = window_grid(info.window, 2000)
    for alpha in (0.1, 0.5, 0.99):
        fit = fit_on_grid(s, relaxation(s, alpha), info.tau, info.constraint)
        assert np.all(fit.c >= 0)
        total = fit.c.sum()
        assert total == pytest.approx(1, abs=1e-14) if info.constraint == "simplex" else total <= 1
        assert fit.error <= info.max_error


@pytest.mark.parametrize(
    ("bank", "errors"),
    [
        ("geometric", (7.22e-4, 3.72e-3, 5.63e-2, 1.86e-1, 1.89e-1)),
        ("W1_M16_simplex", (8.91e-8, 7.06e-4, 2.33e-3, 1.06e-1, 1.33e-1)),
        ("W2_M16_simplex", (9.59e-5, 1.00e-4, 9.88e-5, 9.93e-5, 1.08e-4)),
    ],
)
def test_errors_outside_the_window_of_a_bank(bank, errors):
    """Simplex errors, mean over 18 orders: narrow windows are bought with what lies outside."""
    tau = resolve_bank(bank, 16, 1.0, 131072.0)
    windows = ((4, 6553.6), (4, 65536.0), (1, 6553.6), (0.1, 6553.6), (0.01, 1e6))
    alphas = np.linspace(0.1, 0.95, 18)
    got = [mean_minimax_error(tau, alphas, window=window) for window in windows]
    assert got == pytest.approx(errors, rel=1e-2)


def test_named_bank_is_a_fresh_array():
    named_bank("W1_M8_simplex")[0] = -1.0
    assert named_bank("W1_M8_simplex")[0] > 0


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match=r"name must be one of W1_M16_simplex, .*, got 'W9'"):
        named_bank("W9")


def test_resolve_bank():
    np.testing.assert_array_equal(
        resolve_bank("geometric", 5, 0.5, 100.0), geometric_bank(5, 0.5, 100.0)
    )
    np.testing.assert_array_equal(
        resolve_bank("W2_M16_simplex", 16, 1.0, 2.0), named_bank("W2_M16_simplex")
    )
    np.testing.assert_array_equal(resolve_bank((1, 2), 2, 1.0, 2.0), [1.0, 2.0])


@pytest.mark.parametrize(
    ("bank", "message"),
    [
        ("linear", r"bank must be one of geometric, per_head, W1_M16_simplex, .*, got 'linear'"),
        ("W1_M16_simplex", "bank must have num_modes = 3 timescales, got 16"),
        ([1.0, 2.0], "bank must have num_modes = 3 timescales, got 2"),
        ([1.0, 3.0, 2.0], r"tau must be strictly increasing, got \[1\.0, 3\.0, 2\.0\]"),
        ([0.0, 1.0, 2.0], r"tau must be finite and > 0, got 0\.0"),
        ([1.0, 2.0, math.inf], "tau must be finite and > 0, got inf"),
        ([], r"tau must have shape \(M,\) with M >= 1, got \(0,\)"),
    ],
)
def test_resolve_bank_arguments(bank, message):
    with pytest.raises(ValueError, match=message):
        resolve_bank(bank, 3, 1.0, 100.0)
