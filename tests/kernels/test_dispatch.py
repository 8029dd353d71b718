"""Dispatch to a kernel: direct in eager mode, through torch's dispatcher under a dispatch mode."""

import importlib
import pkgutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import flash_frac
from flash_frac.ops import (
    ControlSettings,
    causal_conv,
    controls_from_logits,
    delta_scan,
    delta_step,
    frac_scan,
    frac_step,
    gated_norm,
    norm,
    sample,
    swiglu,
)
from flash_frac.ops.attention.triton import attend_step
from flash_frac.ops.backends import Operator
from flash_frac.ops.decode.fused import output_step, pair_step, projection_step
from flash_frac.ops.decode.linear import fused_norm_linear, fused_norm_swiglu
from flash_frac.ops.decode.triton import fused_control_step, fused_conv_step
from flash_frac.ops.delta.triton import fused_delta_step
from flash_frac.ops.sample.reference import WIDTH
from flash_frac.ops.testing import random_inputs
from tests.backends import repeat
from tests.errors import with_gradients
from tests.kernels.devices import DEVICE
from tests.kernels.launches import watch
from tests.kernels.test_control_kernel import random_inputs as control_inputs
from tests.models.conftest import make_model, on_backend

SOURCES = Path(flash_frac.__file__).parent


def operators():
    """All operators of `flash_frac.ops`, by the name that they are registered under."""
    found = {}
    for module in pkgutil.walk_packages(flash_frac.ops.__path__, "flash_frac.ops."):
        values = vars(importlib.import_module(module.name)).values()
        found |= {op.registered._qualname: op for op in values if isinstance(op, Operator)}
    return found


def normal(*shape):
    return torch.randn(*shape).to(DEVICE)


def run_all():
    """Every operator, forward and, if it has one, backward."""
    B, T, H, M, D = 1, 3, 2, 4, 3
    scan = random_inputs(B, T, H, M, D, device=DEVICE)
    token, state = [x[:, 0].contiguous() for x in scan], normal(B, H, M, D)
    with_gradients(partial(frac_scan, backend="triton"), scan)
    with_gradients(partial(frac_step, backend="triton"), [*token, state])
    settings = ControlSettings()
    logits = control_inputs(settings, batch=B, time=T, heads=H, modes=M)
    with_gradients(partial(controls_from_logits, settings=settings, backend="triton"), logits)
    conv = normal(H * D, 1, 4), normal(H * D)
    with_gradients(partial(causal_conv, backend="triton"), [normal(B, T, H * D), *conv])
    gate, weight = normal(B, T, H * D), normal(H * D)
    with_gradients(lambda x, w: norm(x, w, 1e-6, backend="triton"), [gate, weight])
    with_gradients(
        lambda x, g, w: gated_norm(x, g, w, 1e-6, backend="triton"), [scan.u, gate, weight]
    )
    with_gradients(partial(swiglu, backend="triton"), [gate, normal(*gate.shape)])
    with torch.no_grad():
        causal_conv(gate, *conv, mask=torch.ones_like(gate[..., 0]), backend="triton")
        u = fused_conv_step(gate[:, 0], *conv, normal(B, H * D, 3)).view(B, H, D)
        dyn, rw, *shared = logits
        fused_control_step(u, dyn[:, 0], rw[:, 0], *shared, state, settings=settings)
        matrix = normal(5, H * D)
        x, window = gate[:, 0], normal(B, H * D, 3)
        projection_step(x, normal(7, H * D), weight, 1e-6, *conv, window, kind="gemv")
        pair_step(x, matrix, x, matrix, None, kind="gemv")
        output_step(x, matrix, normal(B, 5), 1e-6, squares=normal(B, H).square())
        fused_norm_linear(x, matrix)
        fused_norm_swiglu(x, matrix, matrix, weight, 1e-6)
        keys = normal(B, H, 5, D)
        attend_step(u, keys, keys, torch.tensor([2], device=DEVICE), 1.0)
        table = torch.zeros(B, WIDTH, dtype=torch.int32, device=DEVICE)
        sample(gate[:, 0], table, torch.zeros_like(gate[:, 0], dtype=torch.bool), "triton")
    run_delta(scan)


