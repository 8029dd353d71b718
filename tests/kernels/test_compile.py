"""All launches compile for Ampere, Hopper and Blackwell, without a GPU.

Launches are recorded from the operators themselves, on CPU tensors: signatures, alignments and
constants are those of real calls. Sizes are those of the 1.3B model, except that scans have two
heads of 64 channels, because larger kernels take longer to compile.
"""

import importlib
import pkgutil
import random
import re
from functools import partial

import pytest
import torch
from triton.runtime.jit import JITFunction

import flash_frac.ops
from flash_frac.ops import ControlSettings
from flash_frac.ops.arithmetic import INTERPRETED
from flash_frac.ops.attention.triton import attend_step_op
from flash_frac.ops.control.triton import control_backward_op, control_op, kernel_settings
from flash_frac.ops.conv.triton import conv_backward_op, conv_op, masked_conv_op
from flash_frac.ops.decode.fused import output_step_op, pair_step_op, projection_step_op
from flash_frac.ops.decode.linear import norm_linear_op, norm_swiglu_op
from flash_frac.ops.decode.triton import control_step_op, conv_step_op, empty_squares
from flash_frac.ops.delta import plan as delta_plan
from flash_frac.ops.delta.step import delta_step_op, fused_delta_step_op
from flash_frac.ops.delta.triton import delta_backward_op, delta_op
from flash_frac.ops.loss.kernels import cross_entropy_
from flash_frac.ops.norm.triton import (
    gated_norm_backward_op,
    gated_norm_op,
    norm_backward_op,
    norm_op,
)
from flash_frac.ops.sample.reference import WIDTH
from flash_frac.ops.sample.triton import sample_op
from flash_frac.ops.scan import tuning
from flash_frac.ops.scan.plan import forget_plans
from flash_frac.ops.scan.step import step_op
from flash_frac.ops.scan.triton import scan_backward_op, scan_op
from flash_frac.ops.swiglu.triton import swiglu_backward_op, swiglu_op
from flash_frac.ops.testing import random_inputs
from tests.kernels.launches import record

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves no compiler")

LOW, FULL = torch.bfloat16, torch.float32
H, M, D = 16, 16, 256
# The switches that the published models do not use.
REST = ControlSettings(
    alpha_fixed=0.5,
    lambda_map="softplus",
    read_prior=False,
    normalization="sigmoid",
    beta="exact_zoh",
)
EQUAL_VARIANCE = ControlSettings(beta="equal_variance")
# Bytes of shared memory that a program may use on Ampere (consumer cards) and on Hopper.
AMPERE_MEMORY, HOPPER_MEMORY = 99 * 1024, 227 * 1024


def empty(*shape, dtype=FULL):
    return torch.empty(shape, dtype=dtype)


def scan(dtype, *, time=64, packed=False, modes=M, channels=64):
    inputs = random_inputs(1, time, 2, modes, channels, dtype=dtype)
    bounds = torch.tensor([0, 7, time]) if packed else None
    initial = empty(2, 2, modes, channels) if packed else None
    y, final, *kept = scan_op.kernel(*inputs, initial, bounds)
    skip = empty(2, channels) if packed else None
    scan_backward_op.kernel(y, final if packed else None, *inputs, initial, *kept, bounds, skip)


def step(dtype):
    token = [empty(2, H, width, dtype=dtype) for width in (D, M, M)]
    step_op.kernel(*token, empty(2, H, M), empty(2, H, M, D))


def delta(dtype, *, batch=1, time=128, heads=2, packed=False, keys=64, channels=64):
    size = (batch, time, heads)
    q, k, v = (empty(*size, width, dtype=dtype) for width in (keys, keys, channels))
    inputs = (q, k, v, empty(*size, dtype=dtype), empty(*size))
    bounds = torch.tensor([0, 7, time]) if packed else None
    initial = empty(2, heads, keys, channels) if packed else None
    y, final = delta_op.kernel(*inputs, initial, bounds)
    delta_backward_op.kernel(y, final if packed else None, *inputs, initial, bounds)


