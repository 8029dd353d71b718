"""Best coefficients of a bank: the paper's table, weaker constraints, and optimality itself."""

import numpy as np
import pytest

from flash_frac.theory import (
    PAPER_ALPHAS,
    PAPER_WINDOW,
    evaluate_bank,
    geometric_bank,
    mean_minimax_error,
    minimax_fit,
    named_bank,
    relaxation,
    sup_error,
)

CONSTRAINTS = ("simplex", "sum_le_1", "free")


@pytest.mark.parametrize(
    ("num_modes", "measured", "printed"),
    [(8, 1.342e-3, 1.34e-3), (16, 6.817e-4, 6.82e-4), (32, 6.446e-4, 6.45e-4)],
)
def test_table_of_the_paper(num_modes, measured, printed):
    assert len(PAPER_ALPHAS) == 90 and PAPER_ALPHAS[0] == 0.1 and PAPER_ALPHAS[-1] == 0.99
    error = mean_minimax_error(geometric_bank(num_modes))
    assert error == pytest.approx(measured, rel=5e-4)
    assert float(f"{error:.2e}") == printed


def test_errors_per_order():
    want = {0.1: 1.78e-3, 0.3: 9.98e-4, 0.5: 6.60e-4, 0.7: 4.07e-4, 0.9: 2.11e-4, 0.99: 2.35e-5}
    for alpha, error in want.items():
        fit = minimax_fit(geometric_bank(16), alpha)
        assert fit.error == pytest.approx(error, rel=5e-3)
        assert 6 <= np.count_nonzero(fit.c > 1e-9) <= 9


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_weaker_constraints_do_better(alpha):
    tau = geometric_bank(16)
    simplex, below, free = (minimax_fit(tau, alpha, constraint=name) for name in CONSTRAINTS)
    assert free.error <= below.error * (1 + 1e-5)
    # The sum, not the number of modes or positivity, is what limits the paper's bank.
    assert below.error < simplex.error / 4
    assert np.all(simplex.c >= 0) and simplex.c.sum() == pytest.approx(1, abs=1e-14)
    assert np.all(below.c >= 0) and below.c.sum() <= 1
    assert 1e-7 < free.error < 2e-5


def test_mean_error_with_sum_at_most_one():
    error = mean_minimax_error(geometric_bank(16), constraint="sum_le_1")
    assert error == pytest.approx(4.48e-6, rel=5e-3)


def test_one_mode_by_brute_force():
    """A single free exponential, checked by brute force over c."""
    tau, window = [30.0], (4.0, 100.0)
    fit = minimax_fit(tau, 0.6, window=window, constraint="free", num_points=500)
    s = np.geomspace(*window, 500)
    target = relaxation(s, 0.6)
    candidates = np.linspace(0, 1, 20_001)
    errors = np.abs(target[:, None] - np.exp(-s / 30)[:, None] * candidates).max(axis=0)
    assert fit.error == pytest.approx(errors.min(), rel=1e-3)
    assert fit.error <= errors.min()


@pytest.mark.parametrize(
    ("tau", "constraint"),
    [
        (geometric_bank(8), "simplex"),
        (geometric_bank(16), "sum_le_1"),
        (geometric_bank(8), "free"),
        (named_bank("W1_M16_simplex"), "simplex"),
        (named_bank("W1_M24_simplex"), "simplex"),
    ],
)
def test_error_is_that_of_the_coefficients_and_cannot_be_lowered(tau, constraint):
    alpha = 0.4
    fit = minimax_fit(tau, alpha, constraint=constraint)
    s = np.geomspace(*PAPER_WINDOW, 2000)
    assert sup_error(s, tau, fit.c, alpha) == pytest.approx(fit.error, rel=1e-6)
    # Between the grid points the error is hardly larger.
    fine = np.geomspace(*PAPER_WINDOW, 20_001)
    assert sup_error(fine, tau, fit.c, alpha) <= 1.02 * fit.error
    # Signs alternate at the extremal points, one more of them than active modes (less the sum,
    # where it binds).
    residual = relaxation(s, alpha) - evaluate_bank(s, tau, fit.c)
    signs = np.sign(residual[np.abs(residual) > fit.error * (1 - 1e-3)])
    alternations = 1 + np.count_nonzero(np.diff(signs))
    num_active = np.count_nonzero(np.abs(fit.c) > 1e-12)
    binding = constraint == "simplex"
    assert alternations >= num_active + 1 - binding


def test_order_one_is_a_single_mode():
    fit = minimax_fit([0.5, 1.0, 2.0], 1.0, window=(0.1, 50.0))
    np.testing.assert_allclose(fit.c, [0, 1, 0], atol=1e-7)
    assert fit.error < 1e-7


def test_arguments():
    tau = geometric_bank(4)
    with pytest.raises(ValueError, match=r"constraint must be one of .*, got 'positive'"):
        minimax_fit(tau, 0.5, constraint="positive")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"window must satisfy 0 < s_min < s_max"):
        minimax_fit(tau, 0.5, window=(4.0, 4.0))
    with pytest.raises(ValueError, match="num_points must be an integer >= 2, got 1"):
        minimax_fit(tau, 0.5, num_points=1)
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\]"):
        minimax_fit(tau, 1.5)
