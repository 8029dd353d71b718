r"""The spectrum of timescales behind fractional relaxation (the paper's diffusive representation).

    E_α(-λ t^α)              = ∫ exp(-t/τ) R(τ) dτ
    t^(α-1) E_{α,α}(-λ t^α)  = ∫ exp(-t/τ) H(τ) dτ,     H(τ) = R(τ) / (λ τ)

R is a probability density. On the logarithmic axis v = log(λ^(1/α) τ) it becomes the even function

    φ(v) = τ R(τ) = sin(πα) / (2π (cosh(αv) + cos(πα))),

so exactly half of the mass lies below τ = λ^(-1/α), for every α. M is the number of modes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flash_frac.theory.validation import check_bank, check_order, check_positive


def log_density(v: ArrayLike, alpha: ArrayLike) -> NDArray[np.float64]:
    """φ(v) = sin(πα) / (2π (cosh(αv) + cos(πα))), the density of log τ for λ = 1.

    Args:
        v: log τ (or log rate: φ is even), any shape.
        alpha: order in (0, 1), broadcast against `v`.

    Returns:
        float64 array of the broadcast shape; it never overflows and stays accurate as α -> 1.

    Example:
        >>> float(log_density(0.0, 0.5).round(12))
        0.159154943092
    """
    alpha = check_order(alpha, allow_one=False)
    x = np.abs(alpha * np.asarray(v, dtype=np.float64))
    y = np.exp(-x)
    # 2y (cosh x + cos πα) = (1 - y)² + 4y sin²(π(1-α)/2): a sum of squares instead of a difference
    # near x = 0, α = 1.
    denominator = np.expm1(-x) ** 2 + 4 * y * np.sin(np.pi * (1 - alpha) / 2) ** 2
    return _sin_pi(alpha) / np.pi * y / denominator


def relaxation_density(
    tau: ArrayLike, alpha: ArrayLike, lam: ArrayLike = 1.0
) -> NDArray[np.float64]:
    """R(τ) = λ τ^(α-1) sin(πα) / (π (λ² τ^(2α) + 2 λ τ^α cos(πα) + 1)), which integrates to 1.

    Args:
        tau: timescales > 0, any shape.
        alpha: order in (0, 1), broadcast against `tau`.
        lam: rate λ > 0, broadcast against `tau`.

    Returns:
        float64 array of the broadcast shape.

    Example:
        >>> float(relaxation_density(1.0, 0.5).round(12))
        0.159154943092
    """
    tau, lam = check_positive("tau", tau), check_positive("lam", lam)
    alpha = check_order(alpha, allow_one=False)
    return log_density(np.log(tau) + np.log(lam) / alpha, alpha) / tau


def impulse_density(tau: ArrayLike, alpha: ArrayLike, lam: ArrayLike = 1.0) -> NDArray[np.float64]:
    """H(τ) = R(τ) / (λ τ), the spectrum of the impulse response.

    Args:
        tau: timescales > 0, any shape.
        alpha: order in (0, 1), broadcast against `tau`.
        lam: rate λ > 0, broadcast against `tau`.

    Returns:
        float64 array of the broadcast shape; inf where the value exceeds float64.

    Example:
        >>> float(impulse_density(1.0, 0.5, 2.0).round(12))
        0.063661977237
    """
    tau, lam = check_positive("tau", tau), check_positive("lam", lam)
    with np.errstate(over="ignore"):
        return relaxation_density(tau, alpha, lam) / lam / tau


def spectral_mass(log_tau: ArrayLike, alpha: ArrayLike) -> NDArray[np.float64]:
    """C(x) = 1/2 + atan(tan(πα/2) tanh(αx/2)) / (πα), the mass below τ = e^x for λ = 1.

    Args:
        log_tau: x = log τ, any shape; ±inf allowed.
        alpha: order in (0, 1], broadcast against `log_tau`. At α = 1 all mass is at τ = 1.

    Returns:
        float64 array of the broadcast shape, values in [0, 1], relatively accurate as x -> -∞.
        The mass above τ is `spectral_mass(-log_tau, alpha)`, by symmetry.

    Example:
        >>> float(spectral_mass(0.0, 0.3))
        0.5
    """
    alpha = check_order(alpha)
    x = np.asarray(log_tau, dtype=np.float64)
    # C(x) = arg(1 + e^(αx + iπα)) / (πα). For x > 0 take 1 - C(-x), so that exp cannot overflow.
    z = -np.abs(alpha * x)
    y = np.exp(z)
    real = -np.expm1(z) + 2 * y * np.sin(np.pi * (1 - alpha) / 2) ** 2
    # At α = 1 the argument is 0/0 on x = 0 only, where the mass is one half by symmetry.
    below = np.where(x == 0, 0.5, np.arctan2(_sin_pi(alpha) * y, real) / (np.pi * alpha))
    return np.where(x > 0, 1 - below, below)


def bin_masses(tau: ArrayLike, alpha: ArrayLike) -> NDArray[np.float64]:
    """Mass of the spectrum in the bin of each mode: C(x_{m+1/2}) - C(x_{m-1/2}).

    Bins meet halfway between neighbours on the log τ axis; the first and last are open, so the
    masses sum to 1. They are the weights of a bank that follows E_α(-s^α) without a fit: the
    `exact` prior of the layer.

    Args:
        tau: (M,) strictly increasing timescales > 0, geometric or not.
        alpha: order in (0, 1], shape (...).

    Returns:
        (..., M) float64 array, non-negative.

    Example:
        >>> bin_masses([1.0, 10.0, 100.0], 0.5).round(4).tolist()
        [0.6739, 0.2141, 0.112]
    """
    log_tau = np.log(check_bank(tau))
    alpha = check_order(alpha)[..., None]
    edges = (log_tau[1:] + log_tau[:-1]) / 2
    lower = np.append(-np.inf, edges)
    upper = np.append(edges, np.inf)
    # Slow bins subtract the masses above their edges, which are small, so no digits are lost.
    rising = spectral_mass(upper, alpha) - spectral_mass(lower, alpha)
    falling = spectral_mass(-lower, alpha) - spectral_mass(-upper, alpha)
    return np.where(lower > 0, falling, rising)


def _sin_pi(alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    """sin(πα) with full relative accuracy near α = 1, and exactly 0 there."""
    return np.sin(np.pi * np.minimum(alpha, 1 - alpha))