def run_delta(scan):
    """The delta rule with read and write of a scan for queries and keys."""
    beta, log_decay = scan.read[..., 0].sigmoid(), scan.log_decay[..., 0].contiguous()
    inputs = [scan.read, scan.write, scan.u, beta, log_decay]
    state = torch.zeros(1, *scan.read.shape[2:], scan.u.shape[-1], device=DEVICE)
    with_gradients(partial(delta_scan, backend="triton"), inputs)
    token = [x[:, 0].contiguous() for x in inputs]
    with_gradients(partial(delta_step, backend="triton"), [*token, state])
    qkv, (a, b) = torch.cat([x.flatten(1) for x in token[:3]], -1), token[3:]
    with torch.no_grad():
        fused_delta_step(qkv, a, b, a[0], b[0], state)


class Names(TorchDispatchMode):
    """Writes down which of our operators pass."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flash_frac":
            self.seen.add(function.name().removesuffix(".default"))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_every_operator():
    with Names() as mode:
        run_all()
    assert mode.seen == set(operators())


def test_without_a_mode_the_dispatcher_is_not_asked(monkeypatch):
    def registered(*arguments):
        raise AssertionError("the registered operator was called")

    for operator in operators().values():
        monkeypatch.setattr(operator, "registered", registered)
    run_all()
    with pytest.raises(AssertionError, match="the registered operator"), Names():
        run_all()


LAYERS, HEADS, MODES, TIME, BATCH = 1, 2, 4, 9, 2
CHUNK = 32  # tokens that the scan multiplies with one another; a shorter row costs as many


def small_model(backend, **fields):
    fields = {"num_hidden_layers": LAYERS, "frac_num_modes": MODES} | fields
    model = make_model(torch.float32, **fields)
    return on_backend(model, backend).to(DEVICE).train()


def tokens():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 61, (BATCH, TIME), generator=generator).to(DEVICE)


def count_flops(model):
    ids = tokens()
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    return counter.get_flop_counts()["Global"]


def test_flops_of_a_model():
    model = small_model("triton")
    counts = count_flops(model)
    head_dim = model.model.layers[0].mixer.head_dim
    # A product of a channel of a token with the tokens of its chunk, or with a state of all modes.
    products = LAYERS * BATCH * TIME * HEADS * head_dim
    assert counts[torch.ops.flash_frac.scan] == 2 * products * (CHUNK + 3 * MODES)
    assert counts[torch.ops.flash_frac.scan_backward] == 2 * products * (2 * CHUNK + 6 * MODES)
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert counts[torch.ops.aten.mm] == 3 * 2 * BATCH * TIME * sum(linear)
    assert len(counts) == 3
    plain = count_flops(small_model("torch"))
    assert plain[torch.ops.aten.mm] == counts[torch.ops.aten.mm]
    # In torch the scan is made of batches of products.
    assert set(plain) == {torch.ops.aten.mm, torch.ops.aten.bmm}


@pytest.mark.skipif(DEVICE != "cpu", reason="one process suffices, and the interpreter has it")
def test_a_counter_that_is_older_than_the_operator():
    """The first call of a process loads the operator, when the counter is already there."""
    code = (
        "import torch; from torch.utils.flop_counter import FlopCounterMode\n"
        "from flash_frac.ops import frac_scan\n"
        "x = torch.zeros(1, 3, 1, 2)\n"
        "with FlopCounterMode(display=False) as counter: frac_scan(x, x, x, x)\n"
        "print(counter.get_total_flops())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2 * 3 * 2 * (CHUNK + 3 * 2)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_checkpoints(monkeypatch):
    """Gradients stay, and a policy sees the scan: if it is to be saved, it does not run twice."""
    model, ids, seen = small_model("triton"), tokens(), set()
    expected = gradients(model, ids)

    def policy(ctx, operator, *args, **kwargs):
        seen.add(operator)
        kept = operator == torch.ops.flash_frac.scan.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for options, runs in (({}, 2), ({"context_fn": contexts}, 1)):
        launched = []
        model.gradient_checkpointing_enable({"use_reentrant": False, **options})
        with monkeypatch.context() as patch:
            watch(patch, launched.append)
            got = gradients(model, ids)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert launched.count("mix_kernel") == runs * LAYERS
        assert launched.count("conv_forward_kernel") == 2 * LAYERS
    assert torch.ops.flash_frac.scan.default in seen


@pytest.mark.parametrize(
    "fields",
    [
        # Not as wide as the logits of read and write are.
        repeat({"mixer_types": ["frac"], "hidden_size": 24}),
        {"mixer_types": ["frac", "delta"], "mlp_intermediate_size": 48},
        repeat({"mixer_types": ["attention", "sliding_attention"], "sliding_window": 16}),
    ],
)
def test_cheap_checkpoints_keep_products_and_scans(monkeypatch, fields):
    """The same gradients to the bit; scans run once, and what is cheap runs twice."""
    model = small_model("triton", num_hidden_layers=len(fields["mixer_types"]), **fields)
    ids = tokens()
    expected, products = gradients(model, ids), []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                products.append(args[-1].shape)
            return function(*args, **(kwargs or {}))

    def run():
        launched = []
        products.clear()
        with monkeypatch.context() as patch, Products():
            watch(patch, launched.append)
            return gradients(model, ids), launched, len(products)

    _, once, num_products = run()
    model.gradient_checkpointing_enable({"policy": "cheap"})
    got, launched, again = run()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert again == num_products
    for name in ("mix_kernel", "delta_output_kernel"):
        assert launched.count(name) == once.count(name)
    assert launched.count("norm_forward_kernel") > once.count("norm_forward_kernel")
    assert launched.count("conv_forward_kernel") == 2 * once.count("conv_forward_kernel")


def test_policies_are_checked():
    model = small_model("torch")
    with pytest.raises(ValueError, match=r"policy .* must be one of all, cheap, got 'some'"):
        model.gradient_checkpointing_enable({"policy": "some"})
    with pytest.raises(ValueError, match=r"policy 'cheap' .* needs use_reentrant: false"):
        model.gradient_checkpointing_enable({"policy": "cheap", "use_reentrant": True})


def our_files():
    """Files of the package on the stack, the first called first."""
    files, frame = [], sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCES):
            files.append(str(path.relative_to(SOURCES)))
        frame = frame.f_back
    return list(dict.fromkeys(reversed(files)))


@pytest.mark.parametrize("gradients", [False, True])
def test_the_way_to_a_launch_is_three_files(monkeypatch, gradients):
    """From `frac_scan` to its kernels, and from autograd to those of its backward."""
    ways = {}
    watch(monkeypatch, lambda name: ways.setdefault(name, our_files()))
    inputs = [x.requires_grad_(gradients) for x in random_inputs(1, 40, 1, 4, 16, device=DEVICE)]
    y, state = frac_scan(*inputs, backend="triton")
    assert set(ways) == {"mix_kernel", "states_kernel", "pass_kernel", "output_kernel"}
    assert all(len(files) <= 3 for files in ways.values()), ways
    assert ways["mix_kernel"][0] == "ops/scan/api.py"
    if gradients:
        ways.clear()
        (y.sum() + state.sum()).backward()
        assert "gradient_kernel" in ways and "mix_backward_kernel" in ways
        assert all(len(files) <= 3 for files in ways.values()), ways


def test_what_kernels_cannot_differentiate_is_refused():
    """A second derivative would be wrong, and transforms of torch.func do not reach a kernel."""
    inputs = [x.requires_grad_() for x in random_inputs(1, 20, 1, 4, 16, device=DEVICE)]

    def loss(*x):
        return frac_scan(*x, backend="triton").y.square().sum()

    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='torch'"):
        torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*backend='torch'"):
        torch.func.grad(loss)(*(x.detach() for x in inputs))
