"""The fractional equation, the bank that replaces it, and the error bound between them."""

import numpy as np
import pytest

from flash_frac.theory import (
    balanced_range,
    evaluate_bank,
    kernel_l1_error,
    midpoint_coefficients,
    relaxation,
    simulate_bank,
    simulate_fractional,
    solve_fractional_step,
    sup_error,
)

# (alpha, lam, h0): h at t = 0.1, 1, 5, 20, 50 for u = sin t, computed with mpmath.
SINE_TIMES = np.array([0.1, 1.0, 5.0, 20.0, 50.0])
SINE_SOLUTIONS = {
    (0.5, 1.0, 1.0): (
        0.7431516359663694,
        0.8164921698426769,
        -0.2875845920437609,
        0.4980882285580336,
        -0.2512510920277417,
    ),
    (0.3, 2.0, 1.0): (
        0.4793610920347275,
        0.5640254061088181,
        -0.1354096291742538,
        0.4266962531516443,
        -0.0306228026830478,
    ),
    (0.8, 0.5, 0.0): (
        0.0091166456715177,
        0.4361709176607357,
        -0.599388451228441,
        0.2298880314921606,
        -0.7240502904303901,
    ),
}

# alpha: M: largest error on [0, 50] of the bank for u = sin t, h0 = 1, lam = 1, balanced range. At
# alpha = 0.8 it is the error at t = 0, where the coefficients of the theorem do not quite sum to 1.
BANK_ERRORS = {
    0.3: {16: 1.62e-2, 32: 2.10e-3, 64: 1.20e-4, 128: 2.13e-6},
    0.5: {16: 4.68e-3, 32: 3.40e-4, 64: 8.98e-6, 128: 4.89e-8},
    0.8: {16: 1.070e-2, 32: 1.047e-3, 64: 3.897e-5, 128: 3.707e-7},
}


def balanced(alpha: float, num_modes: int, lam: float = 1.0):
    return midpoint_coefficients(alpha, lam, *balanced_range(alpha, num_modes, lam), num_modes)


def sine_forced(t, soe):
    """Σ_m d_m ∫_0^t exp(-(t-ξ)/τ_m) sin ξ dξ, each integral in closed form."""
    rate = 1 / soe.tau
    t = t[:, None]
    integral = (rate * np.sin(t) - np.cos(t) + np.exp(-t * rate)) / (1 + rate**2)
    return integral @ soe.d


def sine_solution(t, alpha, lam, h0):
    """Solution for u = sin t: the exact homogeneous part, and 1500 modes for the rest."""
    soe = balanced(alpha, 1500, lam)
    return h0 * relaxation(t, alpha, lam) + sine_forced(t, soe)


