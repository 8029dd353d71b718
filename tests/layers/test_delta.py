"""DeltaMixer: its equations, state, padding, packing, precision, and layers that must be called."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_frac.layers import DELTA_TIME_PARAMETERS, DeltaMixer, MixerState, RMSNorm
from flash_frac.ops import delta_scan
from tests.backends import DEVICE, backends_here, dtype_of
from tests.errors import assert_as_good

E, H, K, D, TAPS = 12, 3, 4, 8, 4


@pytest.fixture(params=backends_here())
def mixer(request):
    """On every backend of the table, in the widest dtype that it takes."""
    return make_mixer(dtype_of(request.param), backend=request.param).to(DEVICE)


def normal(mixer, *shape):
    return torch.randn(*shape, dtype=torch.float64).to(mixer.q_proj.weight)


def make_mixer(dtype=torch.float64, **options):
    mixer = DeltaMixer(E, num_heads=H, head_dim=K, initializer_range=0.5, **options)
    nn.init.uniform_(mixer.o_norm.weight, 0.5, 1.5)
    return mixer.to(dtype)


def written_out(mixer, x):
    """The layer token by token from its equations, for one sequence (T, E)."""

    def branch(name):
        past = F.pad(x @ getattr(mixer, f"{name}_proj").weight.T, (0, 0, TAPS - 1, 0))
        taps = getattr(mixer, f"{name}_conv1d").weight[:, 0]
        u = torch.stack([(taps * past[t : t + TAPS].T).sum(-1) for t in range(len(x))])
        return F.silu(u).unflatten(-1, (H, -1))

    q, k, v = branch("q"), branch("k"), branch("v")
    q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
    beta = (x @ mixer.b_proj.weight.T).sigmoid()
    step = F.softplus(x @ mixer.a_proj.weight.T + mixer.dt_bias)
    decay = torch.exp(-mixer.A_log.exp() * step)
    state, ys = x.new_zeros(H, K, D), []
    for t in range(len(x)):
        state = decay[t, :, None, None] * state
        error = v[t] - torch.einsum("hk,hkd->hd", k[t], state)
        state = state + beta[t, :, None, None] * k[t, :, :, None] * error[:, None]
        ys.append(torch.einsum("hk,hkd->hd", q[t], state) / K**0.5)
    y = torch.stack(ys)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.o_norm.weight
    gate = F.silu(x @ mixer.g_proj.weight.T)
    return (y.flatten(-2) * gate) @ mixer.o_proj.weight.T, state


def test_is_gated_deltanet():
    mixer, x = make_mixer(), torch.randn(2, 40, E).double()
    y, state = mixer(x)
    for row in range(2):
        expected, expected_state = written_out(mixer, x[row])
        torch.testing.assert_close(y[row], expected)
        torch.testing.assert_close(state.recurrent[row], expected_state)


@torch.no_grad()
def test_a_step_in_place_is_a_step(mixer):
    """The state stays in its memory, also where rows have ended."""
    x, norm = normal(mixer, 2, 6, E), RMSNorm(E).to(normal(mixer, 1))
    triton = mixer.backend == "triton"
    assert mixer.steps_in_place(x[:, :1], norm) == triton
    assert not mixer.steps_in_place(x, norm)
    if not triton:
        return
    _, state = mixer(norm(x[:, :5]))
    mask = torch.tensor([[1], [0]], device=DEVICE)
    wide = copy.deepcopy(mixer).double()
    wide.backend = wide.o_norm.backend = "torch"
    wide_norm = copy.deepcopy(norm).double()
    before = MixerState(*(tensor.double() for tensor in state))
    true = wide(wide_norm(x[:, 5:].double()), state=before, attention_mask=mask)
    usual = mixer(norm(x[:, 5:]), state=state, attention_mask=mask)
    addresses = [tensor.data_ptr() for tensor in state]
    y = mixer.step_in_place(x[:, 5:].contiguous(), norm, state, mask)
    assert [tensor.data_ptr() for tensor in state] == addresses
    # Nobody reads the output at padding.
    assert_as_good((y - x[:, 5:])[:1], usual[0][:1], true[0][:1], "y")
    assert_as_good(state.recurrent, usual[1].recurrent, true[1].recurrent, "state")
    assert_as_good(state.conv, usual[1].conv, true[1].conv, "window")


@torch.no_grad()
def test_a_step_in_place_passes_nobody_by(mixer):
    x, norm = normal(mixer, 2, 1, E), RMSNorm(E).to(normal(mixer, 1))
    for name in ("q_proj", "v_conv1d", "o_norm", "o_proj"):
        hook = getattr(mixer, name).register_forward_hook(lambda *_: None)
        assert not mixer.steps_in_place(x, norm)
        hook.remove()


@torch.no_grad()
def test_states_without_tokens_and_without_input(mixer):
    """An empty state is none, and fades as the recurrence does for an input of zero."""
    x = normal(mixer, 2, 3, E)
    y, state = mixer(x)
    again, _ = mixer(x, state=mixer.empty_state(2))
    torch.testing.assert_close(again, y)
    assert [x.shape for x in state] == [x.shape for x in mixer.empty_state(2)]
    assert [x.dtype for x in state] == [x.dtype for x in mixer.empty_state(2)]
    log_decay = mixer.scan_inputs(torch.zeros_like(x), state=state).log_decay
    torch.testing.assert_close(mixer.idle_log_decay()[:, 0].expand_as(log_decay), log_decay)


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half"])
def test_time_keeps_its_precision(cast):
    mixer = make_mixer(torch.float32)
    before = {name: getattr(mixer, name).detach().clone() for name in DELTA_TIME_PARAMETERS}
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    mixer = mixer.to(dtype) if cast == "to" else getattr(mixer, cast)()
    for name, value in before.items():
        assert torch.equal(getattr(mixer, name), value), name
    others = {n: p for n, p in mixer.named_parameters() if n not in DELTA_TIME_PARAMETERS}
    assert {p.dtype for p in others.values()} == {dtype}
    y, state = mixer(torch.randn(1, 5, E, dtype=dtype))
    assert y.dtype == dtype and state.conv.dtype == dtype and state.recurrent.dtype == torch.float32
    y, _ = mixer(torch.randn(1, 1, E, dtype=dtype), state=state)
    assert y.dtype == dtype and mixer.double().A_log.dtype == torch.float64


def relative(y, reference):
    return (y.float() - reference).norm() / reference.norm()


def test_low_precision_is_close():
    mixer, x = make_mixer(torch.float32), torch.randn(2, 100, E)
    reference, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
    assert state.recurrent.dtype == torch.float32
    # 0.9e-2 to 1.3e-2 over six seeds.
    assert relative(y, reference) < 0.02
    assert relative(mixer.bfloat16()(x.bfloat16())[0], reference) < 0.02


def test_elapsed_time_multiplies_log_decay():
    """Three times the usual time is a layer whose rates are three times as large."""
    mixer, faster = make_mixer(), make_mixer()
    faster.load_state_dict(mixer.state_dict())
    with torch.no_grad():
        faster.A_log += torch.log(torch.tensor(3.0, dtype=torch.float64))
    x, mask = torch.randn(2, 20, E, dtype=torch.float64), torch.ones(2, 20)
    mask[0, :3] = 0
    slow, state = mixer(x, attention_mask=mask, elapsed=torch.full((2, 20), 3.0))
    fast, expected = faster(x, attention_mask=mask)
    torch.testing.assert_close(slow, fast, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(state.recurrent, expected.recurrent, rtol=1e-11, atol=1e-13)
    usual = mixer(x, elapsed=torch.ones(2, 20))[0]
    torch.testing.assert_close(usual, mixer(x)[0])
    assert not torch.allclose(usual, mixer(x, elapsed=torch.full((2, 20), 3.0))[0])


PARTS = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "q_conv1d", "k_conv1d", "v_conv1d")


@pytest.mark.parametrize("part", PARTS)
def test_a_hook_on_any_part_runs(part):
    """Forward and backward, for many tokens and for one; results are as before."""
    mixer, x = make_mixer(), torch.randn(2, 9, E).double().requires_grad_()
    expected, _ = mixer(x)
    calls = []
    handle = getattr(mixer, part).register_forward_hook(lambda *_: calls.append(part))
    y, state = mixer(x)
    assert calls == [part]
    torch.testing.assert_close(y, expected)
    mixer(x[:, :1], state=state)
    assert calls == [part] * 2
    handle.remove()
    seen = []
    handle = getattr(mixer, part).register_full_backward_hook(lambda *_: seen.append(part))
    mixer(x)[0].sum().backward()
    assert seen == [part]


class Doubled(nn.Module):
    """An adapter in place of a layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


