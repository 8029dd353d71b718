"""Densities of timescales: mass, symmetry, scaling, and the masses of mode bins."""

import numpy as np
import pytest

from flash_frac.theory import (
    PAPER_ALPHAS,
    bin_masses,
    evaluate_bank,
    geometric_bank,
    impulse_density,
    log_density,
    named_bank,
    relaxation,
    relaxation_density,
    spectral_mass,
)

ALPHAS = np.array([0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95])


def log_integral(density, low: float, high: float, step: float = 1 / 256) -> float:
    """∫ density(τ) dτ by the midpoint rule in log τ."""
    v = (np.arange(round(low / step), round(high / step)) + 0.5) * step
    tau = np.exp(v)
    return float(np.sum(density(tau) * tau) * step)


@pytest.mark.parametrize("alpha", [0.2, 0.3, 0.5, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("lam", [0.5, 1.0, 3.0])
def test_density_has_unit_mass(alpha, lam):
    def density(tau):
        return relaxation_density(tau, alpha, lam)

    edge = 36 / alpha
    centre = -np.log(lam) / alpha
    assert log_integral(density, centre - edge, centre + edge) == pytest.approx(1, abs=1e-11)


@pytest.mark.parametrize("alpha", [0.2, 0.3, 0.5, 0.7, 0.9])
def test_half_of_the_mass_lies_below_one(alpha):
    # The edge of the integral is not smooth: the midpoint rule is off by step² φ'(0) / 24 = 0, φ
    # being even.
    def density(tau):
        return relaxation_density(tau, alpha)

    assert log_integral(density, -36 / alpha, 0.0) == pytest.approx(0.5, abs=1e-11)
    assert spectral_mass(0.0, alpha) == 0.5


def test_impulse_density_is_relaxation_density_over_lam_tau():
    tau = np.geomspace(1e-12, 1e12, 97)[:, None, None]
    lam = np.array([0.25, 1.0, 4.0])[:, None]
    ratio = impulse_density(tau, ALPHAS, lam) * lam * tau / relaxation_density(tau, ALPHAS, lam)
    np.testing.assert_allclose(ratio, 1, rtol=2e-15)


@pytest.mark.parametrize("lam", [0.25, 0.8, 4.0])
def test_self_similarity(lam):
    tau = np.geomspace(1e-8, 1e8, 65)[:, None]
    scale = lam ** (1 / ALPHAS)
    np.testing.assert_allclose(
        relaxation_density(tau, ALPHAS, lam),
        scale * relaxation_density(scale * tau, ALPHAS),
        rtol=1e-12,
    )
    np.testing.assert_allclose(
        impulse_density(tau, ALPHAS, lam),
        scale**2 / lam * impulse_density(scale * tau, ALPHAS),
        rtol=1e-12,
    )


def test_density_is_the_formula_of_the_paper():
    tau = np.geomspace(1e-3, 1e3, 13)[:, None]
    lam = 1.7
    x = lam * tau**ALPHAS
    want = x * np.sin(np.pi * ALPHAS) / (np.pi * tau * (x**2 + 2 * x * np.cos(np.pi * ALPHAS) + 1))
    np.testing.assert_allclose(relaxation_density(tau, ALPHAS, lam), want, rtol=1e-12)


def test_extreme_timescales_do_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        values = relaxation_density([1e-300, 1e-100, 1e100, 1e300], [[0.1], [0.9]])
    assert np.all(np.isfinite(values))
    # R -> sin(πα)/π τ^(α-1) below and sin(πα)/π τ^(-α-1) above.
    assert values[0, 0] == pytest.approx(np.sin(0.1 * np.pi) / np.pi * 1e270, rel=1e-12)
    assert values[1, 2] == pytest.approx(np.sin(0.9 * np.pi) / np.pi * 1e-190, rel=1e-12)
    assert impulse_density(1e-300, 0.5) == np.inf


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9, 0.999])
def test_spectral_mass_is_the_closed_form(alpha):
    x = np.linspace(-30, 30, 61)
    want = 0.5 + np.arctan(np.tan(np.pi * alpha / 2) * np.tanh(alpha * x / 2)) / (np.pi * alpha)
    np.testing.assert_allclose(spectral_mass(x, alpha), want, atol=3e-15 / alpha)
    np.testing.assert_allclose(spectral_mass(x, alpha) + spectral_mass(-x, alpha), 1, rtol=1e-15)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_spectral_mass_differentiates_to_the_density(alpha):
    x, step = np.linspace(-4, 4, 9), 1e-4
    slope = (spectral_mass(x + step, alpha) - spectral_mass(x - step, alpha)) / (2 * step)
    np.testing.assert_allclose(slope, log_density(x, alpha), atol=1e-7)


