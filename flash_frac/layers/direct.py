"""A FracMixer's forward pass that calls its operators directly, without gradients.

For a short prompt, Python's overhead for modules, backend choice and checks exceeds the GPU's time
for the layer. The result is that of `FracMixer.forward`.
Letters: B batch, T time, E width, H heads, D head channels, I = H D.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.layers.checks import state_fits
from flash_frac.layers.mixer import FracMixer
from flash_frac.layers.norm import RMSNorm
from flash_frac.layers.state import MixerState
from flash_frac.ops import ControlSettings
from flash_frac.ops.backends import FEWEST_TAPS, MOST_TAPS, MOST_WIDTH


def reads_directly(
    mixer: FracMixer, x: Tensor, norm: RMSNorm, state: MixerState | None = None
) -> bool:
    """Whether `read_directly` supports x (B, T, E): several tokens, no gradients, plain layers.

    Compilers get the general form, which they optimise themselves. So does a state of another model
    or batch: the kernels would read beyond its memory, and the general form says what is wrong.
    """
    return (
        x.shape[1] > 1
        and x.shape[0] > 0
        and not torch.compiler.is_compiling()
        and FEWEST_TAPS <= mixer.conv_kernel <= MOST_TAPS
        and max(mixer.num_heads * mixer.head_dim, mixer.hidden_size) <= MOST_WIDTH
        and state_fits(mixer, x, x.shape[0], state)
        and mixer.runs_directly(x, norm)
    )


def read_directly(
    mixer: FracMixer, x: Tensor, norm: RMSNorm, state: MixerState | None
) -> tuple[Tensor, MixerState]:
    """x + mixer(norm(x)) for x (B, T, E) without padding, and the state after it."""
    # Imported here, because these modules import triton.
    from flash_frac.ops.control.triton import control_op
    from flash_frac.ops.conv.triton import conv_op
    from flash_frac.ops.norm.triton import gated_norm_op, norm_op
    from flash_frac.ops.scan.triton import scan_op

    before, window = (None, None) if state is None else (x.contiguous() for x in state)
    x = x.contiguous()
    conv, out_norm = mixer.conv1d, mixer.out_norm
    normed = norm_op(x, norm.weight, norm.eps, x.dtype)
    inner_x, gate = F.linear(normed, mixer.in_proj.weight).chunk(2, -1)
    u, window = conv_op(inner_x, conv.weight, conv.bias, window, None, None)
    controls = control_op(
        F.linear(inner_x, mixer.dyn_proj.weight, mixer.dyn_proj.bias),
        mixer.norm_logits(F.linear(u, mixer.rw_proj.weight)),
        mixer.dt_bias,
        mixer.read_residual_logit,
        mixer.write_residual_scale,
        mixer.base_log_tau,
        None,
        None,
        *_kernel_settings(mixer.settings),
    )
    heads = u.view(*u.shape[:2], mixer.num_heads, mixer.head_dim)
    y, after, *_ = scan_op(heads, *controls, before, None)
    skip, direct = (None, None) if mixer.D is None else (mixer.D, u)
    y = gated_norm_op(
        y.view(u.shape), gate, out_norm.weight, skip, direct, out_norm.eps, out_norm.gate_bias
    )
    return x + F.linear(y, mixer.out_proj.weight), MixerState(after, window)


@lru_cache(maxsize=64)
def _kernel_settings(settings: ControlSettings) -> tuple[list[float], str]:
    from flash_frac.ops.control.triton import kernel_settings

    return kernel_settings(settings)
