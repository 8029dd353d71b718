"""FracMixer: the paper's layer, its state, padding, packing, precision and options."""

import math

import pytest
import torch
import torch.nn.functional as F

from flash_frac.layers import TIME_PARAMETERS, FracMixer, MixerState
from flash_frac.ops import ControlSettings, dynamics

E, H, D, M, K = 12, 3, 5, 8, 4


def make_mixer(dtype=torch.float64, **options):
    mixer = FracMixer(E, num_heads=H, head_dim=D, num_modes=M, initializer_range=0.5, **options)
    with torch.no_grad():
        for name in TIME_PARAMETERS[1:]:
            if getattr(mixer, name) is not None:
                getattr(mixer, name).normal_()
    return mixer.to(dtype)


def paper_layer(mixer, x):
    """The layer written out token by token from the paper's equations, for one sequence (T, E)."""
    s = mixer.settings
    inner_x, gate = (x @ mixer.in_proj.weight.T).chunk(2, -1)
    state, outputs = x.new_zeros(H, M, D), []
    tau = mixer.base_log_tau.exp()
    past = torch.cat([x.new_zeros(K - 1, H * D), inner_x])
    for t in range(len(x)):
        taps = past[t : t + K].T
        u = F.silu((mixer.conv1d.weight[:, 0] * taps).sum(-1) + mixer.conv1d.bias)
        logits = (mixer.dyn_proj.weight @ inner_x[t] + mixer.dyn_proj.bias).view(3, H)
        delta = F.softplus(logits[0] + mixer.dt_bias).clamp(s.dt_min, s.dt_max)
        alpha = s.alpha_min + (s.alpha_max - s.alpha_min) * logits[1].sigmoid()
        lam = s.lambda_min + (s.lambda_max - s.lambda_min) * logits[2].sigmoid()
        rho = torch.exp(-delta[:, None] * lam[:, None] ** (1 / alpha[:, None]) / tau)
        rho = rho.clamp(1e-6, 1 - 1e-6)
        read, write = (mixer.rw_proj.weight @ u).view(2, H, M)
        prior = -alpha[:, None] * tau.log()
        read = (prior + mixer.read_residual_logit.sigmoid() * read).softmax(-1)
        write = (prior + mixer.write_residual_scale.sigmoid() * write).softmax(-1) * (1 - rho)
        u = u.view(H, D)
        state = rho[..., None] * state + write[..., None] * u[:, None]
        y = (read[..., None] * state).sum(1) + mixer.D * u
        y = y.flatten() * F.silu(gate[t])
        y = y / (y.square().mean() + 1e-6).sqrt() * mixer.out_norm.weight
        outputs.append(mixer.out_proj.weight @ y)
    return torch.stack(outputs), state


def test_is_the_layer_of_the_paper():
    mixer, x = make_mixer(), torch.randn(2, 40, E).double()
    y, state = mixer(x)
    for row in range(2):
        expected, expected_state = paper_layer(mixer, x[row])
        torch.testing.assert_close(y[row], expected)
        torch.testing.assert_close(state.recurrent[row], expected_state)


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half"])
def test_time_keeps_its_precision(cast):
    mixer = make_mixer(torch.float32)
    before = {name: getattr(mixer, name).detach().clone() for name in TIME_PARAMETERS}
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    mixer = mixer.to(dtype) if cast == "to" else getattr(mixer, cast)()
    for name, value in before.items():
        assert torch.equal(getattr(mixer, name), value), name
    others = {n: p for n, p in mixer.named_parameters() if n not in TIME_PARAMETERS}
    assert {p.dtype for p in others.values()} == {dtype}
    y, state = mixer(torch.randn(1, 5, E, dtype=dtype))
    assert y.dtype == dtype and state.conv.dtype == dtype and state.recurrent.dtype == torch.float32
    assert mixer.double().base_log_tau.dtype == torch.float64


def test_low_precision_model_is_close():
    mixer = make_mixer(torch.float32, read_init=1.0)
    x = torch.randn(2, 100, E)
    reference, _ = mixer(x)
    y, _ = mixer.bfloat16()(x.bfloat16())
    # 6.1e-3 to 7.6e-3 over four seeds.
    assert ((y.float() - reference).norm() / reference.norm()) < 0.01


