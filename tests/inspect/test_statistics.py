"""Statistics of controls and kernels, against direct computations."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flash_frac.inspect
import flash_frac.train
from flash_frac.inspect import evaluating, layer_kernel, memory_statistics
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.ops import dynamics, mode_log_decay

BETAS = ("one_minus_rho", "exact_zoh", "equal_variance")


def tiny(**changes):
    settings = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "frac_num_modes": 5, "frac_tau_max": 500.0}
    model = FracForCausalLM(FracConfig(**settings | changes))
    for block in model.model.layers:
        # Away from the start, where all tokens have nearly the same controls.
        nn.init.normal_(block.mixer.dyn_proj.weight, std=0.5)
        nn.init.normal_(block.mixer.dt_bias)
    return model


def ids(*shape):
    return torch.randint(0, 32, shape)


def first_dynamics(model, tokens):
    """Controls of the first layer, the way the layer itself comes to them."""
    block = model.model.layers[0]
    mixer = block.mixer
    inner = mixer.in_proj(block.norm(model.model.embed_tokens(tokens))).chunk(2, -1)[0]
    logits = mixer.dyn_proj(inner).chunk(mixer.num_dynamics, -1)
    alpha = logits[1] if mixer.num_dynamics == 3 else None
    return mixer, dynamics(logits[0] + mixer.dt_bias, alpha, logits[-1], mixer.settings)


@pytest.mark.parametrize("changes", [{}, {"frac_alpha_fixed": 0.7}])
def test_statistics_equal_a_direct_computation(changes):
    # A wide clamp, so that some modes lie on either end of it and some on none.
    model, tokens = tiny(frac_rho_eps=0.1, **changes).double(), ids(3, 40)
    seen = memory_statistics(model, tokens)
    assert len(seen) == 2
    mixer, dyn = first_dynamics(model, tokens)
    for name, values in zip(("delta", "alpha", "lambda"), dyn, strict=True):
        assert getattr(seen[0], f"{name}_mean") == pytest.approx(values.mean().item())
        deviation = values.std(correction=0).item()
        assert getattr(seen[0], f"{name}_std") == pytest.approx(deviation, abs=1e-12)
    rho = mode_log_decay(dyn, mixer.base_log_tau.double(), rho_eps=0.0).exp()
    low, high = (rho <= 0.1).double().mean(), (rho >= 0.9).double().mean()
    assert low > 0 and high > 0 and low + high < 1
    assert seen[0].clamped_share == pytest.approx((low + high).item())


def test_a_fixed_alpha_has_no_spread_and_no_clamp_no_share():
    layer = memory_statistics(tiny(frac_alpha_fixed=0.5, frac_rho_eps=0.0), ids(1, 8))[0]
    assert (layer.alpha_mean, layer.alpha_std, layer.clamped_share) == (0.5, 0.0, 0.0)


def kernel_by_hand(model, tokens, lags):
    beta = {
        "one_minus_rho": lambda rho, lam: 1 - rho,
        "exact_zoh": lambda rho, lam: (1 - rho) / lam,
        "equal_variance": lambda rho, lam: np.sqrt(1 - rho**2),
    }[model.config.frac_beta]
    mixer, dyn = first_dynamics(model, tokens)
    delta, alpha, lam = (x.mean((0, 1)).detach().numpy()[:, None] for x in dyn)
    tau = np.exp(mixer.base_log_tau.double().numpy())
    weights = tau**-alpha / (tau**-alpha).sum(-1, keepdims=True)
    rho = np.exp(-delta * lam ** (1 / alpha) / tau)
    amplitudes = weights**2 * beta(rho, lam)
    return (amplitudes[..., None] * rho[..., None] ** np.asarray(lags)).sum(1)


@pytest.mark.parametrize("beta", BETAS)
def test_horizon_equals_a_sum_of_the_kernel(beta):
    model = tiny(frac_tau_min=50.0, frac_tau_max=2000.0, frac_beta=beta).double()
    tokens = ids(2, 30)
    # All of it: the slowest mode has a timescale of some thousand tokens.
    kernel = kernel_by_hand(model, tokens, np.arange(200_000))
    lags = (kernel * np.arange(200_000)).sum(-1) / kernel.sum(-1)
    expected = math.sqrt(lags[0] * lags[1])
    assert memory_statistics(model, tokens)[0].horizon == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("beta", BETAS)
def test_kernel_equals_a_direct_computation_and_sums_to_the_masses(beta):
    model, tokens = tiny(frac_beta=beta).double(), ids(2, 30)
    lags = [0, 1, 7, 300]
    kernel = layer_kernel(model, 0, lags, tokens)
    np.testing.assert_allclose(kernel, kernel_by_hand(model, tokens, lags), rtol=1e-12)
    assert kernel.shape == (2, 4) and kernel.dtype == np.float64
    assert not np.array_equal(kernel, layer_kernel(model, -1, lags, tokens))


@pytest.mark.parametrize(
    "changes",
    [*({"frac_beta": beta} for beta in BETAS), {"frac_rw_normalization": "sigmoid"}],
)
def test_a_kernel_is_what_the_layer_answers_to_an_impulse(changes):
    """With constant controls and no residuals, the scan gives the kernel itself."""
    model = tiny(**changes).double()
    mixer = model.model.layers[0].mixer
    nn.init.zeros_(mixer.dyn_proj.weight)
    inner = torch.zeros(1, 50, 32, dtype=torch.float64)
    read, write, log_decay = mixer.controls(inner, inner)
    u = torch.zeros(1, 50, 2, 1, dtype=torch.float64)
    u[:, 0] = 1
    from flash_frac import frac_scan

    y = frac_scan(u, read, write, log_decay, backend="recurrent").y[0, :, :, 0].T
    kernel = layer_kernel(model, 0, np.arange(50), ids(1, 4))
    np.testing.assert_allclose(y.detach().numpy(), kernel, rtol=1e-10)


def test_nothing_is_left_behind():
    model, tokens = tiny().train(), ids(2, 20)
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    memory_statistics(model, tokens)
    layer_kernel(model, 0, [1.0], tokens)
    with pytest.raises(ValueError, match="input_ids must be in"):
        memory_statistics(model, tokens + 32)
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_packed_sequences_are_told_apart():
    model, a, b = tiny().double(), ids(1, 9), ids(1, 14)
    bounds = torch.tensor([0, 9, 23])
    packed = memory_statistics(model, torch.cat([a, b], 1), bounds)[1]
    parts = [memory_statistics(model, part)[1].delta_mean for part in (a, b)]
    assert packed.delta_mean == pytest.approx((9 * parts[0] + 14 * parts[1]) / 23)


def test_names_for_logs():
    logs = memory_statistics(tiny(), ids(1, 8))[0].as_dict("memory/layer_0/")
    assert {"memory/layer_0/alpha_mean", "memory/layer_0/horizon"} <= set(logs)
    assert all(isinstance(value, float) for value in logs.values())


def test_the_base_model_will_do():
    model, tokens = tiny(), ids(1, 8)
    assert memory_statistics(model.model, tokens) == memory_statistics(model, tokens)


def test_errors_name_the_remedy():
    model, tokens = tiny(), ids(1, 8)
    with pytest.raises(ValueError, match="pass the model inside"):
        memory_statistics(nn.DataParallel(model), tokens)
    with pytest.raises(ValueError, match=r"layer must be a Frac layer, one of \[0, 1\], got 2"):
        layer_kernel(model, 2, [1], tokens)
    with pytest.raises(ValueError, match="lags must be"):
        layer_kernel(model, 0, [-1], tokens)


def test_evaluating_has_no_gradients_and_restores_on_errors():
    model = tiny().train()
    with pytest.raises(RuntimeError), evaluating(model):
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError
    assert model.training and torch.is_grad_enabled()


def test_training_loads_the_statistics_alone():
    code = (
        "import sys, flash_frac.inspect; print(*(n for n in sys.modules if 'frac.inspect.' in n))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    sources = [path.read_text() for path in Path(flash_frac.train.__file__).parent.glob("*.py")]
    imported = {name for text in sources for name in re.findall(r"flash_frac\.inspect[.\w]*", text)}
    assert imported == {"flash_frac.inspect.statistics"}


def test_every_public_name_is_found():
    for name in flash_frac.inspect.__all__:
        assert getattr(flash_frac.inspect, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flash_frac.inspect.nonsense