class OtherWeight(torch.Tensor):
    """A weight that is not what lies in its memory, as one of integers and scales."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        assert function is not torch.cat, "read as a plain tensor"
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(options or {}))


def test_adapters_and_other_weights_are_called():
    mixer, x = make_mixer(), torch.randn(2, 9, E).double()
    doubled = make_mixer()
    doubled.load_state_dict(mixer.state_dict())
    names = ("q_proj", "v_proj", "o_proj")
    with torch.no_grad():
        for name in names:
            getattr(doubled, name).weight *= 2
    expected, before = doubled(x)[0], mixer(x)[0]
    weight = mixer.k_proj.weight.detach().as_subclass(OtherWeight)
    del mixer.k_proj.weight
    mixer.k_proj.weight = weight
    torch.testing.assert_close(mixer(x)[0], before)
    for name in names:
        setattr(mixer, name, Doubled(getattr(mixer, name)))
    torch.testing.assert_close(mixer(x)[0], expected)
    mixer.q_conv1d = Doubled(mixer.q_conv1d)
    with pytest.raises(ValueError, match="leave q_conv1d out of target_modules"):
        mixer(x)


def test_starts_in_the_published_ranges():
    torch.manual_seed(0)
    mixer = DeltaMixer(8, num_heads=1000, head_dim=2)
    step, rate = F.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert 1e-3 <= step.min() < 1.1e-3 and 0.09 < step.max() <= 0.1001
    assert 0 <= rate.min() < 0.2 and 15.8 < rate.max() <= 16.001
    weights = {n: p for n, p in mixer.named_parameters() if p.ndim > 1}
    assert len(weights) == 10
    for name, weight in weights.items():
        assert weight.std().item() == pytest.approx(0.02, rel=0.1), name
    before = {name: value.clone() for name, value in mixer.state_dict().items()}
    nn.init.zeros_(mixer.o_norm.weight)
    mixer.reset_parameters()
    for name, value in mixer.state_dict().items():
        same = torch.equal(value, before[name])
        assert same == (name == "o_norm.weight"), name
    # As torch's layers begin: uniform up to 1 / sqrt(8 inputs).
    plain = DeltaMixer(8, num_heads=50, head_dim=2, initializer_range=None)
    plain.reset_parameters()
    assert 0.35 < plain.q_proj.weight.abs().max() <= 8**-0.5


def test_errors_name_the_argument():
    mixer, x = make_mixer(torch.float32), torch.randn(2, 6, E)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 12\), got \(2, 6, 3\)"):
        mixer(x[..., :3])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 6\), got \(2, 5\)"):
        mixer(x, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"elapsed must have shape \(2, 6\), got \(2,\)"):
        mixer(x, elapsed=torch.ones(2))
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens cannot be combined"):
        mixer(x, attention_mask=torch.ones(2, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 6"):
        mixer(x[:1], cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"state.conv must have shape \(2, 48, 3\)"):
        mixer(x, state=mixer(x[:1])[1])
    for wrong, match in (
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"conv_kernel": 0}, "conv_kernel must be at least 1, got 0"),
        ({"expand_v": 1.1}, r"expand_v times head_dim \(4\) must be a whole number, got 1.1"),
    ):
        with pytest.raises(ValueError, match=match):
            DeltaMixer(E, **{"num_heads": H, "head_dim": K, **wrong})


def fla_layer(**options):
    peer = pytest.importorskip("fla.layers.gated_deltanet", exc_type=ImportError)
    return peer.GatedDeltaNet(E, num_heads=H, head_dim=K, **options)


def test_loads_the_weights_of_fla(monkeypatch):
    """Names and shapes are equal, and outputs those of its naive recurrence with its weights."""
    theirs, ours = fla_layer(), DeltaMixer(E, num_heads=H, head_dim=K)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    naive = pytest.importorskip("fla.ops.gated_delta_rule.naive", exc_type=ImportError)
    x = torch.randn(2, 50, E)
    y, state = ours(x)
    monkeypatch.setattr("flash_frac.layers.delta.delta_scan", lambda *a, **o: rule(naive, *a))
    expected, expected_state = ours(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state.recurrent, expected_state.recurrent, rtol=1e-5, atol=2e-6)


def rule(naive, q, k, v, beta, log_decay):
    function = naive.naive_recurrent_gated_delta_rule
    return function(q, k, v, beta, log_decay, scale=1.0, output_final_state=True)


@pytest.mark.gpu
def test_is_the_layer_of_fla_on_a_gpu():
    """50 tokens, which it takes one by one in float32."""
    theirs = fla_layer().cuda().eval()
    ours = DeltaMixer(E, num_heads=H, head_dim=K).cuda()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 50, E, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-4, atol=1e-5)


def test_a_state_of_the_operator_is_that_of_the_layer():
    """scan_inputs and delta_scan give what forward has inside."""
    mixer, x = make_mixer(), torch.randn(2, 9, E).double()
    inputs = mixer.scan_inputs(x)
    _, state = mixer(x)
    assert torch.equal(delta_scan(*inputs[:5]).state, state.recurrent)
    assert torch.equal(inputs.window, state.conv)
    assert inputs.k.norm(dim=-1).max() <= 1
