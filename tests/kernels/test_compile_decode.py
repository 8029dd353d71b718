"""The kernels for one token compile for Ampere, Hopper and Blackwell, without a GPU."""

import pytest
import triton
from flash_frac.ops.triton.control import control_constants
from flash_frac.ops.triton.decode import control_step_kernel, conv_step_kernel
from flash_frac.ops.triton.gemv import gemv_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_frac.ops import ControlSettings
from flash_frac.ops.arithmetic import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves no compiler")

RANGES = ("dt_min", "dt_max", "alpha_min", "alpha_span", "lambda_min", "lambda_max", "lambda_span")
FLOATS = (*RANGES, "rho_min", "rho_max", "gate_bias", "eps")
SWITCHES = ("K", "LAMBDA", "READ_PRIOR", "WRITE_PRIOR", "NORMALIZATION", "BETA")
FLOAT32 = ("p_read_gate", "p_write_gate", "p_log_tau", "p_state", "p_skip")
REST = ControlSettings(
    alpha_fixed=0.5,
    lambda_map="softplus",
    read_prior=False,
    normalization="sigmoid",
    beta="exact_zoh",
)


def step(settings, **constants):
    switches = control_constants(settings)[-len(SWITCHES) :]
    return control_step_kernel, dict(zip(SWITCHES, switches, strict=True)) | constants


# Kernel and constants, pointers that are None among them; the first of each as in the 1.3B model.
CASES = [
    step(ControlSettings(), M=16, BM=16, BD=64, p_mask=None),
    step(ControlSettings(normalization="none"), M=4, BM=4, BD=16, p_skip=None),
    step(REST, M=31, BM=32, BD=64, p_gate=None, p_skip=None),
    (conv_step_kernel, {"K": 4, "BI": 128, "p_mask": None}),
    (conv_step_kernel, {"K": 1, "BI": 128, "p_bias": None}),
    (conv_step_kernel, {"K": 8, "BI": 128}),
    (gemv_kernel, {"E": 2048, "BO": 4, "BE": 2048, "p_bias": None, "p_residual": None}),
    (gemv_kernel, {"E": 4097, "BO": 1, "BE": 2048, "p_norm": None}),
]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_compiles(case, dtype, arch):
    kernel, constants = CASES[case]
    float32 = (*FLOAT32, "p_bias") if kernel is control_step_kernel else FLOAT32

    def type_of(name):
        if name in constants:
            return "constexpr"
        if not name.startswith("p_"):
            return "fp32" if name in FLOATS else "i32"
        return "*i64" if name == "p_mask" else "*fp32" if name in float32 else f"*{dtype}"

    signature = {name: type_of(name) for name in kernel.arg_names}
    # As at a launch with sizes of the published models: vectors of 16 bytes.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("D", "num_channels", "stride_x", "stride_gate")
    }
    warps = 4 if kernel is gemv_kernel else 1
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}
    )
    assert compiled.asm["cubin"]
    assert f".target sm_{arch}" in compiled.asm["ptx"]
