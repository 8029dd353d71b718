"""The kernels of the controls against `controls` in float64: values, gradients, options."""

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from flash_frac.ops import ControlSettings, controls, controls_from_logits
from flash_frac.ops.arithmetic import expm1, log
from flash_frac.ops.control.triton import control_op, kernel_settings
from tests.kernels.devices import DEVICE, DTYPES

SWITCHES = {
    "default": ControlSettings(),
    "1.3B": ControlSettings(alpha_min=0.1, alpha_max=0.9),
    "alpha_fixed": ControlSettings(alpha_fixed=0.7),
    "lambda_softplus": ControlSettings(lambda_map="softplus"),
    "no_clamp": ControlSettings(rho_eps=0, alpha_min=0.1),
    "exact_prior": ControlSettings(prior="exact"),
    "exact_prior_on_write": ControlSettings(prior="exact", read_prior=False, alpha_fixed=0.4),
    "no_read_prior": ControlSettings(read_prior=False),
    "no_write_prior": ControlSettings(write_prior=False),
    "no_prior": ControlSettings(read_prior=False, write_prior=False, prior="exact"),
    "sigmoid": ControlSettings(normalization="sigmoid"),
    "no_normalization": ControlSettings(normalization="none"),
    "exact_zoh": ControlSettings(beta="exact_zoh"),
    "equal_variance": ControlSettings(beta="equal_variance"),
    "equal_variance_no_clamp": ControlSettings(beta="equal_variance", rho_eps=0, alpha_min=0.1),
    "wide_delta": ControlSettings(dt_max=64.0),
}
RESULTS = ("read", "write", "log_decay")
RESULTS += ("dyn_logits", "rw_logits", "dt_bias", "read_gate", "write_gate", "log_tau")
# Tokens times heads behind a check, from one draw or several; fewer would leave it to luck.
ROWS = 200


def random_inputs(
    settings, *, batch=2, time=37, heads=3, modes=8, dtype=torch.float32, own_tau=False
):
    """Arguments of `controls_from_logits`, wide enough for every clamp to act somewhere."""
    num_dynamics = 3 if settings.alpha_fixed is None else 2
    wide = torch.promote_types(dtype, torch.float32)
    log_tau = torch.linspace(0, 17 * math.log(2), modes, dtype=wide)
    if own_tau:
        log_tau = log_tau * torch.rand(heads, 1, dtype=wide) + torch.randn(heads, 1, dtype=wide)
    inputs = (
        3 * torch.randn(batch, time, num_dynamics * heads, dtype=dtype),
        2 * torch.randn(batch, time, 2 * heads * modes, dtype=dtype),
        torch.randn(heads, dtype=wide),
        torch.tensor([-1.0], dtype=wide),
        torch.tensor([0.5], dtype=wide),
        log_tau,
    )
    return [x.to(DEVICE).requires_grad_() for x in inputs]


triton_controls = partial(controls_from_logits, backend="triton")


def torch_form(inputs, settings, mask=None):
    dyn, rw, dt_bias, read_gate, write_gate, log_tau = inputs
    heads, modes = dt_bias.shape[-1], log_tau.shape[-1]
    logits = dyn.unflatten(-1, (-1, heads)).unbind(-2)
    read_logit, write_logit = rw.unflatten(-1, (2, heads, modes)).unbind(-3)
    return controls(
        logits[0] + dt_bias,
        None if len(logits) == 2 else logits[1],
        logits[-1],
        read_logit,
        write_logit,
        log_tau,
        settings=settings,
        read_gate=read_gate.sigmoid(),
        write_gate=write_gate.sigmoid(),
        mask=mask,
    )