def test_spectral_mass_keeps_digits_in_the_lower_tail():
    # C(x) -> sin(πα)/(πα) e^(αx)
    got = spectral_mass(-200.0, 0.5)
    assert got == pytest.approx(2 / np.pi * np.exp(-100.0), rel=1e-13)


def test_spectral_mass_at_order_one_is_a_step():
    np.testing.assert_array_equal(
        spectral_mass([-np.inf, -1e-9, 0.0, 1e-9, np.inf], 1.0), [0, 0, 0.5, 1, 1]
    )


def test_bin_masses_sum_to_one_and_broadcast():
    tau = np.array([0.3, 1.0, 2.0, 50.0, 51.0])
    alpha = np.array([[0.05, 0.3], [0.9, 1.0]])
    masses = bin_masses(tau, alpha)
    assert masses.shape == (2, 2, 5)
    np.testing.assert_allclose(masses.sum(-1), 1, rtol=4e-16)
    assert np.all(masses >= 0)
    np.testing.assert_array_equal(masses[1, 1], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(bin_masses([7.0], 0.5), [1.0])


def test_bin_masses_keep_digits_for_slow_modes():
    # Far above τ = 1 a bin holds the mass sin(πα)/(πα) (a^-α - b^-α) of its edges a < b.
    tau = np.array([1.0, 1e30, 1e32, 1e34])
    want = np.sin(0.9 * np.pi) / (0.9 * np.pi) * (1e31**-0.9 - 1e33**-0.9)
    assert bin_masses(tau, 0.9)[2] == pytest.approx(want, rel=1e-12)


def test_bin_masses_are_a_better_prior_than_the_asymptotic_one():
    s = np.geomspace(4, 6553.6, 2000)
    tau = geometric_bank(16)

    def largest_errors(weights):
        sums = np.array([evaluate_bank(s, tau, c) for c in weights])
        return np.abs(sums - relaxation(s, PAPER_ALPHAS[:, None])).max(axis=1)

    prior = tau ** -PAPER_ALPHAS[:, None]
    asymptotic = largest_errors(prior / prior.sum(1, keepdims=True))
    assert asymptotic[[0, 20, 40, 60, 80]] == pytest.approx(
        [0.265, 0.163, 0.110, 0.106, 0.133], abs=6e-4
    )
    assert asymptotic.mean() == pytest.approx(0.1423, rel=5e-3)
    assert largest_errors(bin_masses(tau, PAPER_ALPHAS)).mean() == pytest.approx(8.13e-3, rel=5e-3)
    tau = named_bank("W2_M16_simplex")
    prior = tau ** -PAPER_ALPHAS[:, None]
    asymptotic = largest_errors(prior / prior.sum(1, keepdims=True))
    assert asymptotic.mean() == pytest.approx(0.188, rel=5e-3)
    assert largest_errors(bin_masses(tau, PAPER_ALPHAS)).mean() == pytest.approx(1.5e-3, rel=0.05)


@pytest.mark.parametrize("function", [relaxation_density, impulse_density])
def test_density_arguments(function):
    with pytest.raises(ValueError, match=r"tau must be finite and > 0, got 0\.0"):
        function(0.0, 0.5)
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\), got 1\.0"):
        function(1.0, 1.0)
    with pytest.raises(ValueError, match=r"lam must be finite and > 0, got -1\.0"):
        function(1.0, 0.5, -1.0)


def test_bin_masses_need_an_increasing_bank():
    with pytest.raises(ValueError, match="strictly increasing"):
        bin_masses([1.0, 1.0], 0.5)
    with pytest.raises(ValueError, match=r"shape \(M,\)"):
        bin_masses([[1.0, 2.0]], 0.5)


@pytest.mark.parametrize(("alpha", "one", "both"), [(0.3, -1.30, -1.60), (0.5, -1.50, -2.00)])
def test_prior_on_reading_and_writing_doubles_the_exponent(alpha, one, both):
    """Weight of lag k of the layer without content, x = 1/τ, fitted over lags 100 to 10000."""
    tau, lags = geometric_bank(16), np.geomspace(1e2, 1e4, 50)
    prior = tau**-alpha / np.sum(tau**-alpha)
    fill = -np.expm1(-1 / tau)
    for weights, want in ((prior, one), (prior**2, both)):
        kernel = evaluate_bank(lags, tau, weights * fill)
        slope = np.polyfit(np.log(lags), np.log(kernel), 1)[0]
        assert slope == pytest.approx(want, abs=5e-3)
