r"""The fractional equation in time, and the bank of ordinary equations that approximates it.

    fractional   D^α h = -λ h + u                                   (Caputo derivative, 0 < α <= 1)
    bank         s_m' = -s_m / τ_m + u / (λ τ_m),  s_m(0) = h(0),   h ≈ Σ_m c_m s_m

All three functions return h at t_0 = 0, t_1, ..., t_N, shape (N+1,), for an input u (N,) whose
entry u[k] holds on the step from t_k to t_{k+1}. M is the number of modes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flash_frac.theory.mittag_leffler import relaxation
from flash_frac.theory.validation import check_bank, check_order, check_positive


def simulate_bank(
    u: ArrayLike,
    dt: ArrayLike,
    tau: ArrayLike,
    c: ArrayLike,
    *,
    lam: float = 1.0,
    h0: float = 0.0,
) -> NDArray[np.float64]:
    """Readout Σ_m c_m s_m of the bank, exact for a held input (zero-order hold).

    Over a step, s_m <- ρ s_m + (1-ρ) u/λ with ρ = exp(-dt/τ_m), computed as
    s_m + (1-ρ) (u/λ - s_m), which keeps slow modes accurate.

    Args:
        u: (N,) input, u[k] on [t_k, t_{k+1}).
        dt: step > 0, a number or (N,).
        tau: (M,) timescales > 0.
        c: (M,) readout coefficients.
        lam: rate λ > 0.
        h0: h(0), the initial value of every mode.

    Returns:
        (N+1,) readout at t_0, ..., t_N.

    Example:
        >>> simulate_bank([0.0, 0.0], 1.0, [1.0], [1.0], h0=1.0).round(4).tolist()
        [1.0, 0.3679, 0.1353]
    """
    u, tau, c = _signal(u), check_bank(tau), np.asarray(c, dtype=np.float64)
    if c.shape != tau.shape:
        raise ValueError(f"c must have the shape of tau, {tau.shape}, got {c.shape}")
    lam = float(check_positive("lam", lam))
    dt = check_positive("dt", dt)
    if dt.shape not in ((), u.shape):
        raise ValueError(f"dt must be a number or have the shape of u, {u.shape}, got {dt.shape}")
    fill = -np.expm1(-np.broadcast_to(dt, u.shape)[:, None] / tau)  # 1 - ρ, (N, M)
    state = np.full(len(tau), float(h0))
    readout = np.empty(len(u) + 1)
    readout[0] = c @ state
    for k, target in enumerate(u / lam):
        state += fill[k] * (target - state)
        readout[k + 1] = c @ state
    return readout


def solve_fractional_step(
    u: ArrayLike, dt: float, alpha: float, *, lam: float = 1.0, h0: float = 0.0
) -> NDArray[np.float64]:
    """Solution of the fractional equation for a held input, exact up to rounding.

    The response to a unit step is (1 - E(t)) / λ with E(t) = E_α(-λ t^α), so

        h(t_n) = E(t_n) h0 + Σ_{k<n} u_k (E(t_n - t_{k+1}) - E(t_n - t_k)) / λ.

    Args:
        u: (N,) input, u[k] on [t_k, t_{k+1}).
        dt: step > 0.
        alpha: order in (0, 1].
        lam: rate λ > 0.
        h0: h(0).

    Returns:
        (N+1,) solution at t_0, ..., t_N; the cost grows like N².

    Example:
        >>> solve_fractional_step([1.0, 1.0], 1.0, 0.5).round(4).tolist()
        [0.0, 0.5724, 0.6638]
    """
    u, dt, lam = _signal(u), float(check_positive("dt", dt)), float(check_positive("lam", lam))
    decay = relaxation(dt * np.arange(len(u) + 1), check_order(alpha), lam)
    kernel = -np.diff(decay) / lam
    forced = np.convolve(u, kernel)[: len(u)]
    return decay * h0 + np.append(0.0, forced)


def simulate_fractional(
    u: ArrayLike, dt: float, alpha: float, *, lam: float = 1.0, h0: float = 0.0
) -> NDArray[np.float64]:
    """Solution of the fractional equation by the implicit L1 scheme, the standard method.

    With b_j = (j+1)^(1-α) - j^(1-α) and μ = Γ(2-α) dt^α,

        Σ_{j<n} b_j (h_{n-j} - h_{n-j-1}) = μ (u_{n-1} - λ h_n).

    It serves for comparison: the derivative of the solution grows like t^(α-1) at 0, where the
    scheme is inaccurate.

    Args:
        u: (N,) input at t_1, ..., t_N; for a held input, the value on the step that ends there.
        dt: step > 0.
        alpha: order in (0, 1]; α = 1 is the implicit Euler method.
        lam: rate λ > 0.
        h0: h(0).

    Returns:
        (N+1,) solution at t_0, ..., t_N; the cost grows like N².

    Example:
        >>> simulate_fractional([1.0, 1.0], 1.0, 1.0).tolist()
        [0.0, 0.5, 0.75]
    """
    u, dt, lam = _signal(u), float(check_positive("dt", dt)), float(check_positive("lam", lam))
    alpha = float(check_order(alpha))
    b = np.diff(np.arange(len(u) + 1) ** (1 - alpha))
    # At α = 1 numpy gives 0^0 = 1, where the limit of j^(1-α) at j = 0 is 0.
    b[:1] = 1.0
    mu = math.gamma(2 - alpha) * dt**alpha
    change = np.empty(len(u))
    h = np.empty(len(u) + 1)
    h[0] = h0
    for n in range(len(u)):
        history = b[n:0:-1] @ change[:n]
        h[n + 1] = (h[n] - history + mu * u[n]) / (1 + mu * lam)
        change[n] = h[n + 1] - h[n]
    return h


def _signal(u: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(u, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.all(np.isfinite(array)):
        raise ValueError(f"u must be finite and of shape (N,) with N >= 1, got shape {array.shape}")
    return array
