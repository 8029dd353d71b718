"""Every kernel of the scan compiles, without a GPU, for Ampere, Hopper and Blackwell."""

import pytest
import triton
from flash_frac.ops.triton import mix, step, walk
from flash_frac.ops.triton.chunks import CHUNK, LEVELS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flash_frac.ops.arithmetic import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves no compiler")

FLOAT32 = {"read", "write", "log_decay", "total", "initial", "incoming", "final", "dfinal"}
FLOAT32 |= {"segment_state", "segment_total", "dinitial", "read_state", "write_state", "across"}
FLOAT32 |= {"dread", "dwrite", "dlog_decay", "state", "new_state"}
LOW = {"u", "dy", "y", "du", "x", "weights", "gamma", "read_in", "write_out", "chunk_states"}
LOW |= {"products"}


def compile_kernel(kernel, arch, dtype, constants, warps):
    """`constants` may name arguments as None, which specialises the kernel without them."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "table":
            signature[name] = "*i64"
        elif name in FLOAT32:
            signature[name] = "*fp32"
        else:
            signature[name] = f"*{dtype}" if name in LOW else "i32"
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 2})


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_scan_kernels_compile(arch, packed, dtype):
    sizes = {"M": 16, "BM": 16, "C": CHUNK, "PACKED": packed}
    sizes |= {"PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    sizes |= {} if packed else {"table": None}
    blocks = sizes | {"BD": 32 if dtype == "fp32" else 128}
    no_states, no_segments = (
        {"incoming": None, "chunk_states": None},
        {
            "segment_state": None,
            "segment_total": None,
        },
    )
    cases = [
        (mix.mix_kernel, sizes | {"LEVELS": LEVELS}, 2),
        (mix.mix_backward_kernel, sizes | {"LEVELS": LEVELS, "PARTS": 2}, 2),
        (walk.states_kernel, blocks | {"BACKWARD": True, "EVERY_CHUNK": False} | no_states, 4),
        (walk.states_kernel, blocks | {"BACKWARD": False, "EVERY_CHUNK": True} | no_segments, 4),
        (walk.output_kernel, blocks, 4),
        (walk.output_kernel, blocks | {"initial": None}, 4),
        (walk.gradient_kernel, blocks, 4),
        (walk.pass_kernel, {"BM": 16, "BD": 256, "AHEAD": 8}, 1),
        (step.step_kernel, {"M": 16, "BM": 16, "BD": 64}, 1),
    ]
    for kernel, constants, warps in cases:
        assert "cubin" in compile_kernel(kernel, arch, dtype, constants, warps).asm
