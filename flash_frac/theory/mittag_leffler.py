r"""Mittag-Leffler relaxation and its impulse response, to nearly full double precision.

For 0 < α <= 1 and λ > 0, with s = λ^(1/α) t,

    relaxation        E_α(-λ t^α)                          = E(s)
    impulse response  t^(α-1) E_{α,α}(-λ t^α) = -E'(t) / λ = λ^(1/α - 1) G(s)

Both are mixtures of exponentials over log rates v (`spectrum.py` has the same density over
timescales):

    E(s) = ∫ φ(v) exp(-s e^v) dv,   G(s) = ∫ φ(v) e^v exp(-s e^v) dv,
    φ(v) = sin(πα) / (2π (cosh(αv) + cos(πα))).

The trapezoidal rule in v converges like exp(-π²/h), because exp(-s e^v) is bounded for
|Im v| < π/2; every term is positive, so nothing cancels. For α > 2/3 the poles of φ at ±iθ,
θ = π(1-α)/α, enter that strip, and their residue is added in closed form. Nodes are half a step off
v = 0, which keeps both parts finite as α -> 1, where the pole term alone becomes exp(-s). Measured
relative error: below 1e-15 for s in [1e-8, 1e8] and α from 0.001 to 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flash_frac.theory.spectrum import log_density
from flash_frac.theory.validation import check_order, check_positive, check_time

_STEP = 3 / 16  # exact in binary, so the nodes are exact too; error exp(-π²/h) = 1e-23
_LOG_LEFT = -37.0  # exp(-s e^v) is 1 in float64 for log s + v below this
_LOG_RIGHT = math.log(50.0)  # and below 2e-22 for log s + v above this
_SMALLEST = 1e-300  # smallest s, so that no rate or product overflows
_BLOCK = 1 << 19  # entries in the largest temporary array (4 MiB of float64)


def relaxation(t: ArrayLike, alpha: ArrayLike, lam: ArrayLike = 1.0) -> NDArray[np.float64]:
    """E_α(-λ t^α), the solution of the fractional relaxation equation with h(0) = 1.

    Args:
        t: times >= 0, any shape.
        alpha: order in (0, 1], broadcast against `t`.
        lam: rate λ > 0, broadcast against `t`.

    Returns:
        float64 array of the broadcast shape, values in [0, 1]; 1 at t = 0, and exp(-λ t) for α = 1.

    Example:
        >>> float(relaxation(1.0, 0.5).round(12))
        0.427583576156
    """
    t, alpha, lam = _broadcast(t, alpha, lam)
    out = np.array(np.exp(-lam * t))
    fractional = (alpha < 1) & (t > 0)
    scale = _rate_scale(t, alpha, lam, fractional)
    out[fractional] = _spectral_sum(scale * t[fractional], alpha[fractional], impulse=False)
    return out


def impulse_response(t: ArrayLike, alpha: ArrayLike, lam: ArrayLike = 1.0) -> NDArray[np.float64]:
    """t^(α-1) E_{α,α}(-λ t^α), the response of the relaxation equation to a unit impulse.

    Args:
        t: times >= 0, any shape.
        alpha: order in (0, 1], broadcast against `t`.
        lam: rate λ > 0, broadcast against `t`.

    Returns:
        float64 array of the broadcast shape; at t = 0 it is inf for α < 1 (an integrable
        singularity) and 1 for α = 1.

    Example:
        >>> float(impulse_response(1.0, 0.5).round(12))
        0.136606007392
    """
    t, alpha, lam = _broadcast(t, alpha, lam)
    out = np.array(np.where((t == 0) & (alpha < 1), np.inf, np.exp(-lam * t)))
    fractional = (alpha < 1) & (t > 0)
    scale = _rate_scale(t, alpha, lam, fractional)
    values = _spectral_sum(scale * t[fractional], alpha[fractional], impulse=True)
    out[fractional] = values * (scale / lam[fractional])
    return out


def relaxation_tail(t: ArrayLike, alpha: ArrayLike, lam: ArrayLike = 1.0) -> NDArray[np.float64]:
    """t^(-α) / (λ Γ(1-α)), the leading term of `relaxation` as t -> ∞, for 0 < α < 1.

    Args:
        t: times > 0, any shape.
        alpha: order in (0, 1), broadcast against `t`.
        lam: rate λ > 0, broadcast against `t`.

    Returns:
        float64 array of the broadcast shape.

    Example:
        >>> float(relaxation_tail(4.0, 0.5).round(12))
        0.282094791774
    """
    t, alpha, lam = _tail_arguments(t, alpha, lam)
    return t**-alpha / (lam * _gamma(1 - alpha))


def impulse_response_tail(
    t: ArrayLike, alpha: ArrayLike, lam: ArrayLike = 1.0
) -> NDArray[np.float64]:
    """α t^(-α-1) / (λ² Γ(1-α)), the leading term of `impulse_response` as t -> ∞, for 0 < α < 1.

    Args:
        t: times > 0, any shape.
        alpha: order in (0, 1), broadcast against `t`.
        lam: rate λ > 0, broadcast against `t`.

    Returns:
        float64 array of the broadcast shape.

    Example:
        >>> float(impulse_response_tail(4.0, 0.5).round(12))
        0.035261848972
    """
    t, alpha, lam = _tail_arguments(t, alpha, lam)
    return alpha * t ** (-alpha - 1) / (lam**2 * _gamma(1 - alpha))


def _broadcast(t: ArrayLike, alpha: ArrayLike, lam: ArrayLike) -> list[NDArray[np.float64]]:
    arrays = (check_time(t), check_order(alpha), check_positive("lam", lam))
    return [np.asarray(array) for array in np.broadcast_arrays(*arrays)]


def _tail_arguments(t: ArrayLike, alpha: ArrayLike, lam: ArrayLike) -> list[NDArray[np.float64]]:
    arrays = (
        check_positive("t", t),
        check_order(alpha, allow_one=False),
        check_positive("lam", lam),
    )
    return [np.asarray(array) for array in np.broadcast_arrays(*arrays)]


def _gamma(x: NDArray[np.float64]) -> NDArray[np.float64]:
    values, inverse = np.unique(x, return_inverse=True)
    return np.array([math.gamma(value) for value in values])[inverse].reshape(x.shape)


def _rate_scale(
    t: NDArray[np.float64],
    alpha: NDArray[np.float64],
    lam: NDArray[np.float64],
    where: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """λ^(1/α) at the selected points; raises ValueError if s = λ^(1/α) t is near overflow."""
    with np.errstate(over="ignore", under="ignore"):
        scale = lam[where] ** (1 / alpha[where])
        s = scale * t[where]
    wrong = ~((s >= _SMALLEST) & (s <= 1 / _SMALLEST))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"lam ** (1 / alpha) * t must lie between {_SMALLEST} and {1 / _SMALLEST}, got "
            f"alpha {alpha[where][at]}, lam {lam[where][at]}, t {t[where][at]}"
        )
    return scale


def _spectral_sum(
    s: NDArray[np.float64], alpha: NDArray[np.float64], *, impulse: bool
) -> NDArray[np.float64]:
    """E(s) or G(s) for flat arrays s > 0 and 0 < α < 1, both (N,)."""
    if s.size == 0:
        return np.empty(0)
    # The first node stays left of the peak of φ, because `_left_mass` needs a smooth function.
    first = math.floor((_LOG_LEFT - max(0.0, math.log(s.max()))) / _STEP)
    last = math.ceil((_LOG_RIGHT - math.log(s.min())) / _STEP)
    log_rate = (np.arange(first, last, dtype=np.float64) + 0.5) * _STEP
    alphas, alpha_index = np.unique(alpha, return_inverse=True)
    times, time_index = np.unique(s, return_inverse=True)
    if len(alphas) > 1 and len(alphas) * len(times) <= 2 * s.size:
        # The points form a grid, so each exponential is shared by all α.
        table = _sum_on_grid(times, alphas, log_rate, impulse)
        total = table[time_index, alpha_index]
    else:
        total = _sum_pointwise(s, alphas, alpha_index, log_rate, impulse)
    return total + _pole_term(s, alpha, impulse)


def _sum_on_grid(
    s: NDArray[np.float64],
    alphas: NDArray[np.float64],
    log_rate: NDArray[np.float64],
    impulse: bool,
) -> NDArray[np.float64]:
    """Trapezoidal sums on the grid s (N,) x alphas (K,), (N, K)."""
    rate = np.exp(log_rate)
    rows = max(1, _BLOCK // len(rate))
    out = np.empty((len(s), len(alphas)))
    for column in range(0, len(alphas), rows):
        weight, offset = _weights(log_rate, alphas[column : column + rows], impulse)
        for row in range(0, len(s), rows):
            decay = np.exp(-s[row : row + rows, None] * rate)
            out[row : row + rows, column : column + rows] = decay @ weight.T + offset
    return out


def _sum_pointwise(
    s: NDArray[np.float64],
    alphas: NDArray[np.float64],
    alpha_index: NDArray[np.intp],
    log_rate: NDArray[np.float64],
    impulse: bool,
) -> NDArray[np.float64]:
    """Trapezoidal sums at the points (s, alphas[alpha_index]), (N,)."""
    rate = np.exp(log_rate)
    rows = max(1, _BLOCK // len(rate))
    out = np.empty(len(s))
    order = np.argsort(alpha_index, kind="stable")  # so that a block holds few values of α
    for start in range(0, len(s), rows):
        block = order[start : start + rows]
        used, index = np.unique(alpha_index[block], return_inverse=True)
        weight, offset = _weights(log_rate, alphas[used], impulse)
        decay = np.exp(-s[block, None] * rate)
        if len(used) == 1:
            out[block] = decay @ weight[0] + offset[0]
        else:
            out[block] = np.einsum("nk,nk->n", decay, weight[index]) + offset[index]
    return out


def _weights(
    log_rate: NDArray[np.float64], alpha: NDArray[np.float64], impulse: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights (K, nodes) of the trapezoidal rule, and the sum (K,) of those left of the nodes."""
    weight = _STEP * log_density(log_rate, alpha[:, None])
    if impulse:
        return weight * np.exp(log_rate), np.zeros(len(alpha))
    return weight, _left_mass(log_rate[0] - _STEP / 2, alpha)