def magnitudes(inputs, settings, mask, weights):
    """Size of each gradient, or, where rows are summed over, of the absolute values summed.

    Rounding in a sum is measured against its terms, which may cancel. A row is a token of a head.
    """
    dyn, rw, dt_bias, *shared = (x.detach() for x in inputs)
    *shared, log_tau = shared
    heads, modes, size = dt_bias.shape[0], log_tau.shape[-1], dyn.shape[:2]
    mask = dyn.new_ones(size) if mask is None else mask

    def loss(dyn, rw, dt_bias, log_tau, mask, weights, *shared):
        got = torch_form((dyn, rw, dt_bias, *shared, log_tau), settings, mask)
        return sum((x * w).sum() for x, w in zip(got, weights, strict=True))

    rows = (
        dyn.unflatten(-1, (-1, heads)).transpose(-1, -2).flatten(0, 2),
        rw.unflatten(-1, (2, heads, modes)).transpose(-2, -3).flatten(0, 2).flatten(1),
        dt_bias.expand(*size, heads).reshape(-1, 1),
        log_tau.expand(*size, heads, modes).reshape(-1, modes),
        mask[..., None].expand(*size, heads).flatten(),
        tuple(w.flatten(0, 2)[:, None] for w in weights),
    )
    of_row = torch.func.grad(loss, argnums=(0, 1, 2, 3, 6, 7))
    found = torch.vmap(of_row, in_dims=(0,) * 6 + (None,) * 2)(*rows, *shared)
    ddyn, drw, dbias, dlog_tau, *dgates = found
    summed = (dbias.view(-1, heads), *dgates, dlog_tau.view(-1, *log_tau.shape))
    return [x.norm() for x in (ddyn, drw, *(x.abs().sum(0) for x in summed))]


def compare(inputs, settings, mask):
    """Errors of the kernel and of the torch form, and a unit rounding, of all that is computed."""
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch_form(exact_inputs, settings, mask)
    weights = [torch.randn(x.shape, dtype=torch.float64).to(x) for x in exact]

    got = triton_controls(*inputs, settings=settings, mask=mask)
    plain = torch_form(inputs, settings, mask)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in got)
    weights = [w.to(x.dtype) for w, x in zip(weights, got, strict=True)]
    results = [torch.autograd.grad(x, inputs, weights) for x in (got, plain)]
    weights = [w.double() for w in weights]
    reference = torch.autograd.grad(exact, exact_inputs, weights)

    sizes = [x.norm() for x in exact]
    sizes += magnitudes(exact_inputs, settings, mask, weights)
    values = [(*got, *results[0]), (*plain, *results[1]), (*exact, *reference)]
    errors = []
    for size, mine, theirs, truth in zip(sizes, *values, strict=True):
        assert mine.shape == truth.shape
        both = [(x.double() - truth).norm().item() for x in (mine, theirs)]
        errors.append([*both, torch.finfo(mine.dtype).eps / 2 * size.item()])
    return errors


def check(settings, *, mask=None, **sizes):
    """Errors against float64 are at most twice those of the torch form plus a unit rounding.

    The error of a few numbers, and that of a single one like the gradient of a gate the more, is a
    matter of luck, in either form. So small inputs are drawn several times, and errors pooled.
    """
    draws, num_rows = [], 0
    while num_rows < ROWS:
        inputs = random_inputs(settings, **sizes)
        draws.append(compare(inputs, settings, mask))
        num_rows += inputs[0].shape[0] * inputs[0].shape[1] * inputs[2].shape[0]
    pooled = torch.tensor(draws, dtype=torch.float64).norm(dim=0).tolist()
    for name, (mine, theirs, rounding) in zip(RESULTS, pooled, strict=True):
        assert mine <= 2 * (theirs + rounding), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch(name, dtype):
    check(SWITCHES[name], dtype=dtype)


@pytest.mark.parametrize("time", [1, 37])
@pytest.mark.parametrize("modes", [1, 4, 8, 16, 32])
def test_sizes(modes, time):
    check(ControlSettings(), time=time, modes=modes)


