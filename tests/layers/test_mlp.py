"""GatedMLP: its formula, gradients, memory, adapters and hooks, and one token in place.

Letters: E width, I intermediate width.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from flash_frac.layers import GatedMLP, RMSNorm
from flash_frac.ops import rms_norm
from flash_frac.ops.testing import relative_error
from tests.backends import DEVICE, backends_here, dtype_of
from tests.errors import assert_all_as_good, assert_as_good, widen, with_gradients

E, I = 20, 33  # noqa: E741
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Named after the backend, which the interpreter's run selects.
needs_triton = pytest.mark.skipif("triton" not in backends_here(), reason="no Triton here")
# "recurrent" has the torch form of `swiglu`.
every_backend = pytest.mark.parametrize("backend", sorted({*backends_here()} - {"recurrent"}))


def make_mlp(backend, dtype=None, sizes=(E, I)):
    mlp = GatedMLP(*sizes, initializer_range=0.5, backend=backend)
    return mlp.to(DEVICE, dtype or dtype_of(backend))


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


def plain(x, gate, up, down):
    """The formula in torch alone."""
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def of_weights(mlp):
    """The module as a function of its input and weights."""
    names = [f"{name}.weight" for name in PROJECTIONS]
    return lambda x, *weights: functional_call(mlp, dict(zip(names, weights, strict=True)), (x,))


@pytest.mark.parametrize("shape", [(E,), (3, E), (2, 7, E), (0, E)], ids=str)
@every_backend
def test_is_the_formula(backend, shape):
    mlp = make_mlp(backend)
    tensors = [normal(*shape, dtype=dtype_of(backend)), *(w.detach() for w in mlp.parameters())]
    got, usual = (with_gradients(f, tensors) for f in (of_weights(mlp), plain))
    if dtype_of(backend) == torch.float64:
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(got, usual, strict=True))
    else:
        assert_all_as_good(got, usual, with_gradients(plain, widen(tensors)))


def test_second_derivatives():
    mlp = make_mlp("torch", torch.float64, sizes=(3, 4))
    x = normal(2, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(mlp, x)
    jacobian = torch.func.jacrev(mlp)(x.detach())
    assert jacobian.shape == (2, 3, 2, 3)


@needs_triton
def test_triton_keeps_gate_and_up_and_not_their_product():
    mlp, x = make_mlp("triton"), normal(5, E)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mlp(x)
    # x by both projections.
    assert sorted(t.shape[1] for t in kept if t.shape[0] == 5) == [E, E, I, I]


def gradients(mlp, x):
    x = x.detach().requires_grad_()
    y = mlp(x)
    weights = [p for p in mlp.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *weights])]


@needs_triton
def test_triton_gradients_are_those_of_the_plain_composition():
    """To the last bit; a hook on down_proj is called, and means the plain composition."""
    mlp, x, seen = make_mlp("triton"), normal(2, 5, E), []
    direct = gradients(mlp, x)
    for register in ("register_forward_hook", "register_full_backward_hook"):
        hook = getattr(mlp.down_proj, register)(lambda *a: seen.append(a[0]))
        composed = gradients(mlp, x)
        hook.remove()
        assert seen.pop() is mlp.down_proj and not seen
        assert all(torch.equal(a, b) for a, b in zip(direct, composed, strict=True))


@needs_triton
@pytest.mark.parametrize("frozen", range(3))
def test_triton_leaves_a_frozen_weight_alone(frozen):
    mlp, x = make_mlp("triton"), normal(2, 5, E)
    expected = gradients(mlp, x)
    list(mlp.parameters())[frozen].requires_grad_(False)
    del expected[2 + frozen]
    assert all(torch.equal(a, b) for a, b in zip(gradients(mlp, x), expected, strict=True))


@needs_triton
def test_triton_refuses_what_it_cannot_differentiate():
    mlp, x = make_mlp("triton"), normal(2, E).requires_grad_()
    with pytest.raises(RuntimeError, match=r"GatedMLP.*differentiable once.*backend='torch'"):
        torch.autograd.grad(mlp(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*backend='torch'"):
        torch.func.grad(lambda x: mlp(x).sum())(x.detach())


@every_backend
def test_checkpoints_and_compiles(backend):
    mlp, x = make_mlp(backend), normal(3, E, dtype=dtype_of(backend))
    expected = gradients(mlp, x)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(mlp, x, use_reentrant=False)

    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    for function in (checkpointed, compiled):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        got = [y, *torch.autograd.grad(y.square().sum(), [leaf, *mlp.parameters()])]
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", PROJECTIONS)
@every_backend
def test_an_adapter_on_any_projection(backend, name):
    peft = pytest.importorskip("peft")
    mlp, x = make_mlp(backend), normal(4, E, dtype=dtype_of(backend))
    weights = {n: getattr(mlp, n).weight.detach().clone() for n in PROJECTIONS}
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=[name])
    adapted = peft.inject_adapter_in_model(config, mlp)
    part = getattr(adapted, name)
    lora = [layers["default"].weight for layers in (part.lora_A, part.lora_B)]
    with torch.no_grad():
        for weight in lora:
            weight.normal_()
    weights[name] = weights[name] + lora[1] @ lora[0]
    y = adapted(x)
    torch.testing.assert_close(y, plain(x, *weights.values()))
    y.square().sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in lora)
    with torch.no_grad():
        assert not adapted.steps_in_place(x[:, None], RMSNorm(E, backend=backend))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes float32 only")
def test_triton_under_autocast():
    """float32 weights, products in bfloat16, and the weights' gradients in float32."""
    mlps = [make_mlp(name, torch.float32) for name in ("triton", "torch")]
    exact = make_mlp("torch", torch.float64)
    for mlp in (mlps[1], exact):
        mlp.load_state_dict(mlps[0].state_dict())
    x, results = normal(64, E), []
    for mlp in (*mlps, exact):
        with torch.autocast("cuda", torch.bfloat16, enabled=mlp is not exact):
            y = mlp(x.to(mlp.down_proj.weight.dtype))
        y.double().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in mlp.parameters())])
    assert results[0][0].dtype == torch.bfloat16
    for got, usual, right in zip(*results, strict=True):
        assert_as_good(got, usual, right, dtype=torch.bfloat16)


