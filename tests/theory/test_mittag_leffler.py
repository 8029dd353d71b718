"""Mittag-Leffler functions against 40-digit values, their limits and their contracts.

`mittag_leffler_table.txt` holds the output of `python tests/theory/test_mittag_leffler.py`, which
takes a minute or two: α, s, E and G to 20 digits, from `reference` below. α and s are the float64
numbers nearest to the printed ones.
"""

import math
import tracemalloc
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from flash_frac.theory import (
    impulse_response,
    impulse_response_tail,
    relaxation,
    relaxation_tail,
)

TOLERANCE = 1e-13
COMMON = (0.05, 0.1, 0.2, 0.3, 0.5, 0.66, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)
# The smallest, the one where the poles enter the strip, and the closest to 1.
ALPHAS = (0.001, 0.01, *COMMON, 0.667, 0.999999, 0.999999999999)
TIMES = (1e-20, 1e-8, 1e-6, 1e-4, 1e-2, 0.3, 1.0, 3.0, 30.0, 1e2, 1e4, 1e6, 1e8)


def reference(alpha: float, s: float, *, impulse: bool = False) -> mp.mpf:
    """E(s) = E_α(-s^α), or G(s) = s^(α-1) E_{α,α}(-s^α), as a 40-digit number.

    Gauss-Legendre panels over the spectral density: another rule, in other nodes, than the code
    under test.
    """
    with mp.workdps(40):
        a, s = mp.mpf(alpha), mp.mpf(s)

        def integrand(v):
            density = mp.sin(mp.pi * a) / (2 * mp.pi) / (mp.cosh(a * v) + mp.cos(mp.pi * a))
            return density * mp.exp(-s * mp.exp(v)) * (mp.exp(v) if impulse else 1)

        centre = -mp.log(s)
        low = min(centre, 0) - 95 / (1 + a if impulse else a)
        high = centre + mp.log(200)
        # Panels: even ones, fine ones where the exponential drops, and ones that close in on the
        # peak of width π(1-α)/α.
        width = mp.pi * (1 - a) / a
        edges = {low + (high - low) * k / 60 for k in range(61)}
        edges |= {centre + k for k in range(-12, 6)} | {mp.mpf(0)}
        edges |= {sign * width * mp.mpf(2) ** k for k in range(-2, 45) for sign in (-1, 1)}
        panels = sorted(edge for edge in edges if low <= edge <= high)
        return mp.quad(integrand, panels, method="gauss-legendre", maxdegree=7)


def series(alpha: float, s: float, *, impulse: bool = False) -> mp.mpf:
    """The same from the power series, for s up to about 10."""
    with mp.workdps(80):
        a, s = mp.mpf(alpha), mp.mpf(s)
        beta = a if impulse else mp.mpf(1)
        total, k = mp.mpf(0), 0
        while True:
            term = (-(s**a)) ** k * mp.rgamma(a * k + beta)
            total, k = total + term, k + 1
            if k > 50 and abs(term) < mp.mpf(10) ** -60:
                return total * s ** (beta - 1)


def relative_error(got, want: mp.mpf) -> float:
    with mp.workdps(40):
        return float(abs(mp.mpf(float(got)) / want - 1))


def test_relative_error_over_sixteen_decades():
    lines = Path(__file__).with_name("mittag_leffler_table.txt").read_text().splitlines()[1:]
    assert len(lines) == len(ALPHAS) * len(TIMES)
    for alpha, s, e, g in (line.split() for line in lines):
        assert relative_error(relaxation(float(s), float(alpha)), mp.mpf(e)) <= TOLERANCE, (
            alpha,
            s,
        )
        got = impulse_response(float(s), float(alpha))
        assert relative_error(got, mp.mpf(g)) <= TOLERANCE, (alpha, s)


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("s", [1e-3, 1.0, 5.0])
def test_power_series(alpha, s):
    with mp.workdps(40):
        assert abs(reference(alpha, s) / series(alpha, s) - 1) < 1e-30
    assert relative_error(relaxation(s, alpha), series(alpha, s)) <= TOLERANCE
    assert relative_error(impulse_response(s, alpha), series(alpha, s, impulse=True)) <= TOLERANCE


def test_order_one_half_is_the_complementary_error_function():
    for s in (1e-4, 0.1, 2.0, 50.0):
        want = mp.exp(s) * mp.erfc(mp.sqrt(s))
        assert relative_error(relaxation(s, 0.5), want) <= TOLERANCE


def test_order_one_is_the_exponential():
    t = np.geomspace(1e-8, 700, 50)
    np.testing.assert_array_equal(relaxation(t, 1.0, 0.7), np.exp(-0.7 * t))
    np.testing.assert_array_equal(impulse_response(t, 1.0, 0.7), np.exp(-0.7 * t))


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("lam", [0.25, 3.0])
def test_rate_rescales_time(alpha, lam):
    t = np.geomspace(1e-4, 1e4, 30)
    scale = lam ** (1 / alpha)
    np.testing.assert_allclose(relaxation(t, alpha, lam), relaxation(scale * t, alpha), rtol=1e-13)
    np.testing.assert_allclose(
        impulse_response(t, alpha, lam),
        scale / lam * impulse_response(scale * t, alpha),
        rtol=1e-13,
    )


