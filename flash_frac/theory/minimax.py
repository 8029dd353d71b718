r"""The best coefficients for a bank of timescales.

    minimise over c   max_s |E_α(-s^α) - Σ_m c_m exp(-s/τ_m)|,   s = λ^(1/α) t in a window,

under the paper's constraint (c on the simplex) or a weaker one, by linear programming. M is the
number of modes, N the number of grid points.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flash_frac.extras import require
from flash_frac.theory.mittag_leffler import relaxation
from flash_frac.theory.validation import check_bank, check_count, check_order

Constraint = Literal["simplex", "sum_le_1", "free"]

PAPER_WINDOW = (4.0, 6553.6)
"""The paper's window of s: from 4 tau_min to 65536 tokens of step 0.1."""

PAPER_ALPHAS = np.arange(10, 100) / 100
PAPER_ALPHAS.setflags(write=False)
"""The paper's 90 orders, 0.10 to 0.99."""

_MAX_PROGRAMMES = 30
_TOLERANCE = 1e-5  # relative
_ROUNDING = 1e-15  # smaller errors are rounding of the exponentials
_SOLVERS = (("highs-ds", 1e-9), ("highs-ds", 1e-7), ("highs-ipm", 1e-7))


class MinimaxFit(NamedTuple):
    """Best coefficients `c` (M,) of a bank, and `error`, their largest error on the grid."""

    c: NDArray[np.float64]
    error: float


def minimax_fit(
    tau: ArrayLike,
    alpha: float,
    *,
    window: tuple[float, float] = PAPER_WINDOW,
    constraint: Constraint = "simplex",
    num_points: int = 2000,
) -> MinimaxFit:
    """Coefficients with the least max_s |E_α(-s^α) - Σ_m c_m exp(-s/τ_m)| on a window.

    This solves a linear programme (HiGHS) on a few points of a logarithmic grid, and adds the worst
    points of the whole grid until none is worse than the optimum: the result is the optimum on the
    whole grid. Each programme is posed for the residual of the last, in its own scale, so errors
    far below the solver's tolerance are resolved.

    Args:
        tau: (M,) strictly increasing timescales > 0.
        alpha: order in (0, 1].
        window: (s_min, s_max), 0 < s_min < s_max.
        constraint: "simplex" (c >= 0, Σc = 1), "sum_le_1" (c >= 0, Σc <= 1) or "free" (none).
        num_points: size of the grid, including the ends.

    Returns:
        MinimaxFit(c, error); c meets the constraint up to rounding, and `error` is its error on
        the grid, within a relative 1e-5 of the optimum. Free fits are ill-conditioned: Σ|c|
        reaches 1e4 with 16 geometric modes, and with 32 the error is up to 0.3% above the optimum.

    Example:
        >>> from flash_frac.theory.banks import geometric_bank
        >>> round(minimax_fit(geometric_bank(8), 0.5).error, 5)
        0.00096
    """
    tau = check_bank(tau)
    s = window_grid(window, num_points)
    return fit_on_grid(s, relaxation(s, check_order(alpha)), tau, constraint)


def mean_minimax_error(
    tau: ArrayLike,
    alphas: ArrayLike = PAPER_ALPHAS,
    *,
    window: tuple[float, float] = PAPER_WINDOW,
    constraint: Constraint = "simplex",
    num_points: int = 2000,
) -> float:
    """Mean over `alphas` of the error of `minimax_fit`: the number in the paper's table of banks.

    Args:
        tau: (M,) strictly increasing timescales > 0.
        alphas: (K,) orders in (0, 1]; by default the paper's 90.
        window, constraint, num_points: as in `minimax_fit`.

    Returns:
        The mean error, a float.

    Example:
        >>> from flash_frac.theory.banks import geometric_bank
        >>> round(mean_minimax_error(geometric_bank(8), [0.3, 0.5]), 5)
        0.00126
    """
    tau = check_bank(tau)
    s = window_grid(window, num_points)
    targets = relaxation(s, np.atleast_1d(check_order(alphas))[:, None])
    return float(np.mean([fit_on_grid(s, target, tau, constraint).error for target in targets]))


def window_grid(window: tuple[float, float], num_points: int) -> NDArray[np.float64]:
    """`num_points` logarithmically spaced times over a window, including its ends."""
    low, high = window
    if not 0 < low < high < math.inf:
        raise ValueError(f"window must satisfy 0 < s_min < s_max < inf, got {window}")
    return np.geomspace(low, high, check_count("num_points", num_points, minimum=2))


