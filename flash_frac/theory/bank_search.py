r"""Search for one bank of timescales that serves many orders α at once.

    minimise over τ   mean_α  min_c max_s |E_α(-s^α) - Σ_m c_m exp(-s/τ_m)|

by sequential linear programming. Near the current bank and its best coefficients, the sum is linear
in (c, log τ), so the best joint change within a trust region is one linear programme. The true
error, from `minimax.py`, determines whether the step is kept and how the region changes.

The result is a local optimum. Orders near 1 pull the nearest mode to τ = 1 and hold it there, and
the search does not move others across it: the start fixes how many modes lie below, so try starts
that differ in this.

Measured on one core: time and mean error over the paper's 90 orders, with the error of the stored
bank of the same kind in parentheses:

    optimise_bank(8)                                            3 s   2.11e-4  (2.35e-4)
    optimise_bank(16)                                          34 s   8.41e-8  (8.85e-8)
    optimise_bank(16, constraint="sum_le_1")                   45 s   2.88e-8  (4.63e-8)
    optimise_bank(16, window=(0.1, 6553.6))                    19 s   2.15e-5  (2.48e-5)
    optimise_bank(16, window=(0.01, 1e6), start=wide)          12 s   1.04e-4  (1.07e-4)

with wide = np.geomspace(5e-4, 5e6, 16), which has five modes below τ = 1. The default start of the
last call has four, and ends at 3.27e-4.

M is the number of modes, K the number of orders, N the number of grid points.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flash_frac.extras import require
from flash_frac.theory.minimax import (
    PAPER_WINDOW,
    Constraint,
    MinimaxFit,
    find_peaks,
    fit_on_grid,
    window_grid,
)
from flash_frac.theory.mittag_leffler import relaxation
from flash_frac.theory.validation import check_bank, check_count, check_order

SEARCH_ALPHAS = np.linspace(0.10, 0.99, 11)
"""Orders used in the search; a bank that is good on these is good on the paper's 90."""

_FIRST_RADIUS = 0.1  # initial radius of the trust region, in log τ
_LARGEST_RADIUS = 0.25
_SMALLEST_STEP = 1e-4
_SMALLEST_GAIN = 1e-4  # relative
_MIN_GAP = 1e-3  # between neighbours on the log τ axis
_NEIGHBOURS = (-12, -6, -3, 0, 3, 6, 12)  # grid points kept around each peak of the error


class OptimisedBank(NamedTuple):
    """Result of `optimise_bank`.

    Fields:
        tau: (M,) timescales.
        mean_error: mean minimax error over the orders of the search.
        errors: mean error at the start and after every accepted step.
    """

    tau: NDArray[np.float64]
    mean_error: float
    errors: tuple[float, ...]


class _Problem(NamedTuple):
    s: NDArray[np.float64]  # (N,)
    targets: NDArray[np.float64]  # (K, N)
    constraint: Constraint

    def fits(self, tau: NDArray[np.float64]) -> list[MinimaxFit]:
        return [fit_on_grid(self.s, target, tau, self.constraint) for target in self.targets]


def optimise_bank(
    num_modes: int,
    *,
    window: tuple[float, float] = PAPER_WINDOW,
    constraint: Literal["simplex", "sum_le_1"] = "simplex",
    alphas: ArrayLike = SEARCH_ALPHAS,
    start: ArrayLike | None = None,
    max_steps: int = 200,
    num_points: int = 1000,
) -> OptimisedBank:
    """Timescales that minimise the mean minimax error over `alphas`, by descent from `start`.

    Args:
        num_modes: M >= 2.
        window: (s_min, s_max), 0 < s_min < s_max, in units of s = λ^(1/α) t.
        constraint: "simplex" (c >= 0, Σc = 1) or "sum_le_1" (c >= 0, Σc <= 1).
        alphas: (K,) orders in (0, 1).
        start: (M,) increasing timescales; by default geometric from s_min / 10 to 20 s_max.
        max_steps: maximum number of steps, accepted or not.
        num_points: size N of the logarithmic grid over the window.

    Returns:
        OptimisedBank(tau, mean_error, errors).

    Example:
        >>> bank = optimise_bank(4, alphas=[0.3, 0.6], num_points=200)
        >>> bank.errors[-1] < bank.errors[0] / 2
        True
    """
    num_modes = check_count("num_modes", num_modes, minimum=2)
    if constraint not in ("simplex", "sum_le_1"):
        raise ValueError(f"constraint must be 'simplex' or 'sum_le_1', got {constraint!r}")
    s = window_grid(window, num_points)
    if start is None:
        start = np.geomspace(window[0] / 10, window[1] * 20, num_modes)
    tau = check_bank(start)
    if len(tau) != num_modes:
        raise ValueError(f"start must have num_modes = {num_modes} timescales, got {len(tau)}")
    orders = np.atleast_1d(check_order(alphas, allow_one=False))
    problem = _Problem(s, relaxation(s, orders[:, None]), constraint)
    fits = problem.fits(tau)
    errors = [_mean_error(fits)]
    radius = _FIRST_RADIUS
    for _ in range(max_steps):
        move, predicted = _best_move(problem, tau, fits, radius)
        trial = tau * np.exp(move)
        trial_fits = problem.fits(trial)
        gain, promise = errors[-1] - _mean_error(trial_fits), errors[-1] - predicted
        if gain > 0:
            tau, fits = trial, trial_fits
            errors.append(_mean_error(fits))
        radius = _next_radius(radius, gain / promise if promise > 0 else 0.0)
        if radius < _SMALLEST_STEP or 0 <= promise < _SMALLEST_GAIN * errors[-1]:
            break
    return OptimisedBank(tau, errors[-1], tuple(errors))


