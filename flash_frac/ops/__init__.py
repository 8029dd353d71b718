"""Pure functions of tensors, one folder per operator.

`backends` chooses the implementation of each operator.
"""

from flash_frac.ops.backends import BACKENDS, Backend, resolve_backend, uses_triton
from flash_frac.ops.control.api import controls_from_logits
from flash_frac.ops.control.reference import (
    Controls,
    ControlSettings,
    Dynamics,
    controls,
    dilate,
    dynamics,
    log_prior,
    mode_log_decay,
    prior_controls,
)
from flash_frac.ops.conv.api import ConvOutput, causal_conv
from flash_frac.ops.delta.api import delta_scan, delta_step
from flash_frac.ops.norm.api import gated_norm, norm
from flash_frac.ops.norm.reference import rms_norm
from flash_frac.ops.sample.api import sample
from flash_frac.ops.scan.api import ScanOutput, check_cu_seqlens, frac_scan, frac_step
from flash_frac.ops.swiglu.api import swiglu

__all__ = [
    "BACKENDS",
    "Backend",
    "ControlSettings",
    "Controls",
    "ConvOutput",
    "Dynamics",
    "ScanOutput",
    "causal_conv",
    "check_cu_seqlens",
    "controls",
    "controls_from_logits",
    "delta_scan",
    "delta_step",
    "dilate",
    "dynamics",
    "frac_scan",
    "frac_step",
    "gated_norm",
    "log_prior",
    "mode_log_decay",
    "norm",
    "prior_controls",
    "resolve_backend",
    "rms_norm",
    "sample",
    "swiglu",
    "uses_triton",
]
