"""The convolution and norm kernels compile for Ampere, Hopper and Blackwell, without a GPU."""

import pytest
import triton
from flash_frac.ops.triton import conv, norm

from flash_frac.ops.arithmetic import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves no compiler")

PARAMETERS = ("p_weight", "p_bias", "p_skip", "p_partial", "p_dweight", "p_dskip")
NO_WINDOW, NOT_PACKED = ("p_window", "p_dnew"), ("p_cu_seqlens", "p_sequence")
NO_SKIP = ("p_skip", "p_u", "p_du", "p_dskip")
SEGMENT = {"L": conv.SEGMENT, "BI": conv.CHANNELS}
FORWARD = {**SEGMENT, "U": conv.FORWARD_ROWS}
BACKWARD = {**SEGMENT, "U": conv.BACKWARD_ROWS}
ROW, ROWS = {"BR": 1, "BN": 4096}, {"BR": 32, "BN": 64}

# Kernel, constants, warps, and the pointers that are None.
CASES = [
    (conv.conv_forward_kernel, {**FORWARD, "K": 4}, 4, (*NO_WINDOW, *NOT_PACKED)),
    (conv.conv_forward_kernel, {**FORWARD, "K": 4}, 4, ()),
    (conv.conv_forward_kernel, {**FORWARD, "K": 1}, 4, ("p_bias", *NO_WINDOW, *NOT_PACKED)),
    (conv.conv_forward_kernel, {**FORWARD, "K": 8, "BI": 1}, 1, NOT_PACKED),
    (conv.conv_backward_kernel, {**BACKWARD, "K": 4}, 4, (*NO_WINDOW, *NOT_PACKED)),
    (conv.conv_backward_kernel, {**BACKWARD, "K": 4}, 4, ()),
    (conv.conv_backward_kernel, {**BACKWARD, "K": 1}, 4, ("p_bias", *NO_WINDOW, *NOT_PACKED)),
    (conv.conv_backward_kernel, {**BACKWARD, "K": 2, "BI": 1}, 1, NOT_PACKED),
    (conv.conv_window_backward_kernel, {"K": 8, "BI": 256}, 4, ()),
    (norm.norm_forward_kernel, ROW, 16, ()),
    (norm.norm_forward_kernel, ROWS, 8, ("p_residual", "p_z")),
    (norm.norm_backward_kernel, ROW, 16, ()),
    (norm.norm_backward_kernel, ROWS, 8, ("p_dz",)),
    (norm.gated_norm_forward_kernel, ROW, 16, ()),
    (norm.gated_norm_forward_kernel, ROWS, 8, NO_SKIP),
    (norm.gated_norm_backward_kernel, ROW, 16, ()),
    (norm.gated_norm_backward_kernel, ROWS, 8, NO_SKIP),
]


def argument_type(name, dtype):
    if name in ("eps", "gate_bias"):
        return "fp32"
    if not name.startswith("p_"):
        return "i32"
    if name in NOT_PACKED:
        return "*i64" if name == "p_cu_seqlens" else "*i32"
    return "*fp32" if name in PARAMETERS else f"*{dtype}"


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join([c[0].__name__, *map(str, c[1].values())])
)
def test_compiles(case, dtype, arch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants, num_warps, absent = case
    constants = {**constants, **{name: None for name in absent if name in kernel.arg_names}}
    signature = {
        name: "constexpr" if name in constants else argument_type(name, dtype)
        for name in kernel.arg_names
    }
    # As at a launch with sizes of the published models: vectors of 16 bytes.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("num_channels", "size", "stride_t")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    assert compiled.asm["cubin"]
    assert f".target sm_{arch}" in compiled.asm["ptx"]