def delta_decode(dtype, *, keys=96, channels=192):
    token = [empty(2, H, width, dtype=dtype) for width in (keys, keys, channels)]
    token += [empty(2, H, dtype=dtype), empty(2, H)]
    state = empty(2, H, keys, channels)
    delta_step_op.kernel(*token, state)
    qkv, a = empty(2, H * (2 * keys + channels), dtype=dtype), empty(2, H, dtype=dtype)
    gating = (empty(2, H * channels, dtype=dtype), empty(channels))
    fused_delta_step_op.kernel(qkv, a, a, empty(H), empty(H), state, None, *gating, 1e-5)


def control_inputs(dtype, settings, *size, modes=M, own_tau=False):
    num_dynamics = 3 if settings.alpha_fixed is None else 2
    logits = [empty(*size, n * H, dtype=dtype) for n in (num_dynamics, 2 * modes)]
    log_tau = empty(H, modes) if own_tau else empty(modes)
    return *logits, empty(H), empty(1), empty(1), log_tau


def controls(dtype, settings=None, *, time=64, modes=M, own_tau=False):
    """With other settings than the default's: with a prior, a mask and learned timescales too."""
    rest = settings is not None
    settings = settings or ControlSettings()
    size = (1, time)
    inputs = control_inputs(dtype, settings, *size, modes=modes, own_tau=own_tau)
    prior, mask = empty(*size, H, modes), torch.ones(size, dtype=torch.int64)
    given = (prior, mask) if rest else (None, None)
    arguments = (*inputs, *given, *kernel_settings(settings))
    outputs = control_op.kernel(*arguments)
    control_backward_op.kernel(*outputs, *arguments, rest)


def conv(dtype, *, time=64, packed=False, window=True, taps=4, channels=H * D):
    x = empty(1, time, 2 * channels, dtype=dtype).chunk(2, -1)[0]
    old = empty(2 if packed else 1, channels, taps - 1, dtype=dtype) if window else None
    bounds = torch.tensor([0, 7, time]) if packed else None
    sequence = torch.zeros(time, dtype=torch.int32) if packed else None
    bias = empty(channels) if window else None
    inputs = (x, empty(channels, 1, taps), bias, old, bounds, sequence)
    u, new = conv_op.kernel(*inputs)
    both = empty(1, time, 2 * channels, dtype=dtype)
    dx = both.chunk(2, -1)[0] if window else None
    conv_backward_op.kernel(u, new if window else None, *inputs, dx)
    if not packed:
        masked_conv_op.kernel(*inputs[:4], torch.ones(1, time, dtype=torch.bool))


