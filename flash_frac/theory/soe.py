r"""Sums of exponentials that approximate fractional relaxation: the theorem's, and their errors.

    E_α(-λ t^α)              ≈ Σ_m c_m exp(-t/τ_m)
    t^(α-1) E_{α,α}(-λ t^α)  ≈ Σ_m d_m exp(-t/τ_m),     d_m = c_m / (λ τ_m)

`midpoint_coefficients` is the construction in the proof of the paper's theorem on finite sums;
`minimax.py` has the best coefficients of a given bank. M is the number of modes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flash_frac.theory.mittag_leffler import relaxation
from flash_frac.theory.spectrum import log_density
from flash_frac.theory.validation import check_bank, check_count, check_order, check_positive


class SoeCoefficients(NamedTuple):
    """A bank with its coefficients: `tau`, `c`, `d`, each (M,)."""

    tau: NDArray[np.float64]
    c: NDArray[np.float64]
    d: NDArray[np.float64]


def balanced_range(alpha: float, num_modes: int, lam: float = 1.0) -> tuple[float, float]:
    """Range of log τ that balances truncation against step error in the midpoint rule on [0, T].

    The step is h = sqrt(4πd / (αM)) with d = min(π/2, π(1-α)/α), the half-width of the strip in
    which the integrand is analytic; the range is ±Mh/2 around -log(λ)/α. The largest error then
    falls like exp(-sqrt(πdαM)).

    Args:
        alpha: order in (0, 1).
        num_modes: M >= 1.
        lam: rate λ > 0.

    Returns:
        (log_tau_min, log_tau_max), the edges A and B of `midpoint_coefficients`.

    Example:
        >>> [round(edge, 3) for edge in balanced_range(0.5, 16)]
        [-12.566, 12.566]
    """
    alpha = float(check_order(alpha, allow_one=False))
    num_modes = check_count("num_modes", num_modes)
    lam = float(check_positive("lam", lam))
    half_width = min(math.pi / 2, math.pi * (1 - alpha) / alpha)
    half_range = num_modes / 2 * math.sqrt(4 * math.pi * half_width / (alpha * num_modes))
    centre = -math.log(lam) / alpha
    return centre - half_range, centre + half_range


def midpoint_coefficients(
    alpha: float, lam: float, log_tau_min: float, log_tau_max: float, num_modes: int
) -> SoeCoefficients:
    """The theorem's sum: c_m = h τ_m R(τ_m), d_m = h τ_m H(τ_m), at midpoints of steps h in log τ.

    Args:
        alpha: order in (0, 1).
        lam: rate λ > 0.
        log_tau_min: lower edge A of the range of log τ.
        log_tau_max: upper edge B > A.
        num_modes: M >= 1.

    Returns:
        SoeCoefficients(tau, c, d), each (M,) and positive; τ is geometric, d/c = 1/(λτ).

    Example:
        >>> soe = midpoint_coefficients(0.5, 1.0, -12.566, 12.566, 16)
        >>> float(evaluate_bank(1.0, soe.tau, soe.c).round(2))  # E(1) = 0.4276
        0.43
    """
    alpha = float(check_order(alpha, allow_one=False))
    lam = float(check_positive("lam", lam))
    num_modes = check_count("num_modes", num_modes)
    if not log_tau_min < log_tau_max:
        raise ValueError(f"log_tau_max must be > log_tau_min = {log_tau_min}, got {log_tau_max}")
    step = (log_tau_max - log_tau_min) / num_modes
    log_tau = log_tau_min + (np.arange(num_modes) + 0.5) * step
    tau = np.exp(log_tau)
    c = step * log_density(log_tau + math.log(lam) / alpha, alpha)
    return SoeCoefficients(tau, c, c / (lam * tau))


def evaluate_bank(t: ArrayLike, tau: ArrayLike, c: ArrayLike) -> NDArray[np.float64]:
    """Σ_m c_m exp(-t/τ_m).

    Args:
        t: times, any shape (...).
        tau: (M,) timescales > 0.
        c: (M,) coefficients.

    Returns:
        float64 array of the shape of `t`.

    Example:
        >>> float(evaluate_bank(0.0, [1.0, 10.0], [0.25, 0.5]))
        0.75
    """
    tau, c = check_bank(tau), np.asarray(c, dtype=np.float64)
    if c.shape != tau.shape:
        raise ValueError(f"c must have the shape of tau, {tau.shape}, got {c.shape}")
    return np.exp(-np.asarray(t, dtype=np.float64)[..., None] / tau) @ c


def sup_error(t: ArrayLike, tau: ArrayLike, c: ArrayLike, alpha: float, lam: float = 1.0) -> float:
    """Largest |E_α(-λ t^α) - Σ_m c_m exp(-t/τ_m)| on the times `t`.

    Args:
        t: times >= 0, any shape.
        tau: (M,) timescales > 0.
        c: (M,) coefficients.
        alpha: order in (0, 1].
        lam: rate λ > 0.

    Returns:
        The error, a float.

    Example:
        >>> sup_error([0.0, 1.0], [1.0], [1.0], alpha=1.0)
        0.0
    """
    return float(np.max(np.abs(relaxation(t, alpha, lam) - evaluate_bank(t, tau, c))))


def kernel_l1_error(
    t: ArrayLike, tau: ArrayLike, c: ArrayLike, alpha: float, lam: float = 1.0
) -> float:
    """∫ |t^(α-1) E_{α,α}(-λ t^α) - Σ_m d_m exp(-t/τ_m)| dt with d_m = c_m / (λ τ_m).

    Each kernel is -1/λ times the derivative of the function that `sup_error` compares, so the
    integral is the total variation of that error divided by λ. On a grid it is a sum of
    differences, without quadrature near the singularity.

    Args:
        t: (N,) increasing times that resolve the turning points of the error; the integral runs
            from t[0] to t[-1].
        tau: (M,) timescales > 0.
        c: (M,) coefficients.
        alpha: order in (0, 1].
        lam: rate λ > 0.

    Returns:
        The integral, a float; it increases as the grid is refined.

    Example:
        >>> kernel_l1_error([0.0, 1.0], [1.0], [1.0], alpha=1.0)
        0.0
    """
    error = relaxation(t, alpha, lam) - evaluate_bank(t, tau, c)
    return float(np.sum(np.abs(np.diff(error)))) / lam
