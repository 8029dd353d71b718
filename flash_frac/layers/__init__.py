"""Layers that need only torch: mixers, their state and norms, and the MLP."""

from flash_frac.layers.base import RecurrentMixer
from flash_frac.layers.delta import DELTA_TIME_PARAMETERS, DeltaMixer
from flash_frac.layers.layer import DeltaLayer, FracLayer
from flash_frac.layers.mixer import TIME_PARAMETERS, FracMixer
from flash_frac.layers.mlp import GatedMLP, add_mlp
from flash_frac.layers.norm import GatedRMSNorm, RMSNorm
from flash_frac.layers.state import MixerState
from flash_frac.ops import ConvOutput, causal_conv, rms_norm

__all__ = [
    "DELTA_TIME_PARAMETERS",
    "TIME_PARAMETERS",
    "ConvOutput",
    "DeltaLayer",
    "DeltaMixer",
    "FracLayer",
    "FracMixer",
    "GatedMLP",
    "GatedRMSNorm",
    "MixerState",
    "RMSNorm",
    "RecurrentMixer",
    "add_mlp",
    "causal_conv",
    "rms_norm",
]