def norms(dtype, *, time=64, size=H * D, skip=False):
    x, both, weight = empty(1, time, size, dtype=dtype), empty(1, time, 2 * size), empty(size)
    norm_backward_op.kernel(norm_op.kernel(x, weight, 1e-6, dtype), x, weight, 1e-6)
    gate = both.to(dtype).chunk(2, -1)[1]
    direct = (empty(H, size // H), x) if skip else (None, None)
    arguments = (x, gate, weight, *direct, 1e-6, 0.5)
    for dgate in (None, gate):
        gated_norm_backward_op.kernel(gated_norm_op.kernel(*arguments), *arguments, dgate)


def swiglu(dtype, *, time=64, size=3 * D, halves=False):
    both = empty(1, time, 2 * size, dtype=dtype).chunk(2, -1)
    gate, up = both if halves else (x.contiguous() for x in both)
    swiglu_backward_op.kernel(swiglu_op.kernel(gate, up), gate, up)


def decode(dtype, settings=None, *, taps=4, modes=M, channels=D, own_tau=False):
    rest = settings is not None
    settings = settings or ControlSettings()
    inner, mask = H * channels, torch.ones(2) if rest else None
    x, gate = empty(2, 2 * inner, dtype=dtype).chunk(2, -1)
    window = empty(2, inner, taps - 1, dtype=dtype)
    u = conv_step_op.kernel(x, empty(inner, 1, taps), None if rest else empty(inner), window, mask)
    inputs = control_inputs(dtype, settings, 2, modes=modes, own_tau=own_tau)
    gating = (None, 0.0, None) if rest else (gate, 0.5, empty(H, channels))
    state = empty(2, H, modes, channels)
    u = u.unflatten(-1, (H, channels))
    norm = (None, None, False)
    control_step_op.kernel(u, *inputs, state, mask, *gating, *norm, *kernel_settings(settings))
    num_outputs, size = (48, inner + 1) if rest else (2048, inner)
    x, weight = empty(2, size, dtype=dtype), empty(num_outputs, size, dtype=dtype)
    residual = empty(2, num_outputs, dtype=dtype)
    parts = (None, empty(size), 1e-6, None) if rest else (empty(num_outputs), None, 0.0, residual)
    norm_linear_op.kernel(x, weight, None, *parts)
    norm_swiglu_op.kernel(x, weight, weight, None, None, empty(size), 1e-6)


def fused(dtype, kind="product", *, num=64, early=False, size=2048, channels=D):
    """A step of the 1.3B model whose linear layers are fused."""
    product, settings, inner = kind == "product", ControlSettings(), H * channels
    conv = (empty(inner, 1, 4, dtype=dtype), empty(inner, dtype=dtype))
    window, norm = empty(num, inner, 3, dtype=dtype), empty(size, dtype=dtype)
    x, weight = empty(num, size, dtype=dtype), empty(2 * inner, size, dtype=dtype)
    given = (x, weight, None, norm, 1e-6, *conv, window, None)
    y, u = projection_step_op.kernel(*given, kind, early)
    inner_x, gate = y.chunk(2, -1)
    weights = [empty(n, inner, dtype=dtype) for n in (2 * H * M, 3 * H)]
    others = (inner_x, weights[1], None, empty(3 * H, dtype=dtype))
    rw, dyn = pair_step_op.kernel(u, weights[0], None, *others, kind, early)
    times = (empty(H), empty(1), empty(1), empty(M), empty(num, H, M, channels), None)
    norm = empty(inner, dtype=dtype)
    squares = empty_squares(u, H) if product else None
    rest = (gate, 0.5, empty(H, channels), norm if product else None, squares, early)
    u = u.unflatten(-1, (H, channels))
    z = control_step_op.kernel(u, dyn, rw, *times, *rest, *kernel_settings(settings)).flatten(1)
    weight = empty(size, inner, dtype=dtype)
    if product:
        output_step_op.kernel(z, weight, x, squares, 1e-6, early)
    else:
        norm_linear_op.kernel(z, weight, None, None, norm, 1e-6, x, early)


def quantised(dtype, kind=torch.int8, *, num_outputs=2048, size=H * D):
    x, norm, scale = empty(2, size, dtype=dtype), empty(size), empty(num_outputs)
    weight, residual = empty(num_outputs, size).to(kind), empty(2, num_outputs, dtype=dtype)
    norm_linear_op.kernel(x, weight, scale, None, norm, 1e-6, residual)
    norm_swiglu_op.kernel(x, weight, weight, scale, scale, norm, 1e-6)


def attend(dtype, *, heads=H, key_heads=4, columns=4096, channels=128):
    keys = empty(2, key_heads, columns, channels, dtype=dtype)
    positions = torch.zeros(2, dtype=torch.int64)
    attend_step_op.kernel(empty(2, heads, channels, dtype=dtype), keys, keys, positions, 0.1)


def sample(dtype, *, vocabulary=50_280):
    seen = torch.zeros(2, vocabulary, dtype=torch.bool)
    table = torch.zeros(2, WIDTH, dtype=torch.int32)
    sample_op.kernel(empty(2, vocabulary, dtype=dtype), table, seen)


def loss(dtype, *, vocabulary=32000):
    cross_entropy_(empty(64, vocabulary, dtype=dtype), torch.zeros(64).long(), -100, True)


# As in training and decoding with the published models; then what that leaves out: packed
# sequences with states, other switches, sizes that fill no block.
USUAL = {"scan": scan, "step": step, "controls": controls, "conv": conv, "norms": norms}
USUAL |= {"swiglu": swiglu, "decode": decode, "delta": delta, "delta decode": delta_decode}
USUAL |= {"attend": attend, "sample": sample, "loss": loss, "quantised": quantised}
USUAL |= {"fused": fused, "fused, one vector": lambda dtype: fused(dtype, "gemv", num=1)}
OTHER = {
    "scan": lambda dtype: scan(dtype, packed=True, modes=5, channels=40),
    "controls": lambda dtype: controls(dtype, REST, modes=31),
    "equal variance": lambda dtype: controls(dtype, EQUAL_VARIANCE),
    "own timescales": lambda dtype: controls(dtype, EQUAL_VARIANCE, modes=5, own_tau=True),
    "conv": lambda dtype: conv(dtype, packed=True, taps=3, channels=33),
    "two taps": lambda dtype: conv(dtype, window=False, taps=2, channels=1),
    "eight taps": lambda dtype: conv(dtype, window=False, taps=8),
    "norms": lambda dtype: norms(dtype, size=64, skip=True),
    "swiglu": lambda dtype: swiglu(dtype, size=33, halves=True),
    "decode": lambda dtype: decode(dtype, REST, taps=1, modes=31, channels=5),
    "decode equal variance": lambda dtype: decode(dtype, EQUAL_VARIANCE, own_tau=True),
    "delta": lambda dtype: delta(dtype, packed=True, keys=128, channels=256),
    "delta decode": lambda dtype: delta_decode(dtype, keys=128, channels=256),
    "quantised": lambda dtype: quantised(dtype, num_outputs=48, size=2049),
    "attend": lambda dtype: attend(dtype, heads=3, key_heads=3, columns=7, channels=200),
    "sample": lambda dtype: sample(dtype, vocabulary=33),
    "loss": lambda dtype: loss(dtype, vocabulary=50),
    "fused": lambda dtype: fused(dtype, num=9, size=200, channels=3),
}


def distinct(monkeypatch, function, arch=90):
    """One launch of every compilation that a call needs."""
    return {launch.key: launch for launch in record(monkeypatch, function, arch)}.values()


def compile_all(launches, memory=HOPPER_MEMORY):
    for launch in launches:
        compiled = launch.compile()
        assert compiled.asm["cubin"], launch.name
        assert f".target sm_{launch.target.arch}" in compiled.asm["ptx"], launch.name
        assert compiled.metadata.shared <= memory, launch.name


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [(LOW, 80), (LOW, 90), (FULL, 90), (LOW, 100)],
    ids=str,
)
@pytest.mark.parametrize("case", USUAL)
def test_compiles(monkeypatch, case, dtype, arch):
    compile_all(distinct(monkeypatch, lambda: USUAL[case](dtype), arch), AMPERE_MEMORY)


@pytest.mark.parametrize(("dtype", "arch"), [(LOW, 89), (LOW, 90), (LOW, 100), (FULL, 90)], ids=str)
def test_weights_of_8_bit_floats_compile_where_the_card_has_them(monkeypatch, dtype, arch):
    function = partial(quantised, dtype, torch.float8_e4m3fn)
    compile_all(distinct(monkeypatch, function, arch), AMPERE_MEMORY)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("kind", "num"), [("gemv", 1), ("product", 8), ("product", 64)])
