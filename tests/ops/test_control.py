"""From logits to read, write and log_decay: the formulas, every option, and the numerics."""

import dataclasses
import math

import pytest
import torch

from flash_frac.ops import (
    ControlSettings,
    Dynamics,
    controls,
    dilate,
    dynamics,
    frac_scan,
    log_prior,
    mode_log_decay,
)
from flash_frac.ops.control.reference import mode_beta
from flash_frac.ops.scan.reference import expm1
from flash_frac.theory import bin_masses, geometric_bank, named_bank, relaxation

LOG_TAU = torch.tensor(geometric_bank(16)).log()


def random_logits(dtype=torch.float64, *, size=(2, 9, 3), modes=16):
    logits = [torch.randn(*size, dtype=dtype) for _ in range(3)]
    return (*logits, *(torch.randn(*size, modes, dtype=dtype) for _ in range(2)))


def test_formulas_of_the_paper():
    """Algorithm 1, written out with exp and 1 - rho, in float64."""
    delta_logit, alpha_logit, lambda_logit, read_logit, write_logit = random_logits()
    settings = ControlSettings(alpha_min=0.1, alpha_max=0.9, rho_eps=0)
    got = controls(
        delta_logit,
        alpha_logit,
        lambda_logit,
        read_logit,
        write_logit,
        LOG_TAU,
        settings=settings,
        read_gate=0.3,
        write_gate=torch.tensor(0.2, dtype=torch.float64),
    )
    delta = torch.log1p(delta_logit.exp()).clamp(1e-4, 1)
    alpha = 0.1 + 0.8 * alpha_logit.sigmoid()
    lam = 0.25 + 3.75 * lambda_logit.sigmoid()
    tau = LOG_TAU.exp() / (lam ** (1 / alpha))[..., None]
    rho = torch.exp(-delta[..., None] / tau)
    prior = -alpha[..., None] * LOG_TAU
    torch.testing.assert_close(got.log_decay.exp(), rho)
    torch.testing.assert_close(got.read, (prior + 0.3 * read_logit).softmax(-1))
    write = (prior + 0.2 * write_logit).softmax(-1) * (1 - rho)
    torch.testing.assert_close(got.write, write, rtol=1e-8, atol=0)


def test_slow_modes_keep_their_digits():
    """float32 against float64, delta lam^(1/alpha) from 1e-10 to 1e6 and tau to 2^17."""
    log_tau = LOG_TAU.float()
    rates = torch.logspace(-10, 6, 200, dtype=torch.float64)
    exact = Dynamics(rates, torch.full_like(rates, 0.5), torch.ones_like(rates))
    rounded = Dynamics(*(x.float() for x in exact))
    got = mode_log_decay(rounded, log_tau, rho_eps=0)
    reference = mode_log_decay(exact, log_tau.double(), rho_eps=0)
    # A few roundings, of 2^-24 each: delta, exp(-log tau) within two, and the product.
    assert ((got - reference) / reference).abs().max() < 4 * 2**-24
    beta, exact_beta = -torch.expm1(got), -torch.expm1(reference)
    assert ((beta - exact_beta) / exact_beta).abs().max() < 6 * 2**-24


@pytest.mark.parametrize("run", [expm1, torch.compile(expm1)], ids=["eager", "compiled"])
def test_small_changes_keep_their_digits(run):
    """Also when compiled, which makes exp(x) - 1 of torch.expm1 on a CPU: off by 0.08 here."""
    x = -torch.logspace(-8, 1.9, 1000, dtype=torch.float64)
    exact = torch.expm1(x.float().double())
    assert ((run(x.float()) - exact) / exact).abs().max() < 8 * 2**-24


def test_small_alpha_stays_finite():
    """4^(1/0.01) is beyond float32; the decay is then complete, and no gradient is NaN."""
    leaves = [torch.tensor([x], requires_grad=True) for x in (1.0, 0.01, 4.0)]
    log_decay = mode_log_decay(Dynamics(*leaves), LOG_TAU.float(), rho_eps=0)
    log_decay.exp().sum().backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_clamp_in_log_space():
    extreme = Dynamics(*(torch.tensor([x]) for x in (1.0, 0.1, 4.0)))
    log_decay = mode_log_decay(extreme, LOG_TAU.float(), rho_eps=1e-6)
    assert log_decay.min() == torch.tensor(math.log(1e-6))
    slow = Dynamics(*(torch.tensor([x]) for x in (1e-4, 0.1, 0.25)))
    log_decay = mode_log_decay(slow, LOG_TAU.float(), rho_eps=1e-6)
    assert log_decay.max() == torch.tensor(math.log1p(-1e-6))
    free = mode_log_decay(slow, LOG_TAU.float(), rho_eps=0)
    assert -1e-14 < free.max() < 0


