"""Modules of torch alone: the mixer, its state and its norms, and the MLP after it."""

from flash_frac.layers.mixer import TIME_PARAMETERS, FracMixer
from flash_frac.layers.mlp import GatedMLP, add_mlp
from flash_frac.layers.norm import GatedRMSNorm, RMSNorm
from flash_frac.layers.state import MixerState
from flash_frac.ops import ConvOutput, causal_conv, rms_norm

__all__ = [
    "TIME_PARAMETERS",
    "ConvOutput",
    "FracMixer",
    "GatedMLP",
    "GatedRMSNorm",
    "MixerState",
    "RMSNorm",
    "add_mlp",
    "causal_conv",
    "rms_norm",
]
