"""The search for shared banks."""

import numpy as np
import pytest

from flash_frac.theory import bank_info, mean_minimax_error, optimise_bank


def test_reaches_the_stored_bank_from_a_geometric_start():
    stored = bank_info("W1_M8_simplex")
    found = optimise_bank(8)
    assert found.errors[0] > 1.1e-3
    # The search sees 11 orders; the comparison is on the paper's 90.
    assert mean_minimax_error(found.tau) < stored.mean_error
    assert np.all(np.diff(found.tau) > 0)


def test_every_kept_step_goes_down():
    found = optimise_bank(4, alphas=[0.3, 0.6, 0.9], num_points=300, max_steps=12)
    assert len(found.errors) > 4
    assert np.all(np.diff(found.errors) < 0)
    assert found.mean_error == found.errors[-1]
    want = mean_minimax_error(found.tau, [0.3, 0.6, 0.9], num_points=300)
    assert found.mean_error == pytest.approx(want, rel=1e-5)


def test_sum_at_most_one_is_no_worse_from_the_same_bank():
    simplex = optimise_bank(5, alphas=[0.3, 0.7], num_points=300)
    below = optimise_bank(
        5, alphas=[0.3, 0.7], num_points=300, constraint="sum_le_1", start=simplex.tau
    )
    assert below.mean_error < simplex.mean_error / 1.5


def test_an_optimised_bank_stays_where_it_is():
    first = optimise_bank(4, alphas=[0.5], num_points=400)
    again = optimise_bank(4, alphas=[0.5], num_points=400, start=first.tau)
    assert again.mean_error == pytest.approx(first.mean_error, rel=1e-2)


def test_arguments():
    with pytest.raises(ValueError, match="num_modes must be an integer >= 2, got 1"):
        optimise_bank(1)
    with pytest.raises(ValueError, match="start must have num_modes = 3 timescales, got 2"):
        optimise_bank(3, start=[1.0, 2.0])
    with pytest.raises(ValueError, match="constraint must be 'simplex' or 'sum_le_1', got 'free'"):
        optimise_bank(3, constraint="free")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="window must satisfy"):
        optimise_bank(3, window=(0.0, 1.0))