def test_alpha_is_fixed():
    delta, _, lam, read, write = random_logits()
    settings = ControlSettings(alpha_fixed=1.0)
    assert (dynamics(delta, None, lam, settings).alpha == 1).all()
    got = controls(delta, None, lam, read, write, LOG_TAU, settings=settings)
    torch.testing.assert_close(got.read, (read - LOG_TAU).softmax(-1))
    with pytest.raises(ValueError, match=r"alpha_logit must be None when alpha_fixed is 1\.0"):
        controls(delta, delta, lam, read, write, LOG_TAU, settings=settings)
    with pytest.raises(ValueError, match="alpha_logit must be given when alpha_fixed is None"):
        controls(delta, None, lam, read, write, LOG_TAU, settings=ControlSettings())


def test_lambda_softplus():
    logits = torch.linspace(-9, 9, 50)
    settings = ControlSettings(lambda_map="softplus")
    lam = dynamics(logits, logits, logits, settings).lam
    torch.testing.assert_close(lam, torch.log1p(logits.exp()).clamp(0.25, 4.0))


@pytest.mark.parametrize(
    "settings, rate",
    [
        ({"alpha_min": 0.1, "alpha_max": 0.9}, 3.13),
        ({"lambda_map": "softplus", "alpha_min": 0.001, "alpha_max": 1.0}, 0.33),
        ({}, 2.57),
    ],
)
def test_rates_at_zero_logits(settings, rate):
    """What docs/maths.md says of the clocks of the authors' code and of the paper."""
    zero = torch.zeros(1, 1, 1)
    dyn = dynamics(zero, zero, zero, ControlSettings(**settings))
    assert (dyn.delta * dyn.lam ** (1 / dyn.alpha)).item() == pytest.approx(rate, abs=0.005)


@pytest.mark.parametrize("which", ["read", "write"])
def test_without_a_prior(which):
    logits = random_logits()
    settings = ControlSettings(**{f"{which}_prior": False})
    full = controls(*logits, LOG_TAU, settings=ControlSettings())
    got = controls(*logits, LOG_TAU, settings=settings)
    beta = -torch.expm1(got.log_decay)
    if which == "read":
        torch.testing.assert_close(got.read, logits[3].softmax(-1))
        assert torch.equal(got.write, full.write)
    else:
        torch.testing.assert_close(got.write, logits[4].softmax(-1) * beta)
        assert torch.equal(got.read, full.read)


def test_without_softmax():
    logits = random_logits()
    alpha = dynamics(*logits[:3], ControlSettings()).alpha
    raw = logits[3] - alpha[..., None] * LOG_TAU
    got = controls(*logits, LOG_TAU, settings=ControlSettings(normalization="none"))
    torch.testing.assert_close(got.read, raw)
    got = controls(*logits, LOG_TAU, settings=ControlSettings(normalization="sigmoid"))
    torch.testing.assert_close(got.read, raw.sigmoid())


def test_exact_zoh():
    logits = random_logits()
    lam = dynamics(*logits[:3], ControlSettings()).lam
    paper = controls(*logits, LOG_TAU, settings=ControlSettings())
    exact = controls(*logits, LOG_TAU, settings=ControlSettings(beta="exact_zoh"))
    torch.testing.assert_close(exact.write, paper.write / lam[..., None])


def test_equal_variance():
    """A mode that is fed independent tokens of variance 1 has that variance, whatever its rho."""
    logits = random_logits()
    settings = ControlSettings(beta="equal_variance", normalization="none", rho_eps=0)
    ones = torch.ones_like(logits[4])
    got = controls(
        *logits[:4], ones, LOG_TAU, settings=dataclasses.replace(settings, write_prior=False)
    )
    # sum_n (beta rho^n)^2 = beta^2 / (1 - rho^2)
    torch.testing.assert_close(got.write**2 / -torch.expm1(2 * got.log_decay), ones)


def test_equal_variance_keeps_its_digits():
    """float32 against float64, rates from 1e-12 to 80; and no gradient is NaN where rho is 1."""
    rates = torch.logspace(-12, 1.9, 400, dtype=torch.float64).float()
    lam = torch.ones(400)
    got = mode_beta(-rates[:, None], lam, "equal_variance")[:, 0]
    exact = (-torch.expm1(-2 * rates.double())).sqrt()
    assert ((got - exact) / exact).abs().max() < 4 * 2**-24
    still = torch.zeros(1, 1, requires_grad=True)
    mode_beta(still, lam[:1], "equal_variance").sum().backward()
    assert still.grad.isfinite().all()


@pytest.mark.parametrize("beta", ["one_minus_rho", "exact_zoh", "equal_variance"])
def test_dilated_controls_are_those_of_a_longer_delta(beta):
    delta, *rest = random_logits()
    # Ranges in which no clamp acts, because time is dilated after them.
    ranges = {"dt_min": 1e-9, "dt_max": 1e9, "alpha_min": 0.5, "lambda_max": 1.5}
    settings = ControlSettings(beta=beta, rho_eps=0, **ranges)
    elapsed = torch.rand(2, 9, dtype=torch.float64) * 5 + 0.1
    longer = torch.nn.functional.softplus(delta) * elapsed[..., None]
    expected = controls(longer.expm1().log(), *rest, LOG_TAU, settings=settings)
    got = dilate(controls(delta, *rest, LOG_TAU, settings=settings), elapsed, beta=beta)
    torch.testing.assert_close(tuple(got), tuple(expected))