def _mean_error(fits: list[MinimaxFit]) -> float:
    return float(np.mean([fit.error for fit in fits]))


def _next_radius(radius: float, quality: float) -> float:
    """Grow the trust region after a step as good as predicted; shrink it after a poor one."""
    if quality < 0.25:
        return radius / 3
    return min(2 * radius, _LARGEST_RADIUS) if quality > 0.7 else radius


def _best_move(
    problem: _Problem, tau: NDArray[np.float64], fits: list[MinimaxFit], radius: float
) -> tuple[NDArray[np.float64], float]:
    """Change of log τ (M,) within ±radius with the least linearised mean error, and that error.

    Unknowns: M changes of log τ in units of `radius`; then, for each order, M changes of c and the
    new error, in units of its current error.
    """
    optimize = require("scipy.optimize", "theory", "flash_frac.theory.optimise_bank")
    sparse = require("scipy.sparse", "theory", "flash_frac.theory.optimise_bank")
    num_modes, num_orders = len(tau), len(fits)
    error = np.array([fit.error for fit in fits])
    rows, limits = _error_rows(problem, tau, fits, radius, sparse)
    # On the simplex the sums of c must not change; otherwise they may grow up to 1.
    one_sum = np.append(np.ones(num_modes), 0.0)[None]
    sums = sparse.hstack(
        [
            sparse.csr_array((num_orders, num_modes)),
            sparse.block_diag([sparse.coo_array(one_sum)] * num_orders),
        ]
    )
    simplex = problem.constraint == "simplex"
    if not simplex:
        room = [max(0.0, 1 - fit.c.sum()) / fit.error for fit in fits]
        rows, limits = sparse.vstack([rows, sums]), np.append(limits, room)
    lowest = [np.append(-fit.c / fit.error, 0.0) for fit in fits]
    bounds = np.full((num_modes + num_orders * (num_modes + 1), 2), np.inf)
    bounds[:, 0] = np.concatenate([-np.ones(num_modes), *lowest])
    bounds[:num_modes, 1] = 1.0
    cost = np.concatenate([np.zeros(num_modes), np.kron(error / error.sum(), one_sum[0] == 0)])
    solution = optimize.linprog(
        cost,
        A_ub=rows,
        b_ub=limits,
        A_eq=sums if simplex else None,
        b_eq=np.zeros(num_orders) if simplex else None,
        bounds=bounds,
        method="highs",
    )
    if solution.status != 0:
        # No usable step at this radius; an infinite prediction makes the caller shrink it.
        return np.zeros(num_modes), math.inf
    return radius * solution.x[:num_modes], float(solution.fun * error.mean())


def _error_rows(
    problem: _Problem,
    tau: NDArray[np.float64],
    fits: list[MinimaxFit],
    radius: float,
    sparse: ModuleType,
) -> tuple[object, NDArray[np.float64]]:
    """Sparse rows and limits: |linearised error| <= new error, and a minimum gap of neighbours."""
    num_modes = len(tau)
    tau_columns, c_blocks, limits = [], [], []
    for fit, target in zip(fits, problem.targets, strict=True):
        residual, by_c, by_log_tau = _linearise(problem.s, target, tau, fit)
        ones = np.ones((len(residual), 1))
        tau_columns.append(np.concatenate([by_log_tau, -by_log_tau]) * (radius / fit.error))
        c_blocks.append(sparse.coo_array(np.block([[by_c, -ones], [-by_c, -ones]])))
        limits.append(np.concatenate([residual, -residual]) / fit.error)
    pairs = np.eye(num_modes - 1, num_modes) - np.eye(num_modes - 1, num_modes, 1)
    tau_columns.append(radius * pairs)
    c_blocks.append(sparse.coo_array((num_modes - 1, 0)))
    limits.append(np.maximum(np.diff(np.log(tau)) - _MIN_GAP, 0))
    columns = sparse.csr_array(np.concatenate(tau_columns))
    return sparse.hstack([columns, sparse.block_diag(c_blocks)]), np.concatenate(limits)


def _linearise(
    s: NDArray[np.float64], target: NDArray[np.float64], tau: NDArray[np.float64], fit: MinimaxFit
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Residual (P,) and derivatives (P, M) of the sum by c and by log τ, near the peaks."""
    modes = np.exp(-s[:, None] / tau)
    residual = target - modes @ fit.c
    peaks = find_peaks(np.abs(residual))
    near = (peaks[:, None] + np.array(_NEIGHBOURS)).ravel()
    points = np.unique(np.clip(near, 0, len(s) - 1))
    modes = modes[points]
    return residual[points], modes, modes * fit.c * (s[points, None] / tau)