def fit_on_grid(
    s: NDArray[np.float64],
    target: NDArray[np.float64],
    tau: NDArray[np.float64],
    constraint: Constraint,
) -> MinimaxFit:
    """Like `minimax_fit`, for a target (N,) given at increasing times s (N,)."""
    if constraint not in get_args(Constraint):
        raise ValueError(f"constraint must be one of {get_args(Constraint)}, got {constraint!r}")
    modes = np.exp(-s[:, None] / tau)
    basis, to_c = _basis(modes, constraint)
    c = np.full(len(tau), 1 / len(tau))
    active = np.linspace(0, len(s) - 1, min(len(s), 6 * len(tau))).round().astype(int)
    residual = target - modes @ c
    best = MinimaxFit(c, float(np.max(np.abs(residual))))
    for _ in range(_MAX_PROGRAMMES):
        scale = float(np.max(np.abs(residual)))
        if scale < _ROUNDING:
            break
        step, level = _solve(basis[active], residual[active], c, scale, constraint)
        c = _meet(c + scale * (to_c @ step), constraint)
        residual = target - modes @ c
        error = np.abs(residual)
        if error.max() < best.error:
            best = MinimaxFit(c, float(error.max()))
        # level * scale is a lower bound of the optimum. The programme resolves it only if it was
        # posed in its own scale.
        if error.max() <= level * scale * (1 + _TOLERANCE) and level > 0.5:
            break
        peaks = find_peaks(error)
        active = np.union1d(active, peaks[error[peaks] > level * scale])
    return best


def _basis(
    modes: NDArray[np.float64], constraint: Constraint
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Columns (N, R) to combine, and the map (M, R) from their weights to the coefficients.

    Bounds on c need the modes themselves. Without bounds, orthonormal columns span the same sums
    and keep the programme solvable: modes of a fine bank are nearly dependent.
    """
    if constraint != "free":
        return modes, np.eye(modes.shape[1])
    left, singular, right = np.linalg.svd(modes, full_matrices=False)
    keep = singular > singular[0] * np.finfo(np.float64).eps
    size = math.sqrt(len(modes))
    return left[:, keep] * size, right[keep].T / singular[keep] * size


def _solve(
    basis: NDArray[np.float64],
    residual: NDArray[np.float64],
    c: NDArray[np.float64],
    scale: float,
    constraint: Constraint,
) -> tuple[NDArray[np.float64], float]:
    """Change x of the weights with the least max |residual - basis @ x|, and that over `scale`."""
    optimize = require("scipy.optimize", "theory", "flash_frac.theory.minimax_fit")
    num_points, num_weights = basis.shape
    ones = np.ones((num_points, 1))
    rows = np.block([[basis, -ones], [-basis, -ones]])
    limits = np.concatenate([residual, -residual]) / scale
    lowest = np.full(num_weights, -np.inf) if constraint == "free" else -c / scale
    sum_row = np.append(np.ones(num_weights), 0.0)
    equality_rows, equality_limits = None, None
    if constraint == "simplex":
        equality_rows, equality_limits = sum_row[None], [(1 - c.sum()) / scale]
    elif constraint == "sum_le_1":
        rows, limits = np.vstack([rows, sum_row]), np.append(limits, (1 - c.sum()) / scale)
    message = ""
    # With 24 modes or more a simplex run can fail; a looser tolerance costs digits that the next
    # round restores.
    for method, tolerance in _SOLVERS:
        solution = optimize.linprog(
            np.append(np.zeros(num_weights), 1.0),
            A_ub=rows,
            b_ub=limits,
            A_eq=equality_rows,
            b_eq=equality_limits,
            bounds=np.stack([np.append(lowest, 0.0), np.full(num_weights + 1, np.inf)], axis=1),
            method=method,
            options={
                "primal_feasibility_tolerance": tolerance,
                "dual_feasibility_tolerance": tolerance,
            },
        )
        if solution.status == 0:
            return solution.x[:-1], float(solution.x[-1])
        message = solution.message
    raise RuntimeError(f"the linear programme of minimax_fit failed: {message}")


def _meet(c: NDArray[np.float64], constraint: Constraint) -> NDArray[np.float64]:
    """Project c onto the constraint, which rounding may have violated."""
    if constraint == "free":
        return c
    c = np.maximum(c, 0)
    return c / c.sum() if constraint == "simplex" else c / max(1.0, c.sum())


def find_peaks(error: NDArray[np.float64]) -> NDArray[np.intp]:
    """Indices of the local maxima of `error` (N,), including its ends."""
    padded = np.concatenate([[-np.inf], error, [-np.inf]])
    return np.flatnonzero((error >= padded[:-2]) & (error >= padded[2:]))
