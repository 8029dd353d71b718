"""From raw logits to the inputs of the scan: read, write and log_decay.

For each token and head, with the bank of timescales tau_m,

    delta = clamp(softplus(delta_logit), dt_min, dt_max)
    alpha = alpha_min + (alpha_max - alpha_min) sigmoid(alpha_logit)
    lam   = lambda_min + (lambda_max - lambda_min) sigmoid(lambda_logit)
    x_m   = delta lam^(1/alpha) / tau_m,    log_decay_m = -x_m,    beta_m = -expm1(-x_m)
    read_m  = softmax_m(prior_m + read_gate  * read_logit_m)
    write_m = softmax_m(prior_m + write_gate * write_logit_m) * beta_m

where prior_m = -alpha log tau_m (paper) or the log of the exact mass of the mode's bin. beta_m is
shown as in the paper; `mode_beta` has the alternatives.
The bank is (M,), or (H, M) if each head has its own timescales.
Letters: B batch, T time, H heads, M modes; any leading axes are allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.ops.scan.reference import expm1

LambdaMap = Literal["sigmoid", "softplus"]
Prior = Literal["asymptotic", "exact"]
Normalization = Literal["softmax", "sigmoid", "none"]
Beta = Literal["one_minus_rho", "exact_zoh", "equal_variance"]

# exp(-88) is the smallest normal float32: a mode that fast is gone after one token.
MOST_DECAY = -88.0


@dataclass(frozen=True, kw_only=True)
class ControlSettings:
    """Ranges and options of the controls; the defaults are those of the published code.

    Attributes:
        dt_min, dt_max: range of delta.
        alpha_min, alpha_max: range of alpha, inside (0, 1].
        alpha_fixed: this alpha for every token, and no alpha logits (ablation "alpha = 1").
        lambda_min, lambda_max: range of lam, positive.
        lambda_map: "sigmoid" into the range (published code), or "softplus" clipped to it (paper).
        rho_eps: rho is clamped to [rho_eps, 1 - rho_eps], in log space; 0 turns the clamp off.
        prior: "asymptotic", -alpha log tau; or "exact", log of `theory.bin_masses`.
        read_prior, write_prior: whether the prior is added to the read and the write logits.
        normalization: "softmax" over modes, "sigmoid" of each logit, or "none": the logits
            themselves are the weights (ablation "w/o softmax R/W").
        beta: the factor of a token's write weights, see `mode_beta`: "one_minus_rho" (the paper's
            Algorithm 1), "exact_zoh" or "equal_variance".
    """

    dt_min: float = 1e-4
    dt_max: float = 1.0
    alpha_min: float = 0.20
    alpha_max: float = 0.95
    alpha_fixed: float | None = None
    lambda_min: float = 0.25
    lambda_max: float = 4.0
    lambda_map: LambdaMap = "sigmoid"
    rho_eps: float = 1e-6
    prior: Prior = "asymptotic"
    read_prior: bool = True
    write_prior: bool = True
    normalization: Normalization = "softmax"
    beta: Beta = "one_minus_rho"

    def __post_init__(self) -> None:
        for low, high in (("dt_min", "dt_max"), ("lambda_min", "lambda_max")):
            if not 0 < getattr(self, low) <= getattr(self, high):
                raise ValueError(
                    f"{low} and {high} must satisfy 0 < {low} <= {high}, "
                    f"got {getattr(self, low)} and {getattr(self, high)}"
                )
        if not 0 < self.alpha_min <= self.alpha_max <= 1:
            raise ValueError(
                "alpha_min and alpha_max must satisfy 0 < alpha_min <= alpha_max <= 1, "
                f"got {self.alpha_min} and {self.alpha_max}"
            )
        if self.alpha_fixed is not None and not 0 < self.alpha_fixed <= 1:
            raise ValueError(f"alpha_fixed must be None or in (0, 1], got {self.alpha_fixed}")
        if not 0 <= self.rho_eps < 0.5:
            raise ValueError(f"rho_eps must be in [0, 0.5), got {self.rho_eps}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")


_CHOICES = {
    "lambda_map": get_args(LambdaMap),
    "prior": get_args(Prior),
    "normalization": get_args(Normalization),
    "beta": get_args(Beta),
}


class Dynamics(NamedTuple):
    """delta, alpha, lam: (..., H) each."""

    delta: Tensor
    alpha: Tensor
    lam: Tensor


class Controls(NamedTuple):
    """read, write, log_decay: (..., H, M) each, the inputs of `frac_scan` beside u."""

    read: Tensor
    write: Tensor
    log_decay: Tensor


class ControlInputs(NamedTuple):
    """Inputs of an implementation of the controls, as a layer's projections produce them.

    dyn (B, T, K H) and rw (B, T, 2 H M) logits; dt_bias (H,), gate logits (1,), log_tau (M,) or
    (H, M); mask (B, T), 0 at padding, or None. prior (B, T, H, M) holds precomputed prior logits
    for kernels that cannot compute them; None otherwise.
    """

    dyn: Tensor
    rw: Tensor
    dt_bias: Tensor
    read_gate: Tensor
    write_gate: Tensor
    log_tau: Tensor
    prior: Tensor | None
    mask: Tensor | None


def dynamics(
    delta_logit: Tensor,
    alpha_logit: Tensor | None,
    lambda_logit: Tensor,
    settings: ControlSettings,
) -> Dynamics:
    """Map the three logits (..., H) into their ranges; alpha_logit is None when alpha is fixed."""
    s = settings
    if (alpha_logit is None) != (s.alpha_fixed is not None):
        raise ValueError(
            f"alpha_logit must be {'None' if alpha_logit is not None else 'given'} "
            f"when alpha_fixed is {s.alpha_fixed}"
        )
    delta = F.softplus(delta_logit).clamp(s.dt_min, s.dt_max)
    if alpha_logit is None:
        alpha = torch.full_like(delta, s.alpha_fixed)  # pyright: ignore[reportArgumentType]
    else:
        alpha = s.alpha_min + (s.alpha_max - s.alpha_min) * torch.sigmoid(alpha_logit)
    if s.lambda_map == "sigmoid":
        lam = s.lambda_min + (s.lambda_max - s.lambda_min) * torch.sigmoid(lambda_logit)
    else:
        lam = F.softplus(lambda_logit).clamp(s.lambda_min, s.lambda_max)
    return Dynamics(delta, alpha, lam)


def num_dynamics(settings: ControlSettings) -> int:
    """Number of dynamics logits per head: delta, alpha and lam; no alpha if it is fixed."""
    return 3 if settings.alpha_fixed is None else 2


def split_dynamics(dyn_logits: Tensor, dt_bias: Tensor, settings: ControlSettings) -> Dynamics:
    """delta, alpha, lam (..., H), from the logits (..., K H) of a layer's dyn_proj.

    Args:
        dyn_logits: blocks delta | alpha | lam, without alpha if it is fixed.
        dt_bias: (H,), added to the logit of delta.
    """
    delta, *alpha, lam = dyn_logits.unflatten(-1, (num_dynamics(settings), -1)).unbind(-2)
    return dynamics(delta + dt_bias, alpha[0] if alpha else None, lam, settings)


def mode_log_decay(dyn: Dynamics, log_tau: Tensor, *, rho_eps: float) -> Tensor:
    """log rho (..., H, M) = -delta lam^(1/alpha) / tau, clamped as in `ControlSettings.rho_eps`."""
    # A product of three factors rounds less than exp of three logs; the bound keeps float32 finite.
    speed = torch.exp((dyn.lam.log() / dyn.alpha).clamp_max(-MOST_DECAY))
    log_rho = -(dyn.delta * speed)[..., None] * torch.exp(-log_tau)
    if rho_eps == 0:
        # Costs no accuracy, and keeps a huge rate from amplifying rounding errors of the gradient.
        return log_rho.clamp_min(MOST_DECAY)
    return log_rho.clamp(math.log(rho_eps), math.log1p(-rho_eps))


def mode_beta(log_decay: Tensor, lam: Tensor, beta: Beta) -> Tensor:
    """How much of a token enters each mode (..., H, M), from log rho there and lam (..., H).

    "one_minus_rho", 1 - rho: all modes have the same response to a constant input, and a slow mode
    holds little of any single token. "exact_zoh": (1 - rho) / lam. "equal_variance",
    sqrt(1 - rho^2): all modes have the same variance if tokens are independent, so a slow mode
    holds more of each token.
    """
    if beta == "equal_variance":
        return _root_of_change(log_decay)
    found = -expm1(log_decay)
    return found / lam[..., None] if beta == "exact_zoh" else found


def _root_of_change(log_decay: Tensor) -> Tensor:
    """sqrt(1 - rho^2). At rho = 1 its slope is infinite; there it is a tiny constant instead."""
    return (-expm1(2 * log_decay.clamp_max(-torch.finfo(log_decay.dtype).tiny))).sqrt()


def log_prior(alpha: Tensor, log_tau: Tensor, prior: Prior) -> Tensor:
    """Prior logits of the modes (..., H, M), from alpha (..., H) and log_tau (M,) or (H, M).

    "exact": the log of the spectrum's mass (order alpha) in the bin of each timescale. Bins are
    split halfway in log tau, and the outermost are open. log_tau must increase.
    """
    if prior == "asymptotic":
        return -alpha[..., None] * log_tau
    # A distance at which every tanh below is 1 in its dtype, and its gradient 0.
    far = torch.full_like(log_tau[..., :1], 1e4)
    edges = torch.cat([-far, (log_tau[..., 1:] + log_tau[..., :-1]) / 2, far], -1)
    scaled = alpha[..., None] * edges
    low, high = scaled[..., :-1], scaled[..., 1:]
    # tanh(high / 2) - tanh(low / 2), from the terms that are small on this side of tau = 1.
    right = torch.sigmoid(-low) - torch.sigmoid(-high)
    left = torch.sigmoid(high) - torch.sigmoid(low)
    difference = 2 * torch.where(low + high > 0, right, left)
    angle = math.pi * alpha[..., None]
    cos, sin = torch.cos(angle / 2), torch.sin(angle / 2)
    across = cos**2 + sin**2 * torch.tanh(low / 2) * torch.tanh(high / 2)
    mass = torch.atan2(torch.sin(angle) / 2 * difference, across) / angle
    return mass.clamp_min(torch.finfo(mass.dtype).tiny).log()


def _weights(logits: Tensor, normalization: Normalization) -> Tensor:
    if normalization == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if normalization == "sigmoid" else logits


def controls(
    delta_logit: Tensor,
    alpha_logit: Tensor | None,
    lambda_logit: Tensor,
    read_logit: Tensor,
    write_logit: Tensor,
    log_tau: Tensor,
    *,
    settings: ControlSettings,
    read_gate: Tensor | float = 1.0,
    write_gate: Tensor | float = 1.0,
    mask: Tensor | None = None,
) -> Controls:
    """Read, write and log_decay per token, head and mode, in float32 (float64 for float64 inputs).

    Args:
        delta_logit, alpha_logit, lambda_logit: (B, T, H); alpha_logit None with a fixed alpha.
        read_logit, write_logit: (B, T, H, M), before their gates.
        log_tau: (M,) log of the timescales; (H, M) if heads have their own.
        settings: ranges and options.
        read_gate, write_gate: scalars that multiply the logits (sigmoid of p_read, p_write).
        mask: (B, T), 0 at padding, which becomes an identity step: write 0, log_decay 0.

    Returns:
        Controls(read, write, log_decay), each (B, T, H, M).

    Example:
        >>> settings = ControlSettings(alpha_min=0.1, alpha_max=0.9)
        >>> read, write, log_decay = controls(delta, alpha, lam, r, w, log_tau, settings=settings)
        >>> y, state = frac_scan(u, read, write, log_decay)
    """
    dtype = torch.promote_types(read_logit.dtype, torch.float32)
    delta_logit, lambda_logit = (x.to(dtype) for x in (delta_logit, lambda_logit))
    alpha_logit = None if alpha_logit is None else alpha_logit.to(dtype)
    dyn = dynamics(delta_logit, alpha_logit, lambda_logit, settings)
    logits = (read_gate * read_logit.to(dtype), write_gate * write_logit.to(dtype))
    return _weigh_modes(dyn, *logits, log_tau.to(dtype), settings, mask)


def _weigh_modes(
    dyn: Dynamics,
    read_logit: Tensor,
    write_logit: Tensor,
    log_tau: Tensor,
    settings: ControlSettings,
    mask: Tensor | None,
) -> Controls:
    """The controls for these dynamics, from logits (..., H, M) after their gates."""
    log_decay = mode_log_decay(dyn, log_tau, rho_eps=settings.rho_eps)
    beta = mode_beta(log_decay, dyn.lam, settings.beta)
    if settings.read_prior or settings.write_prior:
        prior = log_prior(dyn.alpha, log_tau, settings.prior)
        read_logit = read_logit + prior if settings.read_prior else read_logit
        write_logit = write_logit + prior if settings.write_prior else write_logit
    read = _weights(read_logit, settings.normalization)
    write = _weights(write_logit, settings.normalization) * beta
    if mask is not None:
        padding = (mask == 0)[..., None, None]
        write, log_decay = write.masked_fill(padding, 0), log_decay.masked_fill(padding, 0)
    return Controls(read, write, log_decay)


def prior_controls(dyn: Dynamics, log_tau: Tensor, settings: ControlSettings) -> Controls:
    """The controls (..., H, M) for these dynamics if tokens add nothing to the prior.

    Example: with these controls held constant, a head's impulse response after n tokens is
    `(read * write * torch.exp(n * log_decay)).sum(-1)`.
    """
    nothing = torch.zeros_like(dyn.alpha[..., None] * log_tau)
    return _weigh_modes(dyn, nothing, nothing, log_tau, settings, None)


def torch_controls(inputs: ControlInputs, settings: ControlSettings) -> Controls:
    """Plain-torch form of `controls_from_logits`."""
    wide = torch.promote_types(inputs.rw.dtype, torch.float32)
    dyn = split_dynamics(inputs.dyn.to(wide), inputs.dt_bias.to(wide), settings)
    sizes = (2, inputs.dt_bias.shape[0], inputs.log_tau.shape[-1])
    read_logit, write_logit = inputs.rw.to(wide).unflatten(-1, sizes).unbind(-3)
    return _weigh_modes(
        dyn,
        inputs.read_gate.sigmoid() * read_logit,
        inputs.write_gate.sigmoid() * write_logit,
        inputs.log_tau.to(wide),
        settings,
        inputs.mask,
    )


def dilate(controls: Controls, elapsed: Tensor, *, beta: Beta = ControlSettings.beta) -> Controls:
    """The controls of tokens that arrive after more or less than the usual time.

    delta becomes elapsed * delta, after delta and rho are clamped:

        log_decay' = elapsed log_decay,    write' = write beta' / beta

    where beta' / beta is (1 - rho^elapsed) / (1 - rho), or for "equal_variance" the square root of
    this ratio at rho^2.

    Args:
        controls: (B, T, H, M) each.
        elapsed: (B, T), positive; 1 is the usual time.
        beta: `ControlSettings.beta` of the settings that the controls were computed with.
    """
    longer = elapsed[..., None, None].to(controls.log_decay.dtype)
    # Padding has log_decay 0 and writes nothing; the ratio need only be finite there.
    log_decay = controls.log_decay.clamp_max(-torch.finfo(controls.log_decay.dtype).tiny)
    if beta == "equal_variance":
        ratio = _root_of_change(log_decay * longer) / _root_of_change(log_decay)
    else:
        ratio = expm1(log_decay * longer) / expm1(log_decay)
    return Controls(controls.read, controls.write * ratio, controls.log_decay * longer)
