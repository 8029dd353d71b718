"""frac_scan and frac_step: the backends agree, gradients, long sequences, errors."""

import numpy as np
import pytest
import torch
from torch import func
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from flash_frac.ops import frac_scan, frac_step
from flash_frac.ops.scan.reference import expm1
from flash_frac.ops.testing import random_inputs, relative_error
from tests.backends import DEVICE, backends_here
from tests.errors import assert_all_as_good

EXACT = 1e-12  # float64 against float64, relative: a thousand roundings


def with_gradients(inputs, state, **options):
    """y, final state, and the gradients of a random functional of both, for all five inputs."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    y, final = frac_scan(*leaves[:4], initial_state=leaves[4], **options)
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
        for x in (y, final)
    ]
    ((y.double() * weights[0]).sum() + (final.double() * weights[1]).sum()).backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [y.detach(), final.detach(), *gradients]


def random_state(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=dtype)


def worst_error(values, references):
    return max(relative_error(a, b) for a, b in zip(values, references, strict=True))


@pytest.mark.parametrize("time", [0, 1, 15, 16, 17, 63, 100, 257, 1024])
def test_torch_is_recurrent_at_every_length(time):
    inputs = random_inputs(2, time, 2, 16, 5, dtype=torch.float64)
    state = random_state(2, 2, 16, 5)
    got = with_gradients(inputs, state, backend="torch")
    assert worst_error(got, with_gradients(inputs, state, backend="recurrent")) < EXACT


@pytest.mark.parametrize("modes", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("channels", [1, 7, 32])
def test_torch_is_recurrent_at_every_size(modes, channels):
    inputs = random_inputs(1, 70, 3, modes, channels, dtype=torch.float64)
    state = random_state(1, 3, modes, channels)
    got = with_gradients(inputs, state, backend="torch")
    assert worst_error(got, with_gradients(inputs, state, backend="recurrent")) < EXACT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("time", [1, 100, 1024])
def test_error_is_at_most_twice_that_of_the_specification(dtype, time):
    """Against float64 on the same rounded inputs, for outputs, state and every gradient."""
    inputs = random_inputs(2, time, 2, 16, 8, dtype=dtype, rho_eps=1e-6)
    state = random_state(2, 2, 16, 8).float()
    exact = with_gradients(inputs.to(torch.float64), state.double(), backend="recurrent")
    names = ("y", "state", "du", "dread", "dwrite", "dlog_decay", "dinitial")
    got = with_gradients(inputs, state, backend="torch")
    reference = with_gradients(inputs, state, backend="recurrent")
    for name, a, b, c in zip(names, got, reference, exact, strict=True):
        rounding = torch.finfo(a.dtype).eps / 2
        bound = 2 * (relative_error(b, c) + rounding)
        assert relative_error(a, c) <= bound, name


def checkable(*sizes):
    """Inputs whose log_decay stays below 0 when gradcheck moves it."""
    inputs = random_inputs(*sizes, dtype=torch.float64, rho_eps=1e-3)
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("backend", backends_here(torch.float64))
def test_gradcheck(backend):
    inputs = checkable(2, 19, 2, 3, 2)
    state = random_state(2, 2, 3, 2).requires_grad_()

    def scan(*leaves):
        return tuple(frac_scan(*leaves[:4], initial_state=leaves[4], backend=backend))

    assert gradcheck(scan, (*inputs, state))


def test_gradcheck_packed():
    inputs = checkable(1, 23, 1, 2, 2)
    state = random_state(4, 1, 2, 2).requires_grad_()
    cu_seqlens = torch.tensor([0, 1, 1, 18, 23])

    def scan(*leaves):
        return tuple(frac_scan(*leaves[:4], initial_state=leaves[4], cu_seqlens=cu_seqlens))

    assert gradcheck(scan, (*inputs, state))


def test_gradcheck_step():
    leaves = [x.detach()[:, 0].requires_grad_() for x in checkable(2, 1, 2, 3, 4)]
    state = random_state(2, 2, 3, 4).requires_grad_()
    assert gradcheck(lambda *x: tuple(frac_step(*x)), (*leaves, state))


@pytest.mark.parametrize("backend", backends_here(torch.float64))
@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 5]], ids=["plain", "packed"])
def test_gradgradcheck(backend, bounds):
    inputs = checkable(1, 5, 1, 2, 2)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    state = random_state(1 if bounds is None else 3, 1, 2, 2).requires_grad_()
    options = {"cu_seqlens": cu_seqlens, "backend": backend}

    def scan(*leaves):
        return tuple(frac_scan(*leaves[:4], initial_state=leaves[4], **options))

    assert gradgradcheck(scan, (*inputs, state))


def test_second_derivatives_over_several_chunks():
    """A gradient penalty by the torch backend is that of the specification."""
    penalties = []
    for backend in ("torch", "recurrent"):
        inputs = checkable(2, 70, 1, 4, 3)
        y, state = frac_scan(*inputs, backend=backend)
        slopes = torch.autograd.grad((y**3).sum() + (state**3).sum(), inputs, create_graph=True)
        penalty = sum(slope.square().sum() for slope in slopes)
        penalties.append([penalty.detach(), *torch.autograd.grad(penalty, inputs)])
    assert worst_error(*penalties) < EXACT


def test_transforms_of_torch_func():
    """grad, jvp, vmap and their compositions, and dual numbers, against autograd's gradients."""
    inputs = [x.detach() for x in checkable(2, 40, 1, 4, 3)]
    leaves = [x.clone().requires_grad_() for x in inputs]

    def loss(*x):
        return frac_scan(*x).y.square().sum()

    def one(*x):
        return loss(*(t[None] for t in x))

    expected = torch.autograd.grad(loss(*leaves), leaves)
    every = (0, 1, 2, 3)
    assert worst_error(func.grad(loss, argnums=every)(*inputs), expected) < EXACT
    assert worst_error(func.vmap(func.grad(one, argnums=every))(*inputs), expected) < EXACT
    _, pull = func.vjp(loss, *inputs)
    assert worst_error(pull(torch.ones((), dtype=torch.float64)), expected) < EXACT
    tangents = tuple(1e-3 * torch.ones_like(x) for x in inputs)
    slope = sum((1e-3 * g).sum() for g in expected)
    _, tangent = func.jvp(loss, tuple(inputs), tangents)
    assert relative_error(tangent, slope) < EXACT
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(inputs, tangents, strict=True)]
        assert relative_error(forward_ad.unpack_dual(loss(*duals)).tangent, slope) < EXACT


