"""Modules of torch alone: the mixer, its state, its norm and its convolution."""

from flash_frac.layers.conv import ConvOutput, causal_conv
from flash_frac.layers.mixer import TIME_PARAMETERS, FracMixer
from flash_frac.layers.norm import GatedRMSNorm, RMSNorm, rms_norm
from flash_frac.layers.state import MixerState

__all__ = [
    "TIME_PARAMETERS",
    "ConvOutput",
    "FracMixer",
    "GatedRMSNorm",
    "MixerState",
    "RMSNorm",
    "causal_conv",
    "rms_norm",
]
