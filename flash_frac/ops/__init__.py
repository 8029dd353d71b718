"""Pure functions of tensors: the scan, its one-token step, and the controls that feed it."""

from flash_frac.ops.api import (
    BACKENDS,
    Backend,
    ScanOutput,
    check_cu_seqlens,
    frac_scan,
    frac_step,
    resolve_backend,
    uses_triton,
)
from flash_frac.ops.control import (
    Controls,
    ControlSettings,
    Dynamics,
    controls,
    dilate,
    dynamics,
    log_prior,
    mode_log_decay,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "ControlSettings",
    "Controls",
    "Dynamics",
    "ScanOutput",
    "check_cu_seqlens",
    "controls",
    "dilate",
    "dynamics",
    "frac_scan",
    "frac_step",
    "log_prior",
    "mode_log_decay",
    "resolve_backend",
    "uses_triton",
]
