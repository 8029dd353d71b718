"""One token of a FracMixer by kernels that read its weights, without gradients.

Letters: B batch, E width, H heads, D head channels, I = H D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from flash_frac.layers.branches import in_branches
from flash_frac.layers.norm import RMSNorm
from flash_frac.layers.plain import Stored, linear, stored
from flash_frac.layers.state import MixerState
from flash_frac.ops.decode.fused import output_step, pair_step, projection_step
from flash_frac.ops.decode.plan import step_kind, step_plan
from flash_frac.ops.decode.triton import empty_squares, fused_control_step, fused_conv_step

if TYPE_CHECKING:
    from flash_frac.layers.mixer import FracMixer


def step(
    mixer: FracMixer, x: Tensor, norm: RMSNorm, state: MixerState, mask: Tensor | None
) -> Tensor:
    """x + mixer(norm(x)), x (B, E); `state` becomes the next state, except where mask (B,) is 0."""
    layers = (mixer.in_proj, mixer.rw_proj, mixer.dyn_proj, mixer.out_proj)
    weights = [weight for layer in layers if (weight := stored(layer.weight)) is not None]
    assert len(weights) == len(layers), "steps_in_place"
    kind = None
    # Norms of the logits would stand between kernels that are fused.
    if mixer.rw_norm is None:
        kind = step_kind(x, [weight.values for weight in weights])
    if kind is not None:
        return _fused(mixer, x, norm, state, mask, weights, kind)
    inner_x, gate = linear(x, mixer.in_proj, norm).chunk(2, -1)
    conv = mixer.conv1d

    def convolve() -> tuple[Tensor, Tensor]:
        u = fused_conv_step(inner_x, conv.weight, conv.bias, state.conv, mask=mask)
        return u, mixer.norm_logits(linear(u, mixer.rw_proj))

    (u, rw_logits), dyn_logits = in_branches(convolve, lambda: linear(inner_x, mixer.dyn_proj))
    gated = _scan(mixer, u, dyn_logits, rw_logits, gate, state, mask)
    return linear(gated, mixer.out_proj, mixer.out_norm, x)


def _fused(
    mixer: FracMixer,
    x: Tensor,
    norm: RMSNorm,
    state: MixerState,
    mask: Tensor | None,
    weights: list[Stored],
    kind: str,
) -> Tensor:
    """`step` in four kernels, or five for products of many vectors."""
    conv, out_norm = mixer.conv1d, mixer.out_norm
    of_in, of_rw, of_dyn, of_out = weights
    projected, u = projection_step(
        x,
        of_in.values,
        norm.weight,
        norm.eps,
        conv.weight,
        conv.bias,
        state.conv,
        kind=kind,
        scale=of_in.scale,
        mask=mask,
    )
    inner_x, gate = projected.chunk(2, -1)
    rw_logits, dyn_logits = pair_step(
        u,
        of_rw.values,
        inner_x,
        of_dyn.values,
        mixer.dyn_proj.bias,
        kind=kind,
        scale=of_rw.scale,
        other_scale=of_dyn.scale,
    )
    # The scan's kernel does the first part of the norm, for a product, which has no such part.
    squares = empty_squares(u, mixer.num_heads) if kind == "product" else None
    first = {"norm_weight": None if squares is None else out_norm.weight, "squares": squares}
    early = step_plan(x.device).early
    gated = _scan(mixer, u, dyn_logits, rw_logits, gate, state, mask, early=early, **first)
    rest = {"norm_weight": out_norm.weight if squares is None else None, "squares": squares}
    return output_step(gated, of_out.values, x, out_norm.eps, scale=of_out.scale, **rest)


def _scan(
    mixer: FracMixer,
    u: Tensor,
    dyn_logits: Tensor,
    rw_logits: Tensor,
    gate: Tensor,
    state: MixerState,
    mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """Controls, scan, direct term and gate, (B, I)."""
    return fused_control_step(
        u.unflatten(-1, (mixer.num_heads, -1)),
        dyn_logits,
        rw_logits,
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
        **options,
    ).flatten(1)