@pytest.mark.parametrize("heads", [1, 17])
def test_more_heads_than_a_block(heads):
    check(ControlSettings(), time=5, heads=heads, modes=5)


@pytest.mark.parametrize("name", ["default", "exact_prior", "no_prior"])
@pytest.mark.parametrize("sizes", [{}, {"time": 5, "heads": 17, "modes": 5}], ids=str)
def test_heads_with_timescales_of_their_own(name, sizes):
    check(SWITCHES[name], own_tau=True, **sizes)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", ["default", "exact_prior"])
def test_padding_is_an_identity_step(name, dtype):
    settings = SWITCHES[name]
    mask = (torch.rand(2, 37) < 0.7).to(DEVICE)
    check(settings, mask=mask.to(dtype))
    inputs = random_inputs(settings)
    got = triton_controls(*inputs, settings=settings, mask=mask.to(dtype))
    assert (got.write[~mask] == 0).all() and (got.log_decay[~mask] == 0).all()


@triton.jit
def elementary_kernel(p_x, p_expm1, p_log, SIZE: tl.constexpr):
    o_x = tl.arange(0, SIZE)
    b_x = tl.load(p_x + o_x)
    tl.store(p_expm1 + o_x, expm1(-b_x))
    tl.store(p_log + o_x, log(b_x))


def test_expm1_and_log():
    x = torch.logspace(-12, 2, 8192, dtype=torch.float64).float().to(DEVICE)
    results = torch.empty_like(x), torch.empty_like(x)
    elementary_kernel[(1,)](x, *results, SIZE=8192)
    exact = torch.expm1(-x.double())
    assert ((results[0] - exact) / exact).abs().max() < 4e-7
    exact = x.double().log()
    assert ((results[1] - exact) / exact).nan_to_num().abs().max() < 4e-7


@pytest.mark.parametrize("beta", ["one_minus_rho", "equal_variance"])
def test_slow_modes_keep_their_digits(beta):
    """Element by element: the slowest mode writes 1e-12 of the fastest, and as exactly."""
    settings = ControlSettings(
        rho_eps=0, normalization="sigmoid", alpha_min=0.1, alpha_max=0.9, beta=beta
    )
    inputs = random_inputs(settings, modes=16)
    exact = torch_form([x.double() for x in inputs], settings)
    plain, got = torch_form(inputs, settings), triton_controls(*inputs, settings=settings)
    for mine, theirs, truth in zip(got, plain, exact, strict=True):
        error = ((theirs - truth) / truth).abs().max()
        assert ((mine - truth) / truth).abs().max() <= 2 * (error + 2**-24)


def test_small_alpha_stays_finite():
    """4^(1/0.01) is beyond float32; the decay is then complete, and no gradient is NaN."""
    settings = ControlSettings(rho_eps=0, alpha_min=0.01, alpha_max=0.02)
    inputs = random_inputs(settings)
    got, plain = triton_controls(*inputs, settings=settings), torch_form(inputs, settings)
    assert got.log_decay.min() == plain.log_decay.min() == -88
    gradients = torch.autograd.grad(got, inputs, [torch.ones_like(x) for x in got])
    assert all(x.isfinite().all() for x in (*got, *gradients))


@pytest.mark.parametrize("which", [0, 1])
def test_nan_is_not_hidden(which):
    settings = ControlSettings()
    inputs = [x.detach() for x in random_inputs(settings, time=3)]
    inputs[which][0, 1] = math.nan
    read, write, log_decay = triton_controls(*inputs, settings=settings)
    hit = (read, write, log_decay) if which == 0 else (read, write)
    for x in hit:
        assert x[0, 1].isnan().all() and x[0, [0, 2]].isfinite().all() and x[1].isfinite().all()


