"""Give a trained model another bank of timescales: a longer memory, or a smaller state.

A layer's timescales appear in two tensors: `base_log_tau` (M,), and the rows of `rw_proj`, which
give each mode of each head its read and write logits; the weight of `rw_norm`, if present, has two
numbers for each mode. `regrid` sets new timescales tau' and interpolates the rows of the new modes
from the old ones, linearly in log tau and constant beyond the ends; a mode at an old timescale
keeps its row. Everything else is copied.

This changes the kernel. A head at fixed controls Δ, α, λ that reads and writes by its prior,
p = softmax(-α log tau), responds to a token after n steps with

    K(n) = Σ_m p_m p_m (1 - ρ_m) ρ_m^n,    ρ_m = exp(-Δ λ^(1/α) / tau_m)

and, with tau', with K'(n), a sum over other modes with another normalisation. Because p sums to 1
and is squared, K scales with the spacing of the modes: half as many between the same ends make it
about twice as large. The norm after the scan removes a factor c common to all heads, if the direct
term D u is scaled by it too. So `regrid` fits K' ≈ c_h K for each head h by least squares,
multiplies D by c_h, and the weight of the norm by rms(c) / c_h, which is exact if all c_h are
equal. A change of shape remains; the report has both. Letters: H heads, M modes, I = H D.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flash_frac.layers import FracMixer
from flash_frac.layers.plain import has_plain_weight
from flash_frac.models.configuration import FracConfig
from flash_frac.models.modeling import FracPreTrainedModel
from flash_frac.ops import Dynamics, prior_controls
from flash_frac.theory.banks import named_bank, resolve_bank

Model = TypeVar("Model", bound=FracPreTrainedModel)
# Two log timescales closer than this are equal: a float32 log of 2^17 is rounded to 1e-6.
_SAME = 1e-5
_NUM_LAGS = 400


@dataclass(frozen=True, kw_only=True)
class KernelChange:
    """How a new bank changes the kernels of one layer; errors are maxima over its heads.

    Attributes:
        sup_error: sup_n |K'(n) - K(n)| / K(0), over n = 0 and the lags below.
        l2_error: |K' - K| / |K| in the Euclidean norm over 400 log-spaced lags from 1 to the
            longest old timescale.
        scale: mean over heads of the factor c_h by which K' is larger.
        shape_error: |K' / c_h - K| / |K|, the part of l2_error that no factor removes.
    """

    sup_error: float
    l2_error: float
    scale: float
    shape_error: float


@dataclass(frozen=True, kw_only=True)
class Regridding(Generic[Model]):
    """A model with a new bank, and the change of its kernels.

    Attributes:
        model: the new model; the old one is unchanged.
        old_tau, new_tau: (M,) and (M',) timescales.
        layers: the change of each Frac layer's kernels.

    `str()` returns a summary to print.
    """

    model: Model
    old_tau: tuple[float, ...]
    new_tau: tuple[float, ...]
    layers: tuple[KernelChange, ...]

    @property
    def sup_error(self) -> float:
        """The largest of all layers."""
        return max(layer.sup_error for layer in self.layers)

    @property
    def l2_error(self) -> float:
        """The largest of all layers."""
        return max(layer.l2_error for layer in self.layers)

    @property
    def shape_error(self) -> float:
        """The largest of all layers."""
        return max(layer.shape_error for layer in self.layers)

    @property
    def numbers(self) -> list[int]:
        """Indices of these layers among all layers of the model."""
        return [n for n, name in enumerate(self.model.config.mixer_types or []) if name == "frac"]

    @property
    def unchanged(self) -> dict[int, str]:
        """Types of the layers without a bank, which are unchanged, by index."""
        types = enumerate(self.model.config.mixer_types or [])
        return {n: name for n, name in types if name != "frac"}

    def __str__(self) -> str:
        ends = [f"{len(x)} from {x[0]:g} to {x[-1]:g}" for x in (self.old_tau, self.new_tau)]
        lines = [f"timescales: {ends[0]} -> {ends[1]}", "layer  sup      L2       scale  shape"]
        lines += [
            f"{n:5}  {x.sup_error:.1e}  {x.l2_error:.1e}  {x.scale:5.3f}  {x.shape_error:.1e}"
            for n, x in zip(self.numbers, self.layers, strict=True)
        ]
        if self.unchanged:
            rest = ", ".join(f"{n} {name}" for n, name in self.unchanged.items())
            lines.append(f"unchanged, without a bank: {rest}")
        return "\n".join(lines)


def regrid(
    model: Model,
    *,
    tau_max: float | None = None,
    tau_min: float | None = None,
    num_modes: int | None = None,
    bank: str | Sequence[float] | None = None,
    controls: Dynamics | Sequence[Dynamics] | None = None,
    rescale: bool = True,
) -> Regridding[Model]:
    """A copy of a model with other timescales, and the error of its kernels.

    Args:
        model: a Frac model with a fixed bank, any head; in a mixed one, only Frac layers change.
        tau_max, tau_min, num_modes: of a geometric bank; None keeps the model's. The new timescales
            include the old ones, and the change is small, if the ratio of neighbours stays the
            same: num_modes = 1 + (M - 1) log(tau_max' / tau_min) / log(tau_max / tau_min).
        bank: the name of an optimised bank, a list of timescales, or "geometric"; None keeps the
            model's kind, which must then be geometric.
        controls: Δ, α, λ at which kernels are compared, (H,) or scalars, one for all layers or one
            per layer; None takes those of a token whose projections are 0, i.e. of the biases.
        rescale: keep the balance of memory and direct term, and of heads, as above.

    Returns:
        Regridding(model, old_tau, new_tau, layers).

    Rates are clamped at `frac_rho_eps`: modes slower than Δ λ^(1/α) / rho_eps tokens, a million by
    default, all behave alike.

    Example:
        >>> longer = regrid(model, tau_max=2.0**20, num_modes=1 + 20)  # was 1 to 2^16, 17 modes
        >>> print(longer)
        >>> longer.model.save_pretrained("longer")
    """
    mixers = _mixers(model)
    changes = _new_bank(model.config, tau_max, tau_min, num_modes, bank)
    new_tau = resolve_bank(
        changes["frac_bank"],
        changes["frac_num_modes"],
        changes["frac_tau_min"],
        changes["frac_tau_max"],
    )
    log_tau = torch.from_numpy(np.log(new_tau))
    at = _controls_of_layers(controls, mixers)
    # A process group cannot be copied, so share it.
    groups = [mixer.context_group for mixer in mixers if mixer.context_group is not None]
    new = copy.deepcopy(model, {id(group): group for group in groups})
    for name, value in changes.items():
        setattr(new.config, name, value)
    layers = []
    for old_mixer, new_mixer, dyn in zip(mixers, _mixers(new), at, strict=True):
        _set_bank(new_mixer, log_tau, (changes["frac_tau_min"], changes["frac_tau_max"]))
        change, scale_H = _compare(old_mixer, new_mixer, dyn)
        if rescale:
            _rescale(new_mixer, scale_H)
        layers.append(change)
    old_tau = mixers[0].base_log_tau.detach().double().exp().tolist()
    return Regridding(
        model=new, old_tau=tuple(old_tau), new_tau=tuple(new_tau.tolist()), layers=tuple(layers)
    )


def _mixers(model: nn.Module) -> list[FracMixer]:
    """The layers of a model whose bank can be changed; ValueError if it has none."""
    if not isinstance(model, FracPreTrainedModel):
        raise ValueError(
            f"model must be a Frac model, got {type(model).__name__}; if it is wrapped (compiled, "
            "or in DistributedDataParallel), pass the model inside"
        )
    if model.config.frac_learned_timescales:
        raise ValueError(
            "model must have fixed timescales, got frac_learned_timescales=True: each of its "
            "layers has its own bank, which no configuration can describe; change base_log_tau by "
            "training, or train with a fixed frac_bank"
        )
    mixers = [module for module in model.modules() if isinstance(module, FracMixer)]
    if not mixers:
        raise ValueError(
            "model must have a layer of type frac, whose bank can be changed, got mixer_types="
            f"{model.config.mixer_types}"
        )
    for mixer in mixers:
        if type(mixer.rw_proj) is not nn.Linear:
            raise ValueError(
                f"rw_proj must be an nn.Linear, got {type(mixer.rw_proj).__name__}; merge adapters "
                "into the model first"
            )
        if not has_plain_weight(mixer.rw_proj):
            raise ValueError(
                "rw_proj must have a plain weight, got a quantised "
                f"{type(mixer.rw_proj.weight).__name__}; change the bank before quantising"
            )
    return mixers


def _new_bank(
    config: FracConfig,
    tau_max: float | None,
    tau_min: float | None,
    num_modes: int | None,
    bank: str | Sequence[float] | None,
) -> dict[str, Any]:
    """The fields of the configuration that describe the new bank."""
    given = {"tau_max": tau_max, "tau_min": tau_min, "num_modes": num_modes}
    asked = ", ".join(name for name, value in given.items() if value is not None)
    kind = config.frac_bank if bank is None else bank
    if "per_head" in (config.frac_bank, kind):
        raise ValueError(
            "bank must be one that all heads share, before and after, got 'per_head'; train with "
            "frac_bank='per_head' from the start instead"
        )
    if not isinstance(kind, str):
        kind = [float(tau) for tau in kind]
    if kind != "geometric" and bank is None and asked:
        raise ValueError(
            f"{asked} of a geometric bank cannot be changed, got a model with frac_bank="
            f"{config.frac_bank!r}; pass bank='geometric' with tau_min, tau_max and num_modes, or "
            "bank=[...], the new timescales"
        )
    if kind != "geometric" and not (tau_max is None and tau_min is None):
        raise ValueError(
            f"tau_max and tau_min belong to a geometric bank, got bank={bank!r}; omit them, "
            "or pass bank='geometric'"
        )
    if num_modes is None and bank is not None and kind != "geometric":
        num_modes = len(named_bank(kind)) if isinstance(kind, str) else len(kind)
    return {
        "frac_bank": kind,
        "frac_num_modes": config.frac_num_modes if num_modes is None else num_modes,
        "frac_tau_min": config.frac_tau_min if tau_min is None else float(tau_min),
        "frac_tau_max": config.frac_tau_max if tau_max is None else float(tau_max),
    }


def _controls_of_layers(
    controls: Dynamics | Sequence[Dynamics] | None, mixers: list[FracMixer]
) -> list[Dynamics]:
    """Δ, α, λ (H,) of each layer, float64 on the CPU."""
    if controls is None:
        return [_bias_controls(mixer) for mixer in mixers]
    # A Dynamics is a tuple too.
    each = [controls] * len(mixers) if isinstance(controls, Dynamics) else list(controls)
    if len(each) != len(mixers):
        raise ValueError(
            f"controls must be one Dynamics, or one for each of {len(mixers)} layers, "
            f"got {len(each)}"
        )

    def of_heads(x: Tensor | float, mixer: FracMixer) -> Tensor:
        x = torch.as_tensor(x, dtype=torch.float64).cpu()
        if x.shape not in ((), (mixer.num_heads,)):
            raise ValueError(
                f"controls must be scalars or have shape ({mixer.num_heads},), one for each head, "
                f"got {tuple(x.shape)}; average over tokens"
            )
        return x.expand(mixer.num_heads)

    pairs = zip(each, mixers, strict=True)
    return [Dynamics(*(of_heads(x, mixer) for x in dyn)) for dyn, mixer in pairs]


@torch.no_grad()
def _bias_controls(mixer: FracMixer) -> Dynamics:
    """Controls of a token that projects to 0, in float64 on the CPU."""
    return mixer.dynamics(mixer.dyn_proj.bias.double().cpu())


class _Rows(NamedTuple):
    """New row k interpolates from old row low[k] to old row high[k] by share[k]."""

    low: Tensor
    high: Tensor
    share: Tensor


def _interpolation(old_log_tau: Tensor, new_log_tau: Tensor) -> _Rows:
    """Linear in log tau, constant beyond the ends; exactly an old row where timescales agree."""
    last = len(old_log_tau) - 1
    high = torch.searchsorted(old_log_tau, new_log_tau)
    low, high = (high - 1).clamp_min(0), high.clamp_max(last)
    gap = old_log_tau[high] - old_log_tau[low]
    share = (new_log_tau - old_log_tau[low]) / gap.where(gap > 0, torch.ones_like(gap))
    share = share.where(gap > 0, torch.zeros_like(gap))
    # Treat a rounded copy of an old timescale as that timescale.
    at_low = (new_log_tau - old_log_tau[low]).abs() < _SAME
    at_high = (new_log_tau - old_log_tau[high]).abs() < _SAME
    low, share = low.where(~at_high, high), share.masked_fill(at_low | at_high, 0)
    return _Rows(low, high, share)


@torch.no_grad()
def _set_bank(mixer: FracMixer, log_tau: Tensor, ends: tuple[float, float]) -> None:
    """Change timescales, and the rows of rw_proj (2, H, M, I) with them."""
    old_log_tau = mixer.base_log_tau.double().cpu()
    rows = _interpolation(old_log_tau, log_tau)
    kept = (log_tau - old_log_tau[rows.low]).abs() < _SAME
    linear, norm = mixer.rw_proj, mixer.rw_norm
    linear.weight = _mixed_rows(linear.weight, (2 * mixer.num_heads, mixer.num_modes), rows)
    linear.out_features = linear.weight.shape[0]
    if norm is not None:
        norm.weight, norm.num_modes = _mixed_rows(norm.weight, (2, norm.num_modes), rows), len(kept)
    mixer.base_log_tau = old_log_tau[rows.low].where(kept, log_tau).to(mixer.base_log_tau)
    mixer.num_modes, mixer.log_tau_init = len(log_tau), log_tau.tolist()
    mixer.log_tau_range = (math.log(ends[0]), math.log(ends[1]))


def _mixed_rows(old: Tensor, sizes: tuple[int, int], rows: _Rows) -> nn.Parameter:
    """The rows (N M', ...) of the new modes, from those (N M, ...) of the old; sizes are N, M."""
    weight = old.unflatten(0, sizes)
    low, high = (weight[:, index.to(weight.device)] for index in (rows.low, rows.high))
    share = rows.share.to(weight.device).view(-1, *(1 for _ in weight.shape[2:]))
    # In float64, so that a row with a share of 0 equals the old one bit for bit.
    mixed = low.double() + share * (high.double() - low.double())
    return nn.Parameter(mixed.to(weight.dtype).flatten(0, 1), requires_grad=old.requires_grad)


def _kernel(mixer: FracMixer, dyn: Dynamics, lags: Tensor) -> Tensor:
    """K(n) of each head (H, len(lags)) float64, at these controls."""
    log_tau = mixer.base_log_tau.detach().double().cpu()
    read, write, log_decay = prior_controls(dyn, log_tau, mixer.settings)
    powers = torch.exp(log_decay[:, None] * lags[:, None])
    return ((read * write)[:, None] * powers).sum(-1)


def _compare(old: FracMixer, new: FracMixer, dyn: Dynamics) -> tuple[KernelChange, Tensor]:
    """The change of a layer's kernels, and the factor c_h (H,) of each head."""
    longest = old.base_log_tau.double().max().item() / math.log(10)
    lags = torch.logspace(0, max(longest, 0.0), _NUM_LAGS, dtype=torch.float64)
    lags = torch.cat([torch.zeros(1, dtype=torch.float64), lags])
    before, after = _kernel(old, dyn, lags), _kernel(new, dyn, lags)
    difference = (after - before).abs()
    # Without prior and normalisation, the kernel depends on content only and does not change.
    size = before[:, 0].where(before[:, 0] > 0, torch.ones_like(before[:, 0]))
    sup = difference.max(-1).values / size
    # The logarithmic grid does not include lag 0.
    before, after = before[:, 1:] / size[:, None], after[:, 1:] / size[:, None]
    norm = before.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    scale = ((after / norm[:, None]) * (before / norm[:, None])).sum(-1)
    scale = scale.where(scale > 0, torch.ones_like(scale))
    scale = scale.where((after != before).any(-1), torch.ones_like(scale))
    shape = (after / scale[:, None] - before).norm(dim=-1) / norm
    change = KernelChange(
        sup_error=sup.max().item(),
        l2_error=((after - before).norm(dim=-1) / norm).max().item(),
        scale=scale.mean().item(),
        shape_error=shape.max().item(),
    )
    return change, scale


@torch.no_grad()
def _rescale(mixer: FracMixer, scale_H: Tensor) -> None:
    """D times c_h; the weight of the norm times rms(c) / c_h."""
    balance = scale_H.square().mean().sqrt() / scale_H
    if mixer.D is not None:
        mixer.D.copy_(mixer.D.double() * scale_H.to(mixer.D.device)[:, None])
    weight = mixer.out_norm.weight
    per_channel = balance.repeat_interleave(mixer.head_dim).to(weight.device)
    weight.copy_(weight.double() * per_channel)
