"""The kernels of the controls compile for the GPUs we name, without one being here."""

import pytest
from flash_frac.ops.triton.control import control_backward_kernel, control_forward_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from flash_frac.ops.arithmetic import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves no compiler")

# The 1.3B model in training.
CONSTANTS = {
    "H": 16,
    "M": 16,
    "K": 3,
    "LAMBDA": "sigmoid",
    "READ_PRIOR": True,
    "WRITE_PRIOR": True,
    "NORMALIZATION": "softmax",
    "BETA": "one_minus_rho",
    "BT": 2,
    "BH": 16,
    "BM": 16,
    "p_prior": None,
    "p_mask": None,
    "p_dprior": None,
    "p_dlog_tau": None,
}
# All that those leave out.
REST = {
    "H": 5,
    "M": 31,
    "K": 2,
    "LAMBDA": "softplus",
    "READ_PRIOR": False,
    "NORMALIZATION": "sigmoid",
    "BETA": "exact_zoh",
    "BH": 8,
    "BM": 32,
    "p_prior": "tensor",
    "p_mask": "tensor",
    "p_dprior": "tensor",
    "p_dlog_tau": "tensor",
}
IN_MODEL_DTYPE = ("p_dyn", "p_rw", "p_ddyn", "p_drw", "p_read", "p_write", "p_dread", "p_dwrite")


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("changes", [{}, REST], ids=["usual", "rest"])
@pytest.mark.parametrize("kernel", [control_forward_kernel, control_backward_kernel])
def test_compiles(kernel, changes, architecture):
    constants = {n: v for n, v in (CONSTANTS | changes).items() if n in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if value != "tensor"}

    def type_of(name):
        if name in constants:
            return "constexpr"
        if not name.startswith("p_"):
            return "i32" if name == "T" else "fp32"
        return "*bf16" if name in IN_MODEL_DTYPE else "*i64" if name == "p_mask" else "*fp32"

    signature = {name: type_of(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", architecture, 32)
    assert compile(source, target=target, options={"num_warps": 1}).asm["cubin"]