def test_early_kernels_read_weights_before_they_wait(monkeypatch, kind, num, arch):
    """Each waits once for the previous kernel, then lets the next one start."""
    launches = distinct(monkeypatch, lambda: fused(LOW, kind, num=num, early=True), arch)
    assert len(launches) == (5 if num > 16 else 4)
    for launch in launches:
        compiled = launch.compile()
        assert compiled.metadata.launch_pdl, launch.name
        first, *rest = re.split(r"griddepcontrol\.wait", compiled.asm["ptx"])
        # The kernel of two layers has the code of both.
        assert 1 <= len(rest) <= 2, launch.name
        assert all("griddepcontrol.launch_dependents" in part for part in rest), launch.name
        assert "st.global" not in first, launch.name
        fetched = "cp.async.bulk.prefetch.L2" if launch.name == "product_kernel" else "ld.global"
        assert fetched in first or launch.name == "join_kernel", launch.name


@pytest.mark.parametrize("case", OTHER)
def test_the_rest_compiles(monkeypatch, case):
    compile_all(distinct(monkeypatch, lambda: OTHER[case](LOW)))


def test_the_parameters_for_hopper_compile(monkeypatch):
    monkeypatch.setitem(tuning.TUNED, (LOW, torch.device("cpu")), tuning.HOPPER)
    forget_plans()
    launches = distinct(monkeypatch, lambda: scan(LOW, channels=D))
    forget_plans()
    walks = {launch.name: launch.options for launch in launches}
    assert walks["output_kernel"].num_stages == tuning.HOPPER.output.stages
    compile_all(launch for launch in launches if not launch.name.startswith("mix"))