DECAYS = [0.0, -1e-6, -1.0, -1e3, -1e6, -1e9, -1e30, -torch.inf]


@pytest.mark.parametrize("backend", backends_here())
@pytest.mark.parametrize("decay", DECAYS)
def test_the_whole_range_of_decays(backend, decay):
    """One token in 16 forgets so much: outputs, state and gradients against float64."""
    inputs = random_inputs(1, 100, 2, 8, 4, device=DEVICE)
    inputs.log_decay[:, ::16] = decay
    state = random_state(1, 2, 8, 4).float().to(DEVICE)
    exact = with_gradients(inputs.to(torch.float64), state.double(), backend="recurrent")
    assert all(x.isfinite().all() for x in exact)
    usual = with_gradients(inputs, state, backend="recurrent")
    assert_all_as_good(with_gradients(inputs, state, backend=backend), usual, exact)


def test_one_exponential_is_exact():
    """One mode, constant input: the state is 1 - rho^t in closed form."""
    rate, time = 1e-5, 50_000
    ones = torch.ones(1, time, 1, 1)
    log_decay = torch.full_like(ones, -rate)
    y, _ = frac_scan(ones, ones, -torch.expm1(log_decay), log_decay)
    t = torch.arange(1, time + 1, dtype=torch.float64)
    rate = -log_decay[0, 0, 0, 0].double()
    assert ((y.flatten() + torch.expm1(-rate * t)).abs() / -torch.expm1(-rate * t)).max() < 1e-6


