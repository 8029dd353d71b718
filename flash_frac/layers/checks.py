"""Check the inputs of FracMixer and DeltaMixer; errors name the argument, its value and a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flash_frac.layers.conv import CausalConv1d
from flash_frac.layers.state import MixerState
from flash_frac.ops import check_cu_seqlens

if TYPE_CHECKING:
    from flash_frac.layers.delta import DeltaMixer
    from flash_frac.layers.mixer import FracMixer


def can_be_read(x: Tensor) -> bool:
    """Whether checking a tensor's values stalls nothing: it is on a CPU and is not being traced.

    Tensors of subclasses may have no values, such as those of FakeTensorMode.
    """
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


def state_fits(mixer: FracMixer, x: Tensor, num: int, state: MixerState | None) -> bool:
    """Whether a state is None, or one of `num` sequences like x, so that kernels may read it."""
    if state is None:
        return True
    heads, channels = mixer.num_heads, mixer.head_dim
    return (
        state.recurrent.device == state.conv.device == x.device
        and state.recurrent.shape == (num, heads, mixer.num_modes, channels)
        and state.recurrent.dtype == torch.float32
        and state.conv.shape == (num, heads * channels, mixer.conv_kernel - 1)
    )


def check_mask(mask: Tensor) -> None:
    """Raise a ValueError unless a mask is 1 at tokens and 0 at padding; this waits for a GPU.

    A mask that is added to scores, 0 at tokens and negative at padding, means the opposite.
    """
    if mask.numel() and not bool(((mask == 0) | (mask == 1)).all()):
        low, high = (float(x) for x in mask.aminmax())
        raise ValueError(
            "attention_mask must be 1 at tokens and 0 at padding, got values from "
            f"{low:g} to {high:g}"
        )


def check_inputs(
    mixer: FracMixer | DeltaMixer,
    convolutions: Mapping[str, nn.Module],
    x: Tensor,
    state: MixerState | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    elapsed: Tensor | None,
) -> None:
    """Raise a ValueError unless the arguments of `forward` fit the mixer and each other.

    `convolutions` are its convolutions by name; the state holds their windows, concatenated.
    """
    channels = 0
    for name, conv in convolutions.items():
        if not isinstance(conv, CausalConv1d):
            raise ValueError(
                f"{name} must be a CausalConv1d, got {type(conv).__name__}: adapters on the "
                f"convolution are not supported; leave {name} out of target_modules"
            )
        channels += conv.in_channels
    if x.ndim != 3 or x.shape[-1] != mixer.hidden_size:
        raise ValueError(f"x must have shape (B, T, {mixer.hidden_size}), got {tuple(x.shape)}")
    if attention_mask is not None and cu_seqlens is not None:
        raise ValueError(
            "attention_mask and cu_seqlens cannot be combined; packed rows need no mask"
        )
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        raise ValueError(
            f"attention_mask must have shape {tuple(x.shape[:2])}, "
            f"got {tuple(attention_mask.shape)}"
        )
    if attention_mask is not None and can_be_read(attention_mask):
        check_mask(attention_mask)
    if elapsed is not None and elapsed.shape != x.shape[:2]:
        raise ValueError(
            f"elapsed must have shape {tuple(x.shape[:2])}, got {tuple(elapsed.shape)}"
        )
    if elapsed is not None and can_be_read(elapsed) and not bool((elapsed >= 0).all()):
        raise ValueError(f"elapsed must be at least 0, got {float(elapsed.amin()):g}")
    if mixer.context_group is not None and attention_mask is not None:
        raise ValueError(
            "attention_mask must be None with a context_group; leave the mask out and pad the "
            "end of the row, where it changes nothing before it, or pack with cu_seqlens"
        )
    if mixer.context_group is not None and state is not None:
        raise ValueError(
            "state must be None with a context_group: a slice continues that of the previous "
            "rank; set context_group to None to continue from a state"
        )
    num = x.shape[0] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, x)
    if state is None:
        return
    if not isinstance(state, MixerState):
        raise ValueError(
            "state must be the MixerState that an earlier call returned, got "
            f"{type(state).__name__}"
        )
    expected = (num, channels, mixer.conv_kernel - 1)
    if state.conv.shape != expected:
        raise ValueError(
            f"state.conv must have shape {expected}, got {tuple(state.conv.shape)}; "
            "is the state from another model or batch?"
        )