@pytest.fixture
def delta_for_hopper(monkeypatch):
    monkeypatch.setattr(delta_plan, "tuning_for", lambda dtype, device: delta_plan.HOPPER)
    delta_plan.forget_plans()
    yield
    delta_plan.forget_plans()


@pytest.mark.parametrize(("keys", "channels"), [(96, 192), (128, 256)])
def test_the_delta_rule_for_hopper_compiles(monkeypatch, delta_for_hopper, keys, channels):
    """By wgmma; walks, whose blocks have too few channels for it, by mma."""
    launches = distinct(monkeypatch, lambda: delta(LOW, keys=keys, channels=channels))
    assert len(launches) == 7
    compile_all(launches)
    for launch in launches:
        product = "mma.sync" if "walk" in launch.name else "wgmma.mma_async"
        assert product in launch.compile().asm["ptx"], launch.name


def test_the_backward_walk_of_large_batches_compiles(monkeypatch, delta_for_hopper):
    """Its blocks have more channels: those of 8 sequences with the 12 heads of frac-delta-1.3b."""

    def call():
        delta(LOW, batch=8, heads=12, keys=128, channels=256)

    (walk,) = (x for x in distinct(monkeypatch, call) if x.name == "delta_walk_backward_kernel")
    assert walk.constants[walk.kernel.arg_names.index("BD"),] == 32
    compile_all([walk])


@pytest.mark.parametrize("channels", [16, 64, 192, 256])
@pytest.mark.parametrize("keys", [16, 128])
def test_products_for_hopper_have_no_narrow_columns(monkeypatch, delta_for_hopper, keys, channels):
    """Value channels are the rows of a walk; in all other kernels they are columns."""
    narrow = delta_plan.HOPPER._replace(output=delta_plan.Launch(32, 4, 3))
    monkeypatch.setattr(delta_plan, "tuning_for", lambda dtype, device: narrow)
    plan = delta_plan._plan(keys, channels, 2, "whole", LOW, torch.device("cpu"))
    for options in (plan.prepare, plan.output, plan.gradient):
        assert min(options["BK"], options["BD"]) >= 64
    assert all(options["BK"] >= 64 for options in (plan.states, plan.backward))


def all_kernels():
    """Names of the kernels of `flash_frac.ops`."""
    found = set()
    for module in pkgutil.walk_packages(flash_frac.ops.__path__, "flash_frac.ops."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and isinstance(value, JITFunction):
                found.add(name)
    return found


@pytest.mark.parametrize("dtype", [LOW, FULL], ids=str)
def test_every_kernel_is_compiled(monkeypatch, dtype):
    recorded = set()
    for case in USUAL.values():
        recorded |= {launch.name for launch in record(monkeypatch, lambda case=case: case(dtype))}
    assert recorded == all_kernels()


LENGTHS = [1, 32, 512, 16_384, *random.Random(0).sample(range(2, 16_384), 36)]
SMALL = {"scan": {"channels": 16}, "controls": {}, "conv": {"channels": 64}, "norms": {"size": 64}}
SMALL |= {"swiglu": {}, "delta": {"keys": 16, "channels": 16}}


@pytest.mark.parametrize("case", SMALL)
def test_lengths_share_compilations(monkeypatch, case):
    """40 lengths need no more compilations than two do, of whole chunks and with a rest.

    Those are 19 of the scan's kernels: two of each variant, and one of the pass over segments.
    """

    def keys(length):
        launches = record(monkeypatch, lambda: USUAL[case](LOW, time=length, **SMALL[case]))
        return {launch.key for launch in launches}

    assert len(set(LENGTHS)) == 40
    twice = keys(777) | keys(1024)
    assert case != "scan" or len(twice) == 19
    assert set().union(*map(keys, LENGTHS)) == twice
