"""Statistics of a model's memory: the controls of its layers and the resulting kernels.

A head with constant controls Δ, α, λ that reads and writes by its prior p = softmax(-α log tau)
responds to a token after n steps with

    K(n) = Σ_m p_m p_m β_m ρ_m^n,    ρ_m = exp(-Δ λ^(1/α) / tau_m)

so mode m, whose β_m is 1 - ρ_m as published, holds a mass of p_m p_m β_m / (1 - ρ_m), with a mean
lag of ρ_m / (1 - ρ_m) tokens. The residuals that tokens add to reads and writes are left out.
Letters: B batch, T time, H heads, M modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flash_frac.layers import DeltaMixer, FracMixer
from flash_frac.models import FracPreTrainedModel
from flash_frac.models.attention import Attention
from flash_frac.models.evaluating import evaluating
from flash_frac.ops import ControlSettings, Dynamics, mode_log_decay, prior_controls

Visit = Callable[[int, FracMixer, Tensor, Tensor], None]
VisitContent = Callable[[int, Attention | DeltaMixer, Tensor, dict[str, Any]], None]
_MIXERS = (FracMixer, DeltaMixer, Attention)


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """The memory of one layer on some tokens.

    Attributes:
        delta_mean, delta_std, alpha_mean, alpha_std, lambda_mean, lambda_std: mean and standard
            deviation of the controls over tokens and heads.
        clamped_share: share of all (token, head, mode) with a decay at a bound of rho_eps.
        horizon: mean lag Σ n K(n) / Σ K(n) of the kernel in tokens, at the mean controls of each
            head; the geometric mean over heads.
    """

    delta_mean: float
    delta_std: float
    alpha_mean: float
    alpha_std: float
    lambda_mean: float
    lambda_std: float
    clamped_share: float
    horizon: float

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """The numbers by name, such as "memory/layer_0/alpha_mean" with that prefix."""
        return {f"{prefix}{name}": value for name, value in asdict(self).items()}


def memory_statistics(
    model: nn.Module, input_ids: Tensor, cu_seqlens: Tensor | None = None
) -> list[LayerStatistics]:
    """The memory of every Frac layer, from one forward pass without gradients.

    `layer_numbers` gives their indices in the model.

    Args:
        model: an unwrapped Frac model.
        input_ids: (B, T).
        cu_seqlens: (N + 1,) boundaries of sequences packed in one row (B = 1).

    Example:
        >>> for layer in memory_statistics(model, ids):
        ...     print(f"alpha {layer.alpha_mean:.2f}, horizon {layer.horizon:.0f} tokens")
    """
    return [_statistics(seen) for seen in _look(model, input_ids, cu_seqlens)]


def layer_numbers(model: nn.Module) -> list[int]:
    """Indices of the Frac layers among all layers of a model, from 0.

    Example: `layer_numbers(model)` with mixer_types=["frac", "attention"] twice is [0, 2].
    """
    return list(_mixers(model))


def _mixers(model: nn.Module) -> dict[int, FracMixer]:
    """The Frac layers by index."""
    return {n: x for n, x in _all_mixers(model).items() if isinstance(x, FracMixer)}


def _all_mixers(model: nn.Module) -> dict[int, FracMixer | DeltaMixer | Attention]:
    """The mixer of each layer, by index; a wrapped one is found inside its wrapper."""
    return dict(enumerate(x for x in model.modules() if isinstance(x, _MIXERS)))


def layer_kernel(
    model: nn.Module, layer: int, lags: Sequence[float] | np.ndarray, input_ids: Tensor
) -> np.ndarray:
    """The kernel K(n) of each head of a layer, (H, len(lags)) float64, at its mean controls.

    Args:
        model: an unwrapped Frac model.
        layer: its index among all layers of the model; -1 is the last Frac layer.
        lags: n, in tokens, 0 or more.
        input_ids: (B, T), the tokens over which the controls are averaged.

    Example: `plt.loglog(lags, layer_kernel(model, 0, lags, ids).T)`
    """
    lags = np.asarray(lags, np.float64)
    if lags.ndim != 1 or not (lags >= 0).all():
        raise ValueError(f"lags must be a list of numbers of 0 or more, got {lags}")
    seen, numbers = _look(model, input_ids, None), layer_numbers(model)
    if layer not in (-1, *numbers) or not numbers:
        raise ValueError(f"layer must be a Frac layer, one of {numbers}, got {layer}")
    amplitudes, log_decay = _modes(seen[-1 if layer == -1 else numbers.index(layer)])
    powers = torch.exp(log_decay[:, None] * torch.from_numpy(lags)[:, None])
    return (amplitudes[:, None] * powers).sum(-1).numpy()


def check_model(model: nn.Module) -> None:
    """Raise unless this is a Frac model, and not a wrapper around one."""
    if not isinstance(model, FracPreTrainedModel):
        raise ValueError(
            f"model must be a Frac model, got {type(model).__name__}; if it is wrapped (compiled, "
            "or in DistributedDataParallel), pass the model inside"
        )


def check_tokens(input_ids: Tensor) -> None:
    """Raise unless these are rows of token ids."""
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be integers of shape (B, T), got {tuple(input_ids.shape)} "
            f"{input_ids.dtype}; for one text, pass ids[None]"
        )


def visit_layers(
    model: nn.Module,
    input_ids: Tensor,
    visit: Visit,
    cu_seqlens: Tensor | None = None,
    visit_content: VisitContent | None = None,
) -> None:
    """Call visit(layer, mixer, inner_x, u) for every Frac layer in one pass over the tokens.

    Also call visit_content(layer, mixer, x, inputs) for every delta and attention layer: x
    (B, T, E) is its input, and inputs are the other arguments of its call.

    layer is its index in the model, as in `layer_numbers`.
    inner_x and u (B, T, I) are the inputs of `dyn_proj` and `rw_proj`, from which `mixer.controls`
    computes read, write and log_decay. They are freed after the visit. During the visit all
    parameters are gathered, even in a sharded model.

    Example: `visit_layers(model, ids, lambda n, mixer, inner_x, u: print(n, inner_x.shape))`
    """
    check_model(model)
    check_tokens(input_ids)
    handles: list[RemovableHandle] = []

    def watch(layer: int, mixer: FracMixer) -> None:
        inputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda module, arguments: inputs.update({name: arguments[0]})

        def done(module: nn.Module, arguments: Any, output: Any) -> None:
            inner_x, u = inputs["inner_x"], inputs["u"]
            visit(layer, mixer, inner_x, u)
            inputs.clear()

        handles.append(mixer.dyn_proj.register_forward_pre_hook(keep("inner_x")))
        handles.append(mixer.rw_proj.register_forward_pre_hook(keep("u")))
        handles.append(mixer.register_forward_hook(done))

    def watch_content(layer: int, mixer: DeltaMixer | Attention, visit: VisitContent) -> None:
        def done(module: nn.Module, arguments: Any, inputs: dict[str, Any], output: Any) -> None:
            visit(layer, mixer, arguments[0], inputs)

        handles.append(mixer.register_forward_hook(done, with_kwargs=True))

    try:
        for layer, mixer in _all_mixers(model).items():
            if isinstance(mixer, FracMixer):
                watch(layer, mixer)
            elif visit_content is not None:
                watch_content(layer, mixer, visit_content)
        with evaluating(model):
            # The vocabulary head costs more than the layers of a small model. Call it anyway,
            # because a sharded model gathers its parameters when it is called.
            model(input_ids, cu_seqlens=cu_seqlens, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()


class _Seen(NamedTuple):
    """Controls of a layer: Δ, α, λ (B, T, H) float32 or float64, and log tau (M,) float64."""

    settings: ControlSettings
    dyn: Dynamics
    log_tau: Tensor


def _look(model: nn.Module, input_ids: Tensor, cu_seqlens: Tensor | None) -> list[_Seen]:
    """The controls of each Frac layer on these tokens."""
    seen: list[_Seen] = []

    def visit(layer: int, mixer: FracMixer, inner_x: Tensor, u: Tensor) -> None:
        dyn = mixer.dynamics(mixer.dyn_proj(inner_x))
        seen.append(_Seen(mixer.settings, dyn, mixer.base_log_tau.detach().double()))

    visit_layers(model, input_ids, visit, cu_seqlens)
    return seen


def _statistics(seen: _Seen) -> LayerStatistics:
    eps, dyn = seen.settings.rho_eps, seen.dyn
    clamped = torch.zeros((), device=dyn.delta.device)
    if eps:
        free = mode_log_decay(dyn, seen.log_tau.to(dyn.delta.dtype), rho_eps=0.0)
        clamped = ((free <= math.log(eps)) | (free >= math.log1p(-eps))).float().mean()
    # Copy all numbers from the device at once.
    moments = torch.stack([*(f(x) for x in dyn for f in (torch.mean, _deviation)), clamped])
    delta_mean, delta_std, alpha_mean, alpha_std, lambda_mean, lambda_std, share = moments.tolist()
    return LayerStatistics(
        delta_mean=delta_mean,
        delta_std=delta_std,
        alpha_mean=alpha_mean,
        alpha_std=alpha_std,
        lambda_mean=lambda_mean,
        lambda_std=lambda_std,
        clamped_share=share,
        horizon=_horizons(*_modes(seen)).log().mean().exp().item(),
    )


def _deviation(x: Tensor) -> Tensor:
    return x.std(correction=0)


def _modes(seen: _Seen) -> tuple[Tensor, Tensor]:
    """p p β and log ρ of the modes (H, M), float64 on the CPU, at each head's mean controls."""
    mean = Dynamics(*(x.double().mean((0, 1)).cpu() for x in seen.dyn))
    read, write, log_decay = prior_controls(mean, seen.log_tau.cpu(), seen.settings)
    return read * write, log_decay


def _horizons(amplitudes: Tensor, log_decay: Tensor) -> Tensor:
    """Σ_n n K(n) / Σ_n K(n) of each head (H,): mode m has a mean lag of ρ_m / (1 - ρ_m)."""
    change = -torch.expm1(log_decay)
    masses, lags = amplitudes / change, torch.exp(log_decay) / change
    # Without prior and normalisation, the kernel depends on content only and has no mean lag.
    total = masses.sum(-1).clamp_min(torch.finfo(masses.dtype).tiny)
    return (masses * lags).sum(-1) / total