@torch.inference_mode()
def test_step_keeps_the_digits_of_slow_modes():
    """64K tokens in float32: expm1(log_decay) S loses 1e-5, exp(log_decay) S more than 4e-4.

    Constant plus white input, timescales to 2^17 at a step of 0.1; worst mode against float64.
    """
    log_decay = -0.1 / torch.logspace(0, 17, 16, base=2)[None, None]
    write = -torch.expm1(log_decay)
    inputs = 1 + torch.randn(65_536, 1, 1, generator=torch.Generator().manual_seed(0))
    state = torch.zeros(1, 1, 16, 1)
    for u in inputs[:, None]:
        state = frac_step(u, write, write, log_decay, state).state
    weights = [x.double().expand(1, len(inputs), 1, 16) for x in (write, write, log_decay)]
    exact = frac_scan(inputs[None].double(), *weights).state
    # In numpy, which is quicker with 16 numbers and rounds alike.
    naive, kept, rates = np.zeros(16, np.float32), log_decay.exp().numpy(), write.numpy()
    for u in inputs.numpy().ravel():
        naive = kept * naive + rates * u
    assert ((state - exact) / exact).abs().max() < 1e-5
    assert (torch.from_numpy(naive).view_as(exact) / exact - 1).abs().max() > 4e-4


# Relative error of the last 8,192 of 65,536 outputs against float64; stated in docs/maths.md.
LONG_ERRORS = {torch.float32: 4e-7, torch.bfloat16: 1.8e-3}


@pytest.mark.parametrize("dtype", LONG_ERRORS)
def test_64k_tokens_stay_accurate(dtype):
    exact_inputs = random_inputs(1, 65_536, 1, 16, 4, dtype=torch.float64, rho_eps=1e-6)
    inputs = exact_inputs.to(dtype)
    y, state = frac_scan(*inputs)
    exact, exact_state = frac_scan(*inputs.to(torch.float64))
    assert y.isfinite().all() and state.isfinite().all()
    assert relative_error(y[:, -8192:], exact[:, -8192:]) < LONG_ERRORS[dtype]
    assert relative_error(state, exact_state) < 1e-6
    # And with the rounding of the inputs: 2.8e-3 in bfloat16.
    unrounded, _ = frac_scan(*exact_inputs)
    assert relative_error(y[:, -8192:], unrounded[:, -8192:]) < 1.8 * LONG_ERRORS[dtype]


def test_compiles_without_graph_breaks():
    """tests/models compiles a training step as far as machine code."""
    inputs = [x.requires_grad_() for x in random_inputs(1, 40, 1, 4, 8)]

    def loss(*x):
        y, state = frac_scan(*x)
        return y.square().sum() + state.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*inputs), inputs))


def test_one_graph_serves_all_lengths():
    """Of torch.compile and torch.export alike, on both sides of every size inside."""

    def scan(*x):
        return tuple(frac_scan(*x, backend="torch"))

    class Scan(torch.nn.Module):
        def forward(self, *x):
            return scan(*x)

    counter = CompileCounter()
    compiled = torch.compile(scan, fullgraph=True, backend=counter, dynamic=True)
    dynamic = tuple({1: torch.export.Dim.AUTO} for _ in range(4))
    example = tuple(random_inputs(2, 40, 3, 4, 5, dtype=torch.float64))
    exported = torch.export.export(Scan(), example, dynamic_shapes={"x": dynamic}).module()
    for time in (31, 2, 33, 512, 513, 1100):
        inputs = random_inputs(2, time, 3, 4, 5, dtype=torch.float64)
        expected = frac_scan(*inputs, backend="recurrent")
        for got in (compiled(*inputs), exported(*inputs)):
            assert worst_error(got, expected) < EXACT, time
    assert counter.frame_count == 1