def test_autocast_is_close():
    mixer = make_mixer(torch.float32)
    x = torch.randn(2, 100, E)
    reference, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
    assert state.recurrent.dtype == torch.float32
    # 6.1e-3 to 7.6e-3 over four seeds.
    assert ((y.float() - reference).norm() / reference.norm()) < 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"settings": ControlSettings(alpha_fixed=1.0)},
        {"settings": ControlSettings(read_prior=False, write_prior=False)},
        {"settings": ControlSettings(normalization="none")},
        {"settings": ControlSettings(prior="exact", beta="exact_zoh", lambda_map="softplus")},
        {"settings": ControlSettings(beta="equal_variance", write_prior=False, dt_max=8.0)},
        {"rw_norm": True},
        {"learned_timescales": True},
        {"use_D": False},
        {"conv_bias": False, "conv_kernel": 1},
        {"bank": "W1_M8_simplex"},
        {"bank": "per_head", "settings": ControlSettings(prior="exact")},
        {"bank": "per_head", "learned_timescales": True},
        {"bank": [0.5, 1, 2, 4, 8, 16, 32, 64]},
    ],
)
def test_every_switch_trains_and_decodes(options):
    mixer, x = make_mixer(**options), torch.randn(2, 20, E).double()
    y, final = mixer(x)
    y.square().sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    state, parts = None, []
    for t in range(20):
        step, state = mixer(x[:, t : t + 1], state=state)
        parts.append(step)
    torch.testing.assert_close(torch.cat(parts, 1), y)
    torch.testing.assert_close(state.recurrent, final.recurrent)


def test_the_norm_takes_out_the_size_of_the_logits():
    """Ten times the projection, the same controls; the weight scales reads and writes apart."""
    mixer, other = (make_mixer(rw_norm=True, norm_eps=1e-30) for _ in range(2))
    other.load_state_dict(mixer.state_dict())
    with torch.no_grad():
        other.rw_proj.weight *= 10
    x = torch.randn(2, 7, E).double()
    expected = mixer.scan_inputs(x).controls
    torch.testing.assert_close(tuple(other.scan_inputs(x).controls), tuple(expected))
    logits = mixer.rw_norm(mixer.rw_proj(mixer.scan_inputs(x).u.flatten(-2)))
    sides = logits.unflatten(-1, (2, mixer.num_heads, mixer.num_modes))
    torch.testing.assert_close(sides.square().mean(-1), torch.ones_like(sides[..., 0]))
    with torch.no_grad():
        mixer.rw_norm.weight[mixer.num_modes :] = 0
    changed = mixer.scan_inputs(x).controls
    assert torch.equal(changed.read, expected.read)
    assert not torch.allclose(changed.write, expected.write)


def test_switches_change_the_parameters():
    fixed = make_mixer(settings=ControlSettings(alpha_fixed=0.5))
    assert fixed.dyn_proj.weight.shape == (2 * H, H * D)
    assert make_mixer(use_D=False).D is None
    learned = make_mixer(learned_timescales=True)
    assert "base_log_tau" in dict(learned.named_parameters())
    assert not torch.equal(learned.base_log_tau, make_mixer(learned_timescales=True).base_log_tau)
    plain = make_mixer()
    assert "base_log_tau" in dict(plain.named_buffers())
    ends = plain.base_log_tau.exp()[[0, -1]]
    torch.testing.assert_close(ends, torch.tensor([1.0, 131072.0]).double(), rtol=1e-6, atol=0)


