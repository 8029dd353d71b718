"""The body of a mixer with one gradient: as good as the modules, and only where nobody watches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_frac.layers import FracMixer, MixerState
from flash_frac.layers import mixer as mixers
from flash_frac.layers.body import train_body, trains_at_once
from flash_frac.ops import ControlSettings
from tests.backends import repeat
from tests.errors import assert_all_as_good, assert_as_good, with_gradients
from tests.kernels.devices import DEVICE, DTYPES

E, H, D, M = 12, 2, 8, 4
# Batch, tokens and sequences; without a state, with one, and packed with states.
KINDS = {"plain": (1, 10, 1), "continued": (2, 20, 2), "packed": (1, 40, 3)}
OPTIONS = {
    "as published": {},
    "learned timescales": {"learned_timescales": True},
    "bank per head": {"bank": "per_head", "gate_bias": 0.3},
    "few parameters": {
        "use_D": False,
        "conv_bias": False,
        "settings": ControlSettings(alpha_fixed=0.5, beta="equal_variance", lambda_map="softplus"),
    },
}


def make(dtype=torch.float32, backend="triton", **options):
    torch.manual_seed(0)
    sizes = {"num_heads": H, "head_dim": D, "num_modes": M, "initializer_range": 0.4}
    mixer = FracMixer(E, **sizes, **options, backend=backend).double()
    with torch.no_grad():
        for parameter in (mixer.D, mixer.out_norm.weight, mixer.dyn_proj.bias, mixer.dt_bias):
            if parameter is not None:
                parameter.normal_()
    return mixer.to(DEVICE, dtype)


def inputs(dtype, kind):
    """x, both parts of a state or None, and boundaries of packed sequences or None."""
    torch.manual_seed(1)
    batch, time, num = KINDS[kind]
    bounds = torch.tensor([0, 33, 33, 40]) if kind == "packed" else None
    x, state, window = (
        torch.randn(*shape, dtype=torch.float64, device=DEVICE)
        for shape in ((batch, time, E), (num, H, M, D), (num, H * D, 3))
    )
    wide = torch.promote_types(dtype, torch.float32)
    state, window = (None, None) if kind == "plain" else (state.to(wide), window.to(dtype))
    return x.to(dtype), state, window, None if bounds is None else bounds.to(DEVICE)


def run(mixer, kind, dtype):
    """Outputs, state and window, then the gradients of all inputs and parameters."""
    x, *state, bounds = inputs(dtype, kind)
    names = [name for name, _ in mixer.named_parameters()]

    def forward(x, before, window, *parameters):
        state = None if before is None else MixerState(before, window)
        given = dict(zip(names, parameters, strict=True))
        options = {"state": state, "cu_seqlens": bounds}
        y, after = torch.func.functional_call(mixer, given, (x,), options)
        return y, *after

    return with_gradients(forward, [x, *state, *mixer.parameters()])


# The interpreter leaves some combinations to `make test-slow`.
CASES = [("as published", "continued"), ("learned timescales", "packed")]
CASES += [("bank per head", "plain"), ("few parameters", "continued")]
CASES += [repeat((name, kind)) for name in OPTIONS for kind in KINDS if (name, kind) not in CASES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_triton_gradients(monkeypatch, case, dtype):
    """By the error rule: outputs, states and every gradient, against modules and float64."""
    (name, kind), calls = case, []
    options = OPTIONS[name]
    monkeypatch.setattr(mixers, "train_body", lambda *x: calls.append(1) or train_body(*x))
    got = run(make(dtype, **options), kind, dtype)
    assert len(calls) == 1
    monkeypatch.setattr(mixers, "trains_at_once", lambda *x: False)
    usual = run(make(dtype, **options), kind, dtype)
    exact_mixer = make(torch.float64, "torch", **options)
    exact_mixer.load_state_dict(make(dtype, **options).state_dict())
    assert_all_as_good(got, usual, run(exact_mixer, kind, torch.float64))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes float32 only")
def test_triton_gradients_under_autocast():
    """Parameters stay float32; the rounding is bfloat16's."""
    x = inputs(torch.float32, "plain")[0]

    def gradients(backend, dtype=torch.float32, enabled=True):
        mixer, given = make(dtype, backend), x.to(dtype).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=enabled):
            y = mixer(given)[0]
        y.double().square().sum().backward()
        return [given.grad, *(p.grad for p in mixer.parameters())]

    got, usual = gradients("triton"), gradients("torch")
    for g, u, e in zip(got, usual, gradients("torch", torch.float64, False), strict=True):
        assert g.dtype == torch.float32
        assert_as_good(g, u, e, dtype=torch.bfloat16)


