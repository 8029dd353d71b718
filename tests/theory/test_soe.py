"""The theorem on finite sums: identities, convergence in M, coefficients at large timescales."""

import math

import numpy as np
import pytest

from flash_frac.theory import (
    balanced_range,
    evaluate_bank,
    impulse_response,
    kernel_l1_error,
    midpoint_coefficients,
    sup_error,
)

# Times that resolve [0, 100] down to where E leaves 1.
TIMES = np.append(0.0, np.geomspace(1e-30, 100.0, 20_000))

# alpha: M: (sup error of E, L1 error of g) on [0, 100], lam = 1, balanced range.
MIDPOINT_ERRORS = {
    0.3: {
        16: (1.296e-2, 4.03e-2),
        32: (1.745e-3, 6.12e-3),
        64: (1.013e-4, 4.01e-4),
        128: (1.801e-6, 8.07e-6),
        256: (6.02e-9, 3.03e-8),
    },
    0.5: {
        16: (2.332e-3, 1.33e-2),
        32: (1.740e-4, 1.14e-3),
        64: (4.412e-6, 3.32e-5),
        128: (2.429e-8, 2.08e-7),
        256: (1.546e-11, 1.51e-10),
    },
    0.8: {
        16: (1.070e-2, 1.12e-2),
        32: (1.047e-3, 1.09e-3),
        64: (3.897e-5, 4.05e-5),
        128: (3.707e-7, 3.85e-7),
    },
}


def balanced(alpha: float, num_modes: int, lam: float = 1.0):
    return midpoint_coefficients(alpha, lam, *balanced_range(alpha, num_modes, lam), num_modes)


@pytest.mark.parametrize("alpha", MIDPOINT_ERRORS)
def test_midpoint_errors_fall_as_predicted(alpha):
    half_width = min(math.pi / 2, math.pi * (1 - alpha) / alpha)
    last = math.inf
    for num_modes, (sup_want, l1_want) in MIDPOINT_ERRORS[alpha].items():
        soe = balanced(alpha, num_modes)
        error = sup_error(TIMES, soe.tau, soe.c, alpha)
        assert error == pytest.approx(sup_want, rel=1e-2)
        assert kernel_l1_error(TIMES, soe.tau, soe.c, alpha) == pytest.approx(l1_want, rel=2e-2)
        assert error < last / 5
        assert 1.2 < error / math.exp(-math.sqrt(math.pi * half_width * alpha * num_modes)) < 3.2
        last = error


@pytest.mark.parametrize(("num_modes", "want"), [(20, 4.6295e-3), (40, 7.1501e-5), (80, 7.2068e-5)])
def test_a_fixed_range_has_a_truncation_floor(num_modes, want):
    soe = midpoint_coefficients(0.5, 2.0, -20.0, 20.0, num_modes)
    times = np.append(0.0, np.geomspace(1e-30, 50.0, 20_000))
    assert sup_error(times, soe.tau, soe.c, 0.5, 2.0) == pytest.approx(want, rel=1e-2)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("lam", [0.25, 1.0, 4.0])
def test_identities_of_the_theorem(alpha, lam):
    soe = midpoint_coefficients(alpha, lam, -15.0, 12.0, 24)
    assert np.all(soe.c > 0) and np.all(soe.d > 0)
    np.testing.assert_allclose(soe.d / soe.c, 1 / (lam * soe.tau), rtol=1e-15)
    np.testing.assert_allclose(soe.tau[1:] / soe.tau[:-1], math.exp(27 / 24), rtol=1e-13)
    assert soe.tau[0] == pytest.approx(math.exp(-15 + 27 / 48), rel=1e-14)


@pytest.mark.parametrize(
    ("alpha", "num_modes", "log_tau", "want"),
    [(0.3, 32, 22.2, 0.998506), (0.5, 16, 11.8, 0.999992), (0.8, 16, 6.6, 1.008377)],
)
def test_coefficients_at_large_timescales(alpha, num_modes, log_tau, want):
    """c_m / [log q sin(πα)/(πλ) τ^-α] at the last node of a balanced range, near 1."""
    soe = balanced(alpha, num_modes)
    assert math.log(soe.tau[-1]) == pytest.approx(log_tau, abs=0.05)
    log_q = math.log(soe.tau[1] / soe.tau[0])
    leading = log_q * math.sin(math.pi * alpha) / math.pi * soe.tau**-alpha
    ratio = soe.c / leading
    assert ratio[-1] == pytest.approx(want, abs=2e-6)
    # 1 + O(τ^-α): the constant is -2 cos(πα), so the scaled deviation stays bounded.
    assert np.all(np.abs(ratio[-4:] - 1) <= 2.5 * soe.tau[-4:] ** -alpha)


def test_balanced_range_moves_with_lam():
    low, high = balanced_range(0.5, 16, 4.0)
    assert (low + high) / 2 == pytest.approx(-math.log(4.0) / 0.5)
    soe, scaled = balanced(0.5, 16), balanced(0.5, 16, 4.0)
    np.testing.assert_allclose(scaled.tau, soe.tau / 16, rtol=1e-13)
    np.testing.assert_allclose(scaled.c, soe.c, rtol=1e-12)


def test_kernel_l1_error_is_the_integral_of_the_kernel_error():
    soe = balanced(0.6, 16, 1.5)
    t = np.geomspace(1e-2, 1e2, 40_001)
    difference = np.abs(impulse_response(t, 0.6, 1.5) - evaluate_bank(t, soe.tau, soe.d))
    integral = np.trapezoid(difference * t, np.log(t))
    assert kernel_l1_error(t, soe.tau, soe.c, 0.6, 1.5) == pytest.approx(integral, rel=1e-6)


def test_evaluate_bank_shapes():
    assert evaluate_bank(np.zeros((2, 3)), [1.0, 2.0], [0.5, 0.25]).tolist() == [[0.75] * 3] * 2
    assert evaluate_bank(2.0, [1.0, 4.0], [1.0, -1.0]) == pytest.approx(
        math.exp(-2) - math.exp(-0.5)
    )


def test_arguments():
    with pytest.raises(ValueError, match=r"log_tau_max must be > log_tau_min = 2\.0, got 1\.0"):
        midpoint_coefficients(0.5, 1.0, 2.0, 1.0, 4)
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\), got 1\.0"):
        midpoint_coefficients(1.0, 1.0, 0.0, 1.0, 4)
    with pytest.raises(ValueError, match="num_modes must be an integer >= 1, got 0"):
        balanced_range(0.5, 0)
    with pytest.raises(ValueError, match=r"c must have the shape of tau, \(2,\), got \(3,\)"):
        evaluate_bank(1.0, [1.0, 2.0], [1.0, 1.0, 1.0])
