"""Fits recover known laws."""

import numpy as np
import pytest

from flash_frac.inspect import fit_exponential, fit_power_law, log_spaced_lags
from flash_frac.inspect.fits import better

LAGS = log_spaced_lags(4096)[1:]


def test_a_power_law_is_found():
    response = 0.3 * LAGS**-0.6
    power, exponential = fit_power_law(LAGS, response), fit_exponential(LAGS, response)
    assert (power.amplitude, power.exponent) == pytest.approx((0.3, 0.6), rel=1e-9)
    assert power.rms_log < 1e-12 and better(power, exponential) == "power"
    assert (power.first, power.last) == (1, 4064)
    assert power.decades == pytest.approx(np.log10(4064))
    assert exponential.last / exponential.first < 10
    np.testing.assert_allclose(power(LAGS), response, rtol=1e-9)


def test_an_exponential_is_found():
    response = 2.0 * np.exp(-LAGS / 700)
    power, exponential = fit_power_law(LAGS, response), fit_exponential(LAGS, response)
    assert (exponential.amplitude, exponential.timescale) == pytest.approx((2, 700), rel=1e-9)
    assert better(power, exponential) == "exponential"
    assert (exponential.first, exponential.last) == (1, 4064)
    np.testing.assert_allclose(exponential(LAGS), response, rtol=1e-9)


def test_what_float32_would_lose_has_no_part_in_a_fit():
    response = np.where(LAGS < 500, LAGS**-2.0, 1e-30)
    power = fit_power_law(LAGS, response)
    assert power.exponent == pytest.approx(2, rel=1e-9)
    assert power.first == 1 and 400 < power.last < 500
    quick = fit_exponential(LAGS, np.exp(-LAGS / 3.0))
    assert quick.timescale == pytest.approx(3, rel=1e-9) and quick.last < 60


def test_the_range_is_the_longest_within_the_factor():
    response = LAGS**-0.5
    # Out of bounds at one lag, which cuts the range in two.
    cut = np.flatnonzero(LAGS >= 10)[0]
    response[cut] *= 2
    power = fit_power_law(LAGS, response, factor=1.25)
    assert (power.first, power.last) == (LAGS[cut + 1], 4064)
    wide = fit_power_law(LAGS, response, factor=3)
    assert (wide.first, wide.last) == (1, 4064)


def test_a_stretch_is_found_where_a_law_ends():
    # A power law up to 200 and a faster one behind it: one line fits neither.
    response = np.where(LAGS <= 200, LAGS**-0.5, 200**1.5 * LAGS**-2.0)
    power = fit_power_law(LAGS, response, factor=1.1)
    assert power.exponent > 0.6
    assert power.stretch.first == 1 and 200 <= power.stretch.last < 400
    assert power.stretch.exponent == pytest.approx(0.5, abs=0.05)
    inside = (power.stretch.first <= LAGS) & (power.stretch.last >= LAGS)
    law = power.stretch.amplitude * LAGS[inside] ** -power.stretch.exponent
    assert np.abs(np.log(law / response[inside])).max() <= np.log(1.1)
    assert fit_exponential(LAGS, response, factor=1.1).stretch.decades < power.stretch.decades
    whole = fit_exponential(LAGS, np.exp(-LAGS / 900)).stretch
    assert (whole.first, whole.last) == (1, 4064) and whole.exponent == pytest.approx(1 / 900)


def test_growth_and_nothing():
    growing = fit_exponential(LAGS, np.exp(LAGS / 1e3))
    assert growing.timescale is None and growing.exponent == pytest.approx(-1e-3)
    assert fit_power_law(LAGS, np.zeros(len(LAGS))) is None
    assert fit_power_law(LAGS, -np.ones(len(LAGS))) is None
    assert better(None, None) is None


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="omit lag 0"):
        fit_power_law(np.arange(5), np.ones(5))
    with pytest.raises(ValueError, match="factor must be above 1"):
        fit_power_law(LAGS, np.ones(len(LAGS)), factor=1.0)