def test_state_operations():
    mixer = make_mixer(torch.float32)
    _, state = mixer(torch.randn(3, 9, E))
    assert state.batch_size == 3
    assert state.nbytes == 4 * (3 * H * M * D + 3 * H * D * (K - 1))
    picked = state.select(torch.tensor([2, 0]))
    joined = MixerState.cat([picked, state.select(slice(1, 2))])
    assert torch.equal(joined.recurrent, state.recurrent[[2, 0, 1]])
    assert torch.equal(joined.conv, state.conv[[2, 0, 1]])
    assert state.recurrent.requires_grad and not state.detach().recurrent.requires_grad
    copy = state.detach().clone()
    copy.recurrent.zero_(), copy.conv.zero_()
    assert state.recurrent.abs().max() > 0 and state.conv.abs().max() > 0
    narrow = state.to("cpu", torch.bfloat16)
    assert narrow.conv.dtype == torch.bfloat16 and narrow.recurrent.dtype == torch.float32
    with pytest.raises(ValueError, match="index must be one-dimensional"):
        state.select(0)
    with pytest.raises(ValueError, match="at least one MixerState"):
        MixerState.cat([])


def test_delta_starts_at_dt_init():
    settings = ControlSettings(dt_min=1e-7)
    mixer = FracMixer(E, num_heads=H, head_dim=D, settings=settings, dt_init=3e-6)
    logits = mixer.dyn_proj(torch.zeros(1, H * D)).view(3, H)
    delta = dynamics(logits[0] + mixer.dt_bias, logits[1], logits[2], settings).delta
    torch.testing.assert_close(delta, torch.full((H,), 3e-6), rtol=1e-6, atol=0)


def test_elapsed_time_multiplies_delta():
    """Three times the usual time before every token is a layer whose delta is three times as large.

    Each token's delta is far from the clamps, and the tokens of padding are stepped over.
    """
    settings = ControlSettings(rho_eps=0.0, dt_max=100.0)
    mixer = FracMixer(E, num_heads=H, head_dim=D, settings=settings).double()
    mixer.dyn_proj.weight.data[:H] = 0
    faster = FracMixer(E, num_heads=H, head_dim=D, settings=settings).double()
    logit = torch.full((H,), math.log(math.expm1(3 * math.log(2))), dtype=torch.float64)
    faster.load_state_dict(mixer.state_dict() | {"dt_bias": logit})
    x, mask = torch.randn(2, 20, E, dtype=torch.float64), torch.ones(2, 20)
    mask[0, :3] = 0
    slow, state = mixer(x, attention_mask=mask, elapsed=torch.full((2, 20), 3.0))
    fast, expected = faster(x, attention_mask=mask)
    torch.testing.assert_close(slow, fast, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(state.recurrent, expected.recurrent, rtol=1e-11, atol=1e-13)
    slow.sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_the_usual_time_changes_nothing():
    mixer, x = make_mixer(torch.float64), torch.randn(2, 9, E, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, elapsed=torch.ones(2, 9))[0], mixer(x)[0])


def test_errors_name_the_argument():
    mixer, x = make_mixer(torch.float32), torch.randn(2, 6, E)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 12\), got \(2, 6, 3\)"):
        mixer(x[..., :3])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 6\), got \(2, 5\)"):
        mixer(x, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"attention_mask must be 1 at tokens .* from -inf to 0"):
        mixer(x, attention_mask=torch.tensor([[0.0] * 5 + [-math.inf]] * 2))
    with pytest.raises(ValueError, match=r"elapsed must be at least 0, got nan"):
        mixer(x, elapsed=torch.full((2, 6), math.nan))
    with pytest.raises(ValueError, match=r"elapsed must have shape \(2, 6\), got \(2,\)"):
        mixer(x, elapsed=torch.ones(2))
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens cannot be combined"):
        mixer(x, attention_mask=torch.ones(2, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 6"):
        mixer(x[:1], cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"state.conv must have shape \(2, 15, 3\)"):
        mixer(x, state=mixer(x[:1])[1])
    for wrong, match in (
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"write_init": 1.0}, r"write_init must be in \(0, 1\)"),
        ({"dt_init": 1e-5}, r"dt_init must be None or in \[dt_min, dt_max\]"),
        ({"tau_min": 4.0, "tau_max": 2.0}, "tau_max must be > tau_min"),
        ({"bank": "nope"}, "nope"),
        ({"bank": [1.0, 2.0]}, "16"),
        (
            {"learned_timescales": True, "settings": ControlSettings(prior="exact")},
            "learned_timescales",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            FracMixer(E, **{"num_heads": H, "head_dim": D, **wrong})