def test_autocast_does_not_touch_the_scan():
    inputs = [x.requires_grad_() for x in random_inputs(1, 64, 1, 8, 16)]
    y, state = frac_scan(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_cast, state_cast = frac_scan(*inputs)
        y_cast.sum().backward()
    assert torch.equal(y, y_cast) and torch.equal(state, state_cast)
    got = [x.grad.clone() for x in inputs]
    for x in inputs:
        x.grad = None
    y.sum().backward()
    assert all(torch.equal(a, x.grad) for a, x in zip(got, inputs, strict=True))


def scan_error(match, *, change=None, **options):
    inputs = dict(
        zip(("u", "read", "write", "log_decay"), random_inputs(2, 6, 2, 4, 3), strict=True)
    )
    inputs.update(change or {})
    with pytest.raises(ValueError, match=match):
        frac_scan(**inputs, **options)


def test_errors_name_the_argument():
    x = torch.zeros
    scan_error(r"u must be .*\(B, T, H, D\).*\(2, 6\)", change={"u": x(2, 6)})
    scan_error(r"u must be .*int64", change={"u": x(2, 6, 2, 3, dtype=torch.long)})
    scan_error(r"read must have shape \(B, T, H, M\)", change={"read": x(2, 6, 4)})
    scan_error(
        r"write must have shape \(2, 6, 2, 4\), got \(2, 6, 2, 5\)", change={"write": x(2, 6, 2, 5)}
    )
    scan_error("log_decay must be float32", change={"log_decay": x(2, 6, 2, 4).bfloat16()})
    scan_error("log_decay must be at most 0.*got 0.5", change={"log_decay": x(2, 6, 2, 4) + 0.5})
    scan_error("write must be on cpu", change={"write": x(2, 6, 2, 4, device="meta")})
    scan_error(r"initial_state must have shape \(2, 2, 4, 3\)", initial_state=x(1, 2, 4, 3))
    scan_error("initial_state must be torch.float32", initial_state=x(2, 2, 4, 3).bfloat16())
    scan_error("backend must be one of 'auto'.*'nope'", backend="nope")
    scan_error("cu_seqlens needs one packed row", cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("values", [[0, 5], [1, 6], [0, 4, 2, 6], [0, 7], [0] * 12])
def test_wrong_boundaries(values):
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 6, got"):
        frac_scan(*random_inputs(1, 6, 1, 2, 2), cu_seqlens=torch.tensor(values))


@pytest.mark.parametrize(
    "bad", [torch.tensor([[0, 6]]), torch.tensor([0.0, 6.0]), torch.tensor([0])]
)
def test_wrong_kind_of_boundaries(bad):
    with pytest.raises(ValueError, match="cu_seqlens must be a 1-d int32 or int64"):
        frac_scan(*random_inputs(1, 6, 1, 2, 2), cu_seqlens=bad)


def test_step_errors():
    inputs = [x[:, 0] for x in random_inputs(2, 1, 2, 4, 3)]
    with pytest.raises(ValueError, match=r"state must have shape \(2, 2, 4, 3\)"):
        frac_step(*inputs, torch.zeros(2, 2, 4, 4))


@pytest.mark.parametrize("backend", backends_here())
def test_sizes_of_zero(backend):
    """No row and no token are nothing to do; no head, channel or mode is a mistake."""
    for sizes in ((0, 6, 2, 4, 3), (2, 0, 2, 4, 3)):
        y, state = frac_scan(*random_inputs(*sizes, device=DEVICE), backend=backend)
        assert y.shape == (*sizes[:3], 3) and state.shape == (sizes[0], 2, 4, 3)
    for axis, sizes in {"H": (2, 6, 0, 4, 3), "M": (2, 6, 2, 0, 3), "D": (2, 6, 2, 4, 0)}.items():
        batch, time, heads, modes, channels = sizes
        u = torch.zeros(batch, time, heads, channels, device=DEVICE)
        weights = torch.zeros(*sizes[:3], modes, device=DEVICE)
        with pytest.raises(ValueError, match=f"at least one .*got {axis} = 0"):
            frac_scan(u, weights, weights, weights, backend=backend)
        state = torch.zeros(batch, heads, modes, channels, device=DEVICE)
        with pytest.raises(ValueError, match=f"at least one .*got {axis} = 0"):
            frac_step(u[:, 0], *(weights[:, 0],) * 3, state, backend=backend)
    empty = [x[:0, 0] for x in random_inputs(2, 6, 2, 4, 3, device=DEVICE)]
    nothing = torch.zeros(0, 2, 4, 3, device=DEVICE)
    assert frac_step(*empty, nothing, backend=backend).y.shape == (0, 2, 3)


def test_expm1_in_a_graph():
    """All digits of slow modes, and -1 for a decay that leaves nothing."""

    class Graph(torch.nn.Module):
        def forward(self, x):
            return expm1(x)

    x = torch.tensor([-torch.inf, -1e4, -200.0, -64.0, -1.0, -1e-6, 0.0])
    got = torch.export.export(Graph(), (x,)).module()(x)
    torch.testing.assert_close(got, torch.expm1(x), rtol=2**-22, atol=0)