def test_a_mode_that_never_decays_has_finite_gradients():
    """At rho = 1 the slope of sqrt(1 - rho^2) is infinite."""
    settings = ControlSettings(rho_eps=0, beta="equal_variance")
    inputs = random_inputs(settings, time=3)
    inputs[5] = torch.full_like(inputs[5], 200.0).requires_grad_()
    got, plain = triton_controls(*inputs, settings=settings), torch_form(inputs, settings)
    assert (got.log_decay == 0).all()
    torch.testing.assert_close(tuple(got), tuple(plain))
    ones = [torch.ones_like(x) for x in got]
    gradients = [torch.autograd.grad(x, inputs, ones) for x in (got, plain)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("own_tau", [False, True])
@pytest.mark.parametrize("name", ["default", "equal_variance"])
def test_is_reproducible(name, own_tau):
    settings = SWITCHES[name]
    inputs = random_inputs(settings, own_tau=own_tau)
    runs = []
    for _ in range(2):
        got = triton_controls(*inputs, settings=settings)
        runs.append(torch.autograd.grad(got, inputs, [torch.ones_like(x) for x in got]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_strided_inputs_and_fixed_timescales():
    settings = ControlSettings()
    inputs = random_inputs(settings, time=5)
    whole = torch.cat([inputs[0], inputs[0]], -1).detach().requires_grad_()
    strided = [whole[..., : inputs[0].shape[-1]], *inputs[1:5], inputs[5].detach()]
    got, expected = triton_controls(*strided, settings=settings), torch_form(strided, settings)
    torch.testing.assert_close(tuple(got), tuple(expected))
    got.write.sum().backward()
    (gradient,) = torch.autograd.grad(expected.write.sum(), whole)
    torch.testing.assert_close(whole.grad, gradient)


def test_no_tokens():
    settings = ControlSettings()
    inputs = random_inputs(settings, time=0)
    got = triton_controls(*inputs, settings=settings)
    assert got.read.shape == (2, 0, 3, 8)
    sum(x.sum() for x in got).backward()
    assert all((x.grad == 0).all() for x in inputs[2:])


@pytest.mark.parametrize("name", ["default", "exact_prior", "alpha_fixed"])
def test_compiles_in_one_graph(name):
    settings = SWITCHES[name]
    inputs = random_inputs(settings, time=5)
    mask = torch.ones(2, 5, dtype=torch.int64, device=DEVICE)

    def loss(*inputs):
        got = triton_controls(*inputs, settings=settings, mask=mask)
        return sum((x * x).sum() for x in got)

    expected = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs), inputs)
    torch.testing.assert_close(got, expected)


def test_operator_is_registered_well():
    inputs = random_inputs(ControlSettings(), time=3)
    settings = kernel_settings(ControlSettings())
    torch.library.opcheck(control_op.registered, (*inputs, None, None, *settings))
    prior = torch.randn(2, 3, 3, 8, device=DEVICE, requires_grad=True)
    mask = torch.ones(2, 3, device=DEVICE)
    torch.library.opcheck(control_op.registered, (*inputs, prior, mask, *settings))
    own = random_inputs(ControlSettings(), time=3, own_tau=True)
    torch.library.opcheck(control_op.registered, (*own, None, None, *settings))


def test_wrong_arguments():
    settings = ControlSettings()
    inputs = random_inputs(settings, time=3)
    with pytest.raises(
        ValueError, match=r"dyn_logits must have shape \(2, 3, 6\), got \(2, 3, 9\)"
    ):
        triton_controls(*inputs, settings=ControlSettings(alpha_fixed=1.0))
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 3\), got \(3, 2\)"):
        triton_controls(*inputs, settings=settings, mask=torch.ones(3, 2, device=DEVICE))
    own = inputs[5].expand(2, -1)
    with pytest.raises(ValueError, match=r"log_tau must have shape \(3, 8\), got \(2, 8\)"):
        triton_controls(*inputs[:5], own, settings=settings)
    with pytest.raises(ValueError, match="backend 'triton' cannot run here"):
        triton_controls(*(x.double() for x in inputs), settings=settings)
