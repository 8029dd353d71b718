"""The body of a FracMixer, from the outputs of in_proj to the inputs of out_proj, on the kernels.

    x, gate = projected          u = silu(conv(x))          controls = f(dyn_proj(x), rw_proj(u))
    y = scan(u, controls) + D u                             z = RMSNorm(y silu(gate))

`compute_body` calls the operators directly, and `train_body` gives it one gradient. Left to
autograd, the gradient of u is the sum of three tensors, that of x of two, and those of x and gate
are concatenated: 19 passes over a (B, T, I) tensor. Here each is written once and added to by a
product, which takes 7. The numbers are those of the modules, up to rounding.
Letters: B batch, T time, H heads, D head channels, I = H D, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.layers.checks import state_fits
from flash_frac.layers.norm import GatedRMSNorm
from flash_frac.layers.plain import has_plain_weight, is_watched
from flash_frac.layers.state import MixerState
from flash_frac.ops import ControlSettings, uses_triton
from flash_frac.ops.backends import FEWEST_TAPS, MOST_TAPS, MOST_WIDTH, refuse_second_derivative

if TYPE_CHECKING:
    from flash_frac.layers.mixer import FracMixer


class Settings(NamedTuple):
    """Settings of the controls, as `kernel_settings` returns them, and of the gated norm."""

    ranges: Sequence[float]
    switches: str
    eps: float
    gate_bias: float


class Weights(NamedTuple):
    """Parameters of a mixer between its projections; products have the dtype of the tokens."""

    conv: Tensor
    conv_bias: Tensor | None
    dyn: Tensor
    dyn_bias: Tensor
    rw: Tensor
    dt_bias: Tensor
    read_gate: Tensor
    write_gate: Tensor
    log_tau: Tensor
    skip: Tensor | None
    norm: Tensor


def weights_of(mixer: FracMixer) -> Weights:
    """The parameters themselves."""
    conv, dyn = mixer.conv1d, mixer.dyn_proj
    clock = (mixer.dt_bias, mixer.read_residual_logit, mixer.write_residual_scale)
    return Weights(
        *(conv.weight, conv.bias, dyn.weight, dyn.bias, mixer.rw_proj.weight),
        *(*clock, mixer.base_log_tau, mixer.D, mixer.out_norm.weight),
    )


def settings_of(mixer: FracMixer) -> Settings:
    """The settings of the controls and of the gated norm."""
    return Settings(*_kernel_settings(mixer.settings), mixer.out_norm.eps, mixer.out_norm.gate_bias)


@lru_cache(maxsize=64)
def _kernel_settings(settings: ControlSettings) -> tuple[list[float], str]:
    from flash_frac.ops.control.triton import kernel_settings

    return kernel_settings(settings)


def compute_body(
    w: Weights,
    settings: Settings,
    projected: Tensor,
    before: Tensor | None,
    window: Tensor | None,
    cu_seqlens: Tensor | None = None,
    sequence: Tensor | None = None,
    norm_logits: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """z, the new state and window, and what the backward pass needs besides the inputs.

    Args:
        projected: (B, T, 2 I), whose first half is x.
        before: (N, H, M, D) float32, and window (N, I, K - 1); None to start.
        cu_seqlens, sequence: of packed sequences, as `conv_op` takes them.
        norm_logits: is applied to the logits of reads and writes.
    """
    # Imported here, because these modules import triton.
    from flash_frac.ops.control.triton import control_op
    from flash_frac.ops.conv.triton import conv_op
    from flash_frac.ops.norm.triton import gated_norm_op
    from flash_frac.ops.scan.triton import scan_op

    x, gate = projected.chunk(2, -1)
    u, after_window = conv_op(x, w.conv, w.conv_bias, window, cu_seqlens, sequence)
    dyn, rw = F.linear(x, w.dyn, w.dyn_bias), F.linear(u, w.rw)
    if norm_logits is not None:
        rw = norm_logits(rw)
    clock = (w.dt_bias, w.read_gate, w.write_gate, w.log_tau)
    controls = control_op(dyn, rw, *clock, None, None, settings.ranges, settings.switches)
    heads = u.view(*u.shape[:2], w.dt_bias.shape[0], -1)
    y, after, *kept = scan_op(heads, *controls, before, cu_seqlens)
    y = y.view(u.shape)
    direct = None if w.skip is None else u
    z = gated_norm_op(y, gate, w.norm, w.skip, direct, settings.eps, settings.gate_bias)
    return z, after, after_window, (u, y, dyn, rw, *controls, *kept)


def trains_at_once(
    mixer: FracMixer, projected: Tensor, state: MixerState | None, cu_seqlens: Tensor | None
) -> bool:
    """Whether `train_body` supports the outputs (B, T, 2 I) of in_proj: plain layers, gradients.

    Compilers get the modules, which they optimise themselves.
    """
    num = projected.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    parts = (mixer.dyn_proj, mixer.rw_proj, mixer.conv1d)
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and projected.shape[1] > 1
        and uses_triton(mixer.backend, projected)
        and uses_triton(mixer.out_norm.backend, projected)
        and FEWEST_TAPS <= mixer.conv_kernel <= MOST_TAPS
        and mixer.num_heads * mixer.head_dim <= MOST_WIDTH
        and mixer.settings.prior == "asymptotic"
        and mixer.rw_norm is None
        and mixer.context_group is None
        and state_fits(mixer, projected, num, state)
        and type(mixer.out_norm) is GatedRMSNorm
        and all(has_plain_weight(part) and _fits(part.weight, projected) for part in parts[:2])
        and has_plain_weight(mixer.conv1d)
        and mixer.rw_proj.bias is None
        and mixer.dyn_proj.bias is not None
        and not any(is_watched(module) for module in (mixer.out_norm, *parts))
    )


def _fits(weight: Tensor, x: Tensor) -> bool:
    """Whether a linear layer multiplies x by its weight in the dtype of x."""
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype == torch.get_autocast_dtype(x.device.type)
    return weight.dtype == x.dtype


def train_body(
    mixer: FracMixer, projected: Tensor, state: MixerState | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, MixerState]:
    """z (B, T, I) from the outputs (B, T, 2 I) of in_proj, and the states of the N sequences."""
    # Imported here, because this module imports triton.
    from flash_frac.ops.conv.triton import sequence_of_tokens

    dtype, plain = projected.dtype, weights_of(mixer)
    cast = {name: getattr(plain, name).to(dtype) for name in ("dyn", "dyn_bias", "rw")}
    names = ("dt_bias", "read_gate", "write_gate", "log_tau")
    weights = plain._replace(**cast, **{name: getattr(plain, name).float() for name in names})
    before, window = (None, None) if state is None else state
    window = None if window is None else window.to(dtype).contiguous()
    before = None if before is None else before.contiguous()
    sequence = sequence_of_tokens(cu_seqlens, projected)
    given = (settings_of(mixer), projected.contiguous(), before, window, cu_seqlens, sequence)
    z, after, window = _Body.apply(*given, *(w if w is None else w.contiguous() for w in weights))
    return z, MixerState(after, window)


class _Body(torch.autograd.Function):
    """z, the state and the window of `train_body`."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        projected: Tensor,
        before: Tensor | None,
        window: Tensor | None,
        cu_seqlens: Tensor | None,
        sequence: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        w = Weights(*parameters)  # pyright: ignore[reportArgumentType]
        given = (projected, before, window, cu_seqlens, sequence)
        z, after, after_window, kept = compute_body(w, settings, *given)
        ctx.settings = settings
        ctx.save_for_backward(*given, *kept, *w)
        ctx.set_materialize_grads(False)
        return z, after, after_window

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from flash_frac.ops.control.triton import control_backward_op
        from flash_frac.ops.conv.triton import conv_backward_op
        from flash_frac.ops.norm.triton import gated_norm_backward_op
        from flash_frac.ops.scan.triton import scan_backward_op

        refuse_second_derivative("FracMixer on the Triton kernels")
        # Unpacked once: checkpointing recomputes saved tensors, and frees them once read.
        saved = list(ctx.saved_tensors)
        projected, before, window, cu_seqlens, sequence, u, y = saved[:7]
        logits, controls, kept, w = saved[7:9], saved[9:12], saved[12:17], Weights(*saved[17:])
        needs, settings = Weights(*ctx.needs_input_grad[6:]), ctx.settings
        x, gate = projected.chunk(2, -1)
        heads = u.view(*u.shape[:2], w.dt_bias.shape[0], -1)
        dz, dafter, dwindow = gradients
        # A loss of the state alone leaves the norm and the direct term without a gradient.
        no_output = dz is None
        dz = torch.zeros_like(u) if dz is None else dz.contiguous()
        dafter = None if dafter is None else dafter.contiguous()

        dprojected = torch.empty_like(projected)
        dx, dgate = dprojected.chunk(2, -1)
        direct = (w.skip, None if w.skip is None else u)
        norm = (w.norm, *direct, settings.eps, settings.gate_bias)
        dy, _, dnorm, dskip, _ = gated_norm_backward_op(dz, y, gate, *norm, dgate)
        # `du` includes the direct term.
        du, *dcontrols, dbefore = scan_backward_op(
            dy.view(heads.shape), dafter, heads, *controls, before, *kept, cu_seqlens, w.skip
        )
        clock = (w.dt_bias, w.read_gate, w.write_gate, w.log_tau, None, None)
        options = (settings.ranges, settings.switches, needs.log_tau)
        ddyn, drw, ddt_bias, dgates, dlog_tau, _ = control_backward_op(
            *dcontrols, *logits, *clock, *options
        )
        del dy, dcontrols
        ddyn, drw, du = (each.flatten(0, 1) for each in (ddyn, drw, du.flatten(2)))
        du.addmm_(drw, w.rw)
        _, dconv, dconv_bias, dold = conv_backward_op(
            du.view(u.shape), dwindow, x, w.conv, w.conv_bias, window, cu_seqlens, sequence, dx
        )
        dx.flatten(0, 1).addmm_(ddyn, w.dyn)
        # In the order of `Weights`; None for those that are absent or frozen.
        dweights = (
            dconv,
            None if w.conv_bias is None else dconv_bias,
            ddyn.t() @ x.flatten(0, 1) if needs.dyn else None,
            ddyn.sum(0) if needs.dyn_bias else None,
            drw.t() @ u.flatten(0, 1) if needs.rw else None,
            ddt_bias,
            dgates[:1],
            dgates[1:],
            dlog_tau if needs.log_tau else None,
            None if w.skip is None or no_output else dskip,
            None if no_output else dnorm,
        )
        dbefore = None if before is None else dbefore
        dold = None if window is None else dold
        return None, dprojected, dbefore, dold, None, None, *dweights
