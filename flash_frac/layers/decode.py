"""One token through x + mixer(norm(x)) without gradients, its state updated where it lies.

Decoding waits for launches and for the weights to arrive, not for arithmetic: six kernels a block,
each weight read once. The general form is `FracMixer.forward`.
Letters: B batch, E width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_frac.layers.mixer import FracMixer
from flash_frac.layers.norm import RMSNorm
from flash_frac.layers.state import MixerState
from flash_frac.ops import uses_triton


def _is_watched(module: nn.Module) -> bool:
    """Whether something waits for this module to be called: a hook, or offloading."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


def _is_plain(module: nn.Module, x: Tensor) -> bool:
    """Whether a layer is its weights and nothing else, such as an adapter."""
    weight = module.weight
    return (
        type(module) in (nn.Linear, nn.Conv1d)
        and isinstance(weight, Tensor)
        and weight.dtype == x.dtype
        and weight.device == x.device
    )


def steps_in_place(norm: RMSNorm, mixer: FracMixer, x: Tensor) -> bool:
    """Whether `step_in_place` can take x (B, T, E) through a block."""
    parts = (mixer.in_proj, mixer.conv1d, mixer.dyn_proj, mixer.rw_proj, mixer.out_proj)
    return (
        x.shape[1] == 1
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and uses_triton(mixer.backend, x)
        and uses_triton(norm.backend, x)
        and mixer.settings.prior == "asymptotic"
        and all(_is_plain(part, x) for part in parts)
        and not any(_is_watched(module) for module in (norm, mixer, mixer.out_norm, *parts))
    )


def step_in_place(
    norm: RMSNorm,
    mixer: FracMixer,
    hidden_states: Tensor,
    state: MixerState,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """hidden_states + mixer(norm(hidden_states)), (B, 1, E); `state` becomes the next state."""
    from flash_frac.ops.custom_ops.decode import fused_control_step, fused_conv_step

    hidden = hidden_states[:, 0]
    mask = None if attention_mask is None else attention_mask[:, 0]
    x, gate = _norm_linear(hidden, norm, mixer.in_proj).chunk(2, -1)
    u = fused_conv_step(x, mixer.conv1d.weight, mixer.conv1d.bias, state.conv, mask=mask)
    gated = fused_control_step(
        u.unflatten(-1, (mixer.num_heads, -1)),
        _norm_linear(x, None, mixer.dyn_proj),
        _norm_linear(u, None, mixer.rw_proj),
        mixer.dt_bias,
        mixer.read_residual_logit,
        mixer.write_residual_scale,
        mixer.base_log_tau,
        state.recurrent,
        settings=mixer.settings,
        gate=gate,
        gate_bias=mixer.out_norm.gate_bias,
        skip=mixer.D,
        mask=mask,
    )
    return _norm_linear(gated.flatten(1), mixer.out_norm, mixer.out_proj, hidden)[:, None]


def _norm_linear(
    x: Tensor, norm: RMSNorm | None, linear: nn.Linear, residual: Tensor | None = None
) -> Tensor:
    """residual + linear(norm(x)), in one kernel for a few vectors."""
    from flash_frac.ops.custom_ops.decode import MOST_VECTORS, fused_norm_linear

    if x.shape[0] <= MOST_VECTORS:
        return fused_norm_linear(
            x,
            linear.weight,
            linear.bias,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            residual=residual,
        )
    # Not norm(x): the gated norm would gate again.
    x = x if norm is None else RMSNorm.forward(norm, x)
    if residual is None:
        return F.linear(x, linear.weight, linear.bias)
    return torch.addmm(residual, x, linear.weight.t())