def token(batch, dtype=torch.float32, sizes=(E, I)):
    """An MLP, the norm before it and one token."""
    norm = RMSNorm(sizes[0], backend="triton").to(DEVICE, dtype)
    nn.init.normal_(norm.weight)
    return make_mlp("triton", dtype, sizes), norm, normal(batch, 1, sizes[0], dtype=dtype)


DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [2, 5])
@torch.no_grad()
def test_triton_takes_a_token_in_place(monkeypatch, batch, dtype):
    from tests.kernels.launches import watch

    mlp, norm, x = token(batch, dtype, sizes=(24, 33))
    assert mlp.steps_in_place(x, norm)
    weights = [w.double() for w in mlp.parameters()]
    normed = rms_norm(x.double(), norm.weight.double(), norm.eps)
    exact, usual = x.double() + plain(normed, *weights), x + mlp(norm(x))
    names = []
    watch(monkeypatch, names.append)
    got = mlp.step_in_place(x, norm)
    few = ["swiglu_gemv_kernel", "gemv_kernel"]
    assert names == (few if batch <= 4 else ["norm_forward_kernel", "swiglu_forward_kernel"])
    assert_as_good(got, usual, exact)


class Wrapper(nn.Module):
    """A module around another that shows nothing of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Quantised(torch.Tensor):
    """A weight that is not what lies in its memory, as of integers and scales."""


@needs_triton
@torch.no_grad()
def test_triton_passes_nobody_by():
    mlp, norm, x = token(2)
    assert mlp.steps_in_place(x, norm)
    assert not mlp.steps_in_place(x.expand(2, 3, E), norm)
    assert not mlp.steps_in_place(x, Wrapper(norm))
    with torch.enable_grad():
        assert not mlp.steps_in_place(x, norm)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert not mlp.steps_in_place(x, norm)
    for part in (mlp, norm, *(getattr(mlp, name) for name in PROJECTIONS)):
        hook = part.register_forward_hook(lambda *a: None)
        assert not mlp.steps_in_place(x, norm)
        hook.remove()
    for name in PROJECTIONS:
        linear = getattr(mlp, name)
        setattr(mlp, name, Wrapper(linear))
        assert not mlp.steps_in_place(x, norm)
        setattr(mlp, name, linear)
        weight = linear.weight
        for other in (weight.as_subclass(Quantised), weight.double()):
            linear.weight = nn.Parameter(other, requires_grad=False)
            assert not mlp.steps_in_place(x, norm)
        linear.weight = weight
    # A bias of down_proj is added; the kernel of the other two takes none.
    for name in PROJECTIONS:
        linear = getattr(mlp, name)
        linear.bias = nn.Parameter(normal(linear.out_features))
        assert mlp.steps_in_place(x, norm) == (name == "down_proj")
        linear.bias = None
    assert mlp.steps_in_place(x, norm)
    mlp.backend = "torch"
    assert not mlp.steps_in_place(x, norm)


def test_errors_name_the_argument():
    for sizes, name in (((0, 4), "hidden_size"), ((4, -1), "intermediate_size")):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            GatedMLP(*sizes)