@pytest.mark.parametrize("case", SINE_SOLUTIONS)
def test_sine_solution_is_the_known_one(case):
    np.testing.assert_allclose(
        sine_solution(SINE_TIMES, *case), SINE_SOLUTIONS[case], rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("alpha", BANK_ERRORS)
def test_proposition_for_a_sine(alpha):
    """Its own bound, eps (|h0| + |u|), holds and is not idle: the error is 13% to 48% of it."""
    t = np.append(0.0, np.geomspace(1e-12, 50.0, 4000))
    exact = sine_solution(t, alpha, 1.0, 1.0)
    for num_modes, want in BANK_ERRORS[alpha].items():
        soe = balanced(alpha, num_modes)
        error = np.abs(evaluate_bank(t, soe.tau, soe.c) + sine_forced(t, soe) - exact).max()
        assert error == pytest.approx(want, rel=1e-2)
        fine = np.append(0.0, np.geomspace(1e-25, 50.0, 12_000))
        eps = max(
            sup_error(fine, soe.tau, soe.c, alpha), kernel_l1_error(fine, soe.tau, soe.c, alpha)
        )
        assert 0.1 < error / (2 * eps) < 0.5


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("lam", [0.5, 2.0])
def test_proposition_for_a_held_input(alpha, lam):
    """Both sides exact for a held input: random signs, then the worst input there is."""
    dt, num_steps, h0 = 0.05, 1000, 0.7
    soe = balanced(alpha, 24, lam)
    fine = np.append(0.0, np.geomspace(1e-25, dt * num_steps, 12_000))
    homogeneous = sup_error(fine, soe.tau, soe.c, alpha, lam)
    forced = kernel_l1_error(fine, soe.tau, soe.c, alpha, lam)

    def largest_error(u, h0):
        bank = simulate_bank(u, dt, soe.tau, soe.c, lam=lam, h0=h0)
        return np.abs(bank - solve_fractional_step(u, dt, alpha, lam=lam, h0=h0)).max()

    rng = np.random.default_rng(0)
    u = rng.choice([-1.0, 1.0], num_steps)
    eps = max(homogeneous, forced)
    assert 0.02 * eps < largest_error(u, h0) <= eps * (h0 + 1)
    # The input that has the sign of the kernel's error at every lag uses up the part that a held
    # input can.
    grid = dt * np.arange(num_steps + 1)
    kernel_error = np.diff(relaxation(grid, alpha, lam) - evaluate_bank(grid, soe.tau, soe.c))
    worst = largest_error(np.sign(kernel_error)[::-1], 0.0)
    assert worst == pytest.approx(np.abs(kernel_error).sum() / lam, rel=1e-6)
    assert 0.05 * forced < worst <= forced


def test_bank_with_one_mode_is_the_ordinary_equation():
    u = np.array([1.0, -2.0, 0.5])
    bank = simulate_bank(u, 0.3, [0.5], [1.0], lam=2.0, h0=0.4)
    exact = solve_fractional_step(u, 0.3, 1.0, lam=2.0, h0=0.4)
    np.testing.assert_allclose(bank, exact, rtol=0, atol=1e-15)


def test_bank_takes_uneven_steps():
    tau, c = [0.5, 8.0], [0.3, 0.7]
    even = simulate_bank([1.0] * 4 + [-1.0] * 2, 0.5, tau, c, h0=1.0)
    uneven = simulate_bank([1.0, -1.0], [2.0, 1.0], tau, c, h0=1.0)
    np.testing.assert_allclose(uneven, even[[0, 4, 6]], rtol=1e-14)


def test_slow_modes_keep_their_digits():
    """10^5 steps of a mode 10^9 steps long: 1 - exp(-x) would be off in the eighth digit."""
    num_steps, tau = 100_000, 1e9
    last = simulate_bank(np.ones(num_steps), 1.0, [tau], [1.0])[-1]
    assert last == pytest.approx(-np.expm1(-num_steps / tau), rel=1e-11)


def test_exact_solution_does_not_depend_on_the_step():
    u = np.array([1.0, 0.0, -1.0, 2.0])
    coarse = solve_fractional_step(u, 1.0, 0.4, lam=1.3, h0=0.5)
    fine = solve_fractional_step(np.repeat(u, 8), 0.125, 0.4, lam=1.3, h0=0.5)
    np.testing.assert_allclose(fine[::8], coarse, rtol=0, atol=2e-15)


def test_exact_solution_approaches_the_gain():
    # (1 - E(t)) / λ with E(t) ≈ t^-α / (λ Γ(1-α))
    step = solve_fractional_step(np.ones(400), 10.0, 0.9, lam=4.0)
    assert step[-1] == pytest.approx(0.25, rel=1e-4)
    np.testing.assert_allclose(
        step, (1 - relaxation(10.0 * np.arange(401), 0.9, 4.0)) / 4, atol=1e-15
    )


@pytest.mark.parametrize(("alpha", "tolerance"), [(0.3, 1e-4), (0.5, 1e-4), (0.8, 5e-4)])
def test_l1_scheme_against_the_exact_sine_solution(alpha, tolerance):
    t = np.linspace(0, 10, 2001)
    got = simulate_fractional(np.sin(t[1:]), t[1], alpha)
    error = np.abs(got - sine_solution(t, alpha, 1.0, 0.0)).max()
    assert tolerance / 10 < error < tolerance


def test_l1_scheme_is_poor_near_zero_and_good_later():
    t = np.linspace(0, 10, 2001)
    got = simulate_fractional(np.sin(t[1:]), t[1], 0.5, h0=1.0)
    error = np.abs(got - sine_solution(t, 0.5, 1.0, 1.0))
    assert error[t >= 5].max() == pytest.approx(7e-5, rel=0.1)
    assert error.max() > 1e-2


def test_l1_scheme_at_order_one_is_implicit_euler():
    got = simulate_fractional([0.0, 0.0, 0.0], 0.5, 1.0, lam=2.0, h0=1.0)
    np.testing.assert_allclose(got, [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-15)


@pytest.mark.parametrize("function", [solve_fractional_step, simulate_fractional])
def test_arguments_of_the_fractional_solvers(function):
    with pytest.raises(ValueError, match=r"u must be finite and of shape \(N,\) with N >= 1"):
        function([], 0.1, 0.5)
    with pytest.raises(ValueError, match=r"dt must be finite and > 0, got 0\.0"):
        function([1.0], 0.0, 0.5)
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\], got 0\.0"):
        function([1.0], 0.1, 0.0)


def test_arguments_of_the_bank():
    with pytest.raises(ValueError, match=r"c must have the shape of tau, \(1,\), got \(2,\)"):
        simulate_bank([1.0], 0.1, [1.0], [0.5, 0.5])
    with pytest.raises(ValueError, match=r"dt must be a number or have the shape of u, \(2,\)"):
        simulate_bank([1.0, 1.0], [0.1, 0.1, 0.1], [1.0], [1.0])


def test_float32_needs_expm1():
    """The slowest mode of the paper's bank at Δ λ^(1/α) = 0.1; then -expm1 over all rates."""
    x = np.float32(0.1) / np.float32(2**17)
    exact = -np.expm1(-float(x))
    assert (np.float32(1) - np.exp(-x)) / exact - 1 == pytest.approx(0.0156, abs=5e-4)
    rates = np.geomspace(1e-15, 1e2, 2000).astype(np.float32)
    exact = -np.expm1(-rates.astype(np.float64))
    np.testing.assert_allclose(-np.expm1(-rates), exact, rtol=2e-7)


def test_float32_step_forms_the_change_first():
    """A constant input over 65536 tokens: the state should reach 1 - exp(-65536 x) = 0.0488."""
    x = np.float32(0.1) / np.float32(2**17)
    write, one = -np.expm1(-x), np.float32(1)
    good, poor = np.float32(0), np.float32(0)
    for _ in range(65_536):
        good = good + (np.expm1(-x) * good + write * one)
        poor = np.exp(-x) * poor + write * one
    exact = -np.expm1(-65_536 * float(x))
    assert abs(good / exact - 1) < 1e-4
    assert abs(poor / exact - 1) > 3 * abs(good / exact - 1)
