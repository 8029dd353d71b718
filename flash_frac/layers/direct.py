"""A FracMixer's forward pass that calls its operators directly, without gradients.

For a short prompt, Python's overhead for modules, backend choice and checks exceeds the GPU's time
for the layer. The result is that of `FracMixer.forward`.
Letters: B batch, T time, E width, H heads, D head channels, I = H D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.layers.body import compute_body, settings_of, weights_of
from flash_frac.layers.checks import state_fits
from flash_frac.layers.mixer import FracMixer
from flash_frac.layers.norm import RMSNorm
from flash_frac.layers.state import MixerState
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
    # Imported here, because this module imports triton.
    from flash_frac.ops.norm.triton import norm_op

    before, window = (None, None) if state is None else (x.contiguous() for x in state)
    x = x.contiguous()
    normed = norm_op(x, norm.weight, norm.eps, x.dtype)
    projected = F.linear(normed, mixer.in_proj.weight)
    given = (weights_of(mixer), settings_of(mixer), projected, before, window)
    z, after, window = compute_body(*given, norm_logits=mixer.norm_logits)[:3]
    return x + F.linear(z, mixer.out_proj.weight), MixerState(after, window)