def test_impulse_response_is_minus_the_slope_over_lam():
    t, lam = np.linspace(1.0, 2.0, 5), 1.7
    step = 1e-4
    slope = (relaxation(t + step, 0.6, lam) - relaxation(t - step, 0.6, lam)) / (2 * step)
    # Central differences: step² |E'''| / 6 < 1e-8 here.
    np.testing.assert_allclose(impulse_response(t, 0.6, lam), -slope / lam, atol=1e-8)


def test_time_zero():
    alpha = np.array([0.01, 0.5, 1.0])
    np.testing.assert_array_equal(relaxation(0.0, alpha), [1, 1, 1])
    np.testing.assert_array_equal(impulse_response(0.0, alpha), [np.inf, np.inf, 1])


def test_relaxation_decreases_from_one():
    values = relaxation(
        np.append(0.0, np.geomspace(1e-8, 1e8, 400)), np.array([[0.05], [0.5], [0.99]])
    )
    assert np.all(np.diff(values, axis=1) < 0)
    assert np.all((values > 0) & (values <= 1))


@pytest.mark.parametrize("function", [relaxation, impulse_response])
def test_broadcasting_agrees_with_scalars(function):
    t = np.array([0.0, 1e-3, 1.0, 40.0])[:, None, None]
    alpha = np.array([0.1, 0.7, 1.0])[:, None]
    lam = np.array([0.5, 1.0])
    got = function(t, alpha, lam)
    assert got.shape == (4, 3, 2) and got.dtype == np.float64
    want = [[[function(x, a, r) for r in lam] for a in alpha[:, 0]] for x in t[:, 0, 0]]
    # Another set of nodes in each call, so equal to rounding only.
    np.testing.assert_allclose(got, want, rtol=5e-15)
    assert function(1.0, 0.5).shape == ()


@pytest.mark.parametrize("alpha", [0.5, np.linspace(0.1, 0.99, 100_000)])
def test_memory_is_bounded(alpha):
    t = np.geomspace(1e-3, 1e4, 100_000)
    tracemalloc.start()
    relaxation(t, alpha)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All nodes at once would take 100000 x 300 x 8 bytes = 240 MB.
    assert peak < 60e6


# Deviation of kernel / tail - 1 at t = 1e4, 1e6, 1e8 with lam = 1.
RELAXATION_DEVIATIONS = {
    0.3: (-3.633e-2, -9.240e-3, -2.328e-3),
    0.5: (-4.999e-5, -5.000e-7, -5.000e-9),
    0.7: (1.274e-3, 5.070e-5, 2.018e-6),
    0.9: (4.167e-4, 6.600e-6, 1.046e-7),
}
IMPULSE_DEVIATIONS = {
    0.3: (-7.202e-2, -1.844e-2, -4.653e-3),
    0.5: (-1.500e-4, -1.500e-6, -1.500e-8),
    0.7: (2.549e-3, 1.014e-4, 4.037e-6),
}


@pytest.mark.parametrize(
    ("kernel", "tail", "deviations"),
    [
        (relaxation, relaxation_tail, RELAXATION_DEVIATIONS),
        (impulse_response, impulse_response_tail, IMPULSE_DEVIATIONS),
    ],
)
def test_tails_and_their_first_correction(kernel, tail, deviations):
    t = np.array([1e4, 1e6, 1e8])
    for alpha, want in deviations.items():
        np.testing.assert_allclose(kernel(t, alpha) / tail(t, alpha) - 1, want, rtol=1e-3)


@pytest.mark.parametrize("alpha", [0.3, 0.7])
@pytest.mark.parametrize("lam", [0.5, 2.0])
def test_tail_correction_depends_on_lam(alpha, lam):
    t = 1e12
    first = -math.gamma(1 - alpha) / (lam * math.gamma(1 - 2 * alpha)) * t**-alpha
    assert relaxation(t, alpha, lam) / relaxation_tail(t, alpha, lam) - 1 == pytest.approx(
        first, rel=2e-3
    )


@pytest.mark.parametrize("function", [relaxation, impulse_response])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 0.5), r"t must be finite and >= 0, got -1\.0"),
        ((math.nan, 0.5), "t must be finite and >= 0, got nan"),
        ((1.0, 0.0), r"alpha must be in \(0, 1\], got 0\.0"),
        ((1.0, [0.5, 1.1]), r"alpha must be in \(0, 1\], got 1\.1"),
        ((1.0, 0.5, 0.0), r"lam must be finite and > 0, got 0\.0"),
        ((1.0, 1e-3, 4.0), r"between 1e-300 and .*, got alpha 0\.001, lam 4\.0, t 1\.0"),
    ],
)
def test_bad_arguments(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)


@pytest.mark.parametrize("function", [relaxation_tail, impulse_response_tail])
def test_tails_need_positive_time_and_order_below_one(function):
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\), got 1\.0"):
        function(1.0, 1.0)
    with pytest.raises(ValueError, match=r"t must be finite and > 0, got 0\.0"):
        function(0.0, 0.5)


if __name__ == "__main__":
    for order in ALPHAS:
        for time in TIMES:
            values = [mp.nstr(reference(order, time, impulse=kind), 20) for kind in (False, True)]
            print(f"{order} {time:g}", *values, flush=True)