def test_triton_needs_no_sums_and_no_copies():
    """In the backward pass no tensor of (B, T, I) is added or concatenated on its own."""
    x = inputs(torch.float32, "plain")[0]
    y = make()(x)[0]

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() >= x[..., :1].numel() * H * D:
                names.add(function.name().split(".")[0])
            return result

    names = set()
    with Large():
        y.sum().backward()
    assert not names & {"aten::add", "aten::add_", "aten::cat", "aten::copy_", "aten::clone"}
    assert "aten::addmm_" in names


def test_triton_frozen_parameters():
    """Frozen ones get no gradient, and others the same as without."""
    x = inputs(torch.float32, "plain")[0]
    whole, part = make(learned_timescales=True), make(learned_timescales=True)
    frozen = ("dyn_proj.weight", "dyn_proj.bias", "rw_proj.weight", "base_log_tau", "D")
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for mixer in (whole, part):
        mixer(x)[0].square().sum().backward()
    for (name, a), b in zip(whole.named_parameters(), part.parameters(), strict=True):
        assert b.grad is None if name in frozen else torch.equal(a.grad, b.grad)


def test_triton_state_alone():
    """A loss of the state leaves the gate and the norm without an influence."""
    mixer, x = make(), inputs(torch.float32, "plain")[0]
    mixer(x)[1].recurrent.square().sum().backward()
    assert mixer.out_norm.weight.grad is mixer.D.grad is None and mixer.rw_proj.weight.grad.any()
    assert not mixer.in_proj.weight.grad[H * D :].any() and mixer.in_proj.weight.grad.any()


def test_triton_second_derivative_is_refused():
    mixer, x = make(), inputs(torch.float32, "plain")[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"differentiable once.*; use backend='torch'"):
        torch.autograd.grad(mixer(x)[0].sum(), x, create_graph=True)


def test_triton_does_not_go_past_those_who_watch():
    mixer, x = make(), inputs(torch.float32, "plain")[0]
    projected = mixer.in_proj(x)
    assert trains_at_once(mixer, projected, None, None)
    with torch.no_grad():
        assert not trains_at_once(mixer, projected, None, None)
    assert not trains_at_once(mixer, projected[:, :1], None, None)
    assert not trains_at_once(mixer, projected[:0], None, None)
    assert not trains_at_once(mixer, projected, mixer.empty_state(2), None)
    for part in (mixer.dyn_proj, mixer.rw_proj, mixer.conv1d, mixer.out_norm):
        handle = part.register_forward_hook(lambda *x: None)
        assert not trains_at_once(mixer, projected, None, None)
        handle.remove()
    with torch.nn.modules.module.register_module_forward_hook(lambda *x: None):
        assert not trains_at_once(mixer, projected, None, None)
    state = mixer.empty_state(1)
    assert trains_at_once(mixer, projected, state, None)
    assert not trains_at_once(mixer, projected, state._replace(conv=state.conv.to("meta")), None)
    mixer.rw_proj.bias = torch.nn.Parameter(torch.zeros(2 * H * M))
    assert not trains_at_once(mixer, projected, None, None)
    mixer.rw_proj.bias, mixer.dyn_proj.bias = None, None
    assert not trains_at_once(mixer, projected, None, None)
    mixer = make()
    mixer.rw_proj = torch.nn.Sequential(mixer.rw_proj)
    assert not trains_at_once(mixer, projected, None, None)
    for changed in (
        {"conv_kernel": 1},
        {"rw_norm": True},
        {"settings": ControlSettings(prior="exact")},
    ):
        assert not trains_at_once(make(**changed), projected, None, None)