def _left_mass(edge: float, alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of the trapezoidal weights at all nodes left of `edge`, by the Euler-Maclaurin formula.

    The integral of φ up to `edge` is Im log(1 + e^z) / (πα) at z = α·edge + iπα; the corrections
    are derivatives of φ = Im σ(z) / π, σ the logistic function. The first term left out is below
    4e-16 of E for every α.
    """
    size, angle = np.exp(alpha * edge), np.pi * alpha
    integral = np.arctan2(size * np.sin(angle), 1 + size * np.cos(angle)) / angle
    e = size * np.exp(1j * angle)
    sigma = e / (1 + e)
    slope = sigma * (1 - sigma)
    first = alpha / np.pi * np.imag(slope)
    third = alpha**3 / np.pi * np.imag(slope * (1 - 6 * slope))
    return integral - _STEP**2 / 24 * first + 7 * _STEP**4 / 5760 * third


def _pole_term(
    s: NDArray[np.float64], alpha: NDArray[np.float64], impulse: bool
) -> NDArray[np.float64]:
    """Correction of the trapezoidal rule for the poles of φ at ±iθ, θ = π(1-α)/α < π/2."""
    theta = np.pi * (1 - alpha) / alpha
    inside = theta < np.pi / 2
    theta = np.where(inside, theta, 0.0)
    q = np.exp(-2 * np.pi * theta / _STEP)
    pole = np.exp(1j * theta)
    value = np.exp(-s * pole)
    if impulse:
        value = value * pole
    return np.where(inside, 2 / alpha * q / (1 + q) * np.real(value), 0.0)
