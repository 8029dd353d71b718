"""FracLayer and DeltaLayer: mixers that return a tensor, for use in your own model.

They are drop-in replacements for mamba_ssm's Mamba2 or fla's GatedDeltaNet: in nn.Sequential, or as
`x + layer(norm(x))`. For the state, call `layer.mixer(x, state=state)`.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn

from flash_frac.layers.delta import DeltaMixer
from flash_frac.layers.mixer import FracMixer

# Argument names of mamba_ssm and fla that differ from our mixers'.
_ALIASES = {
    "d_state": "num_modes",
    "state_size": "num_modes",
    "d_conv": "conv_kernel",
    "conv_size": "conv_kernel",
    "headdim": "head_dim",
    "nheads": "num_heads",
    "expand": "head_dim",
}


class _TensorLayer(nn.Module):
    """A mixer that returns only its output."""

    mixer_class: ClassVar[type[FracMixer] | type[DeltaMixer]]

    def __init__(
        self, d_model: int | None = None, /, *, hidden_size: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        # By name, d_model is among the options, so that giving it twice reaches this check.
        given = (d_model, hidden_size, options.pop("d_model", None))
        widths = [width for width in given if width is not None]
        if len(widths) != 1:
            raise TypeError(
                f"{kind} needs one width: {kind}(256), d_model or hidden_size; got {len(widths)}"
            )
        known = signature(self.mixer_class).parameters
        for name in options:
            if name not in known:
                meant = _ALIASES.get(name)
                remedy = f"use {meant}" if meant in known else f"see help({kind})"
                raise TypeError(f"{kind} has no argument {name}; {remedy}")
        self.mixer = self.mixer_class(widths[0], **options)

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        elapsed: Tensor | None = None,
    ) -> Tensor:
        """Mix whole sequences x (B, T, E) into y (B, T, E); the arguments are the mixer's."""
        y, _ = self.mixer(x, attention_mask=attention_mask, cu_seqlens=cu_seqlens, elapsed=elapsed)
        return y


class FracLayer(_TensorLayer):
    """A `FracMixer` that returns a tensor.

    Args:
        d_model: width E of input and output; `hidden_size` is the same by another name.
        options: the other arguments of `FracMixer`, by name.

    Attributes:
        mixer: the `FracMixer`, whose own call takes and returns a state.

    Example:
        >>> net = nn.Sequential(nn.RMSNorm(256), FracLayer(256))
        >>> x = torch.randn(2, 100, 256)
        >>> y = x + net(x)
        >>> y, state = net[1].mixer(x)
    """

    mixer_class = FracMixer
    mixer: FracMixer


class DeltaLayer(_TensorLayer):
    """A `DeltaMixer` that returns a tensor.

    Args:
        d_model: width E of input and output; `hidden_size` is the same by another name.
        options: the other arguments of `DeltaMixer`, by name.

    Attributes:
        mixer: the `DeltaMixer`, whose own call takes and returns a state.

    Example:
        >>> y = DeltaLayer(256)(torch.randn(2, 100, 256))
    """

    mixer_class = DeltaMixer
    mixer: DeltaMixer