@pytest.mark.parametrize("bank", ["geometric", "W2_M16_simplex", "W1_M16_simplex"])
def test_exact_prior_is_the_mass_of_each_bin(bank):
    tau = geometric_bank(16) if bank == "geometric" else named_bank(bank)
    log_tau = torch.tensor(tau).log()
    alpha = torch.linspace(0.05, 0.999, 40, dtype=torch.float64)
    expected = torch.tensor(bin_masses(tau, alpha.numpy()))
    got = log_prior(alpha, log_tau, "exact").exp()
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(alpha))
    single = log_prior(alpha.float(), log_tau.float(), "exact").exp()
    torch.testing.assert_close(single.double(), expected, rtol=2e-4, atol=1e-12)


def test_exact_prior_is_closer_to_the_fractional_kernel():
    """Mean sup error of the paper's bank over its window: 0.16 asymptotic, under 1e-2 exact."""
    alphas = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
    s = torch.logspace(math.log10(4), math.log10(6553.6), 400, dtype=torch.float64)
    target = torch.tensor(relaxation(s.numpy()[:, None], alphas.numpy()))
    modes = torch.exp(-s[:, None] / LOG_TAU.exp())
    errors = {
        prior: (modes @ log_prior(alphas, LOG_TAU, prior).softmax(-1).T - target).abs().amax(0)
        for prior in ("asymptotic", "exact")
    }
    expected = torch.tensor([0.265, 0.163, 0.110, 0.106, 0.133], dtype=torch.float64)
    torch.testing.assert_close(errors["asymptotic"], expected, rtol=0, atol=1e-3)
    assert errors["exact"].mean() < 1e-2


def test_exact_prior_has_finite_gradients():
    alpha = torch.tensor([0.01, 0.2, 0.999, 1.0], requires_grad=True)
    log_prior(alpha, LOG_TAU.float(), "exact").softmax(-1)[:, 3].sum().backward()
    assert alpha.grad.isfinite().all()
    checked = torch.tensor([0.05, 0.3, 0.7, 0.95], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: log_prior(a, LOG_TAU, "exact"), (checked,))


def test_masked_tokens_are_identity_steps():
    logits = random_logits(torch.float32, size=(2, 12, 3))
    mask = torch.ones(2, 12)
    mask[0, :5], mask[1, 4:9] = 0, 0
    got = controls(*logits, LOG_TAU, settings=ControlSettings(), mask=mask)
    assert (got.write[mask == 0] == 0).all() and (got.log_decay[mask == 0] == 0).all()
    u = torch.randn(2, 12, 3, 4)
    _, state = frac_scan(u, *got)
    for row in range(2):
        kept = [x[row : row + 1, mask[row] == 1] for x in (u, *got)]
        _, alone = frac_scan(*kept)
        torch.testing.assert_close(state[row : row + 1], alone)


def test_low_precision_logits_give_float32():
    logits = random_logits(torch.bfloat16)
    got = controls(*logits, LOG_TAU.float(), settings=ControlSettings())
    assert {x.dtype for x in got} == {torch.float32}
    wide = controls(*(x.float() for x in logits), LOG_TAU.float(), settings=ControlSettings())
    assert all(torch.equal(a, b) for a, b in zip(got, wide, strict=True))


def test_gradcheck():
    logits = [x.requires_grad_() for x in random_logits(size=(1, 2, 2), modes=3)]
    log_tau = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64)
    for settings in (
        ControlSettings(),
        ControlSettings(prior="exact", beta="exact_zoh"),
        ControlSettings(beta="equal_variance"),
    ):
        assert torch.autograd.gradcheck(
            lambda *x, settings=settings: tuple(controls(*x, log_tau, settings=settings)), logits
        )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"alpha_min": 0.0}, "alpha_min and alpha_max must satisfy .* got 0.0 and 0.95"),
        ({"alpha_max": 1.1}, "alpha_max <= 1"),
        ({"alpha_min": 0.5, "alpha_max": 0.4}, "got 0.5 and 0.4"),
        ({"alpha_fixed": 0.0}, r"alpha_fixed must be None or in \(0, 1\], got 0.0"),
        ({"dt_min": 0.0}, "0 < dt_min <= dt_max, got 0.0 and 1.0"),
        ({"lambda_max": 0.1}, "0 < lambda_min <= lambda_max, got 0.25 and 0.1"),
        ({"rho_eps": 0.5}, r"rho_eps must be in \[0, 0.5\), got 0.5"),
        ({"prior": "flat"}, "prior must be one of .*'flat'"),
        ({"normalization": "relu"}, "normalization must be one of .*'relu'"),
        ({"beta": "x"}, "beta must be one of"),
        ({"lambda_map": "exp"}, "lambda_map must be one of"),
    ],
)
def test_wrong_settings(wrong, match):
    with pytest.raises(ValueError, match=match):
        ControlSettings(**wrong)
