"""delta_scan and delta_step: the backends agree, gradients, decays, compilers, errors."""

import pytest
import torch
import torch.nn.functional as F
from torch import func
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from flash_frac.ops import delta_scan, delta_step
from flash_frac.ops.backends import MOST_KEYS, MOST_VALUES, choose
from flash_frac.ops.delta.passes import unit_triangular_inverse
from flash_frac.ops.testing import random_delta_inputs, relative_error
from tests.backends import DEVICE, INTERPRETED, backends_here
from tests.errors import assert_all_as_good, widen, with_gradients

EXACT = 1e-12  # float64 against float64, relative: a thousand roundings


def draw(*sizes, dtype=torch.float64, device="cpu", **options):
    """Inputs and a state for each row."""
    inputs = random_delta_inputs(*sizes, dtype=dtype, device=device, **options)
    batch, _, heads, keys, channels = sizes
    generator = torch.Generator().manual_seed(2)
    state = torch.randn(batch, heads, keys, channels, generator=generator, dtype=torch.float64)
    return [*inputs, state.to(device, torch.promote_types(dtype, torch.float32))]


def scan(backend, **options):
    return lambda *x: delta_scan(*x[:5], initial_state=x[5], backend=backend, **options)


def worst_error(values, references):
    return max(relative_error(a, b) for a, b in zip(values, references, strict=True))


def assert_torch_is_recurrent(*sizes):
    tensors = draw(*sizes)
    got, expected = (with_gradients(scan(name), tensors) for name in ("torch", "recurrent"))
    assert worst_error(got, expected) < EXACT


@pytest.mark.parametrize("time", [0, 1, 15, 31, 32, 33, 63, 100, 257])
def test_torch_is_recurrent_at_every_length(time):
    assert_torch_is_recurrent(2, time, 2, 6, 5)


@pytest.mark.parametrize("keys", [1, 7, 32])
@pytest.mark.parametrize("channels", [1, 5, 40])
def test_torch_is_recurrent_at_every_size(keys, channels):
    assert_torch_is_recurrent(1, 70, 3, keys, channels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("time", [1, 100, 1024])
def test_error_is_at_most_twice_that_of_the_specification(dtype, time):
    """Against float64 on the same rounded inputs, for outputs, state and every gradient."""
    tensors = draw(2, time, 2, 16, 8, dtype=dtype)
    got, usual = (with_gradients(scan(name), tensors) for name in ("torch", "recurrent"))
    assert_all_as_good(got, usual, with_gradients(scan("recurrent"), widen(tensors)))


def test_keys_that_repeat_cost_no_digits():
    """One key for all tokens, of unit length, fully rewritten: powers of L would reach 1e9."""
    tensors = draw(1, 100, 1, 8, 4, dtype=torch.float32)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[1]).contiguous()
    tensors[3] = torch.ones_like(tensors[3])
    tensors[4] = torch.zeros_like(tensors[4])
    got, usual = (with_gradients(scan(name), tensors) for name in ("torch", "recurrent"))
    exact = with_gradients(scan("recurrent"), widen(tensors))
    assert_all_as_good(got, usual, exact)


def test_inverse_by_doubling():
    matrix = torch.randn(3, 32, 32, dtype=torch.float64).tril(-1)
    expected = torch.linalg.inv(matrix + torch.eye(32, dtype=torch.float64))
    assert relative_error(unit_triangular_inverse(matrix), expected) < 1e-8
    assert unit_triangular_inverse(matrix[:, :1, :1]).eq(1).all()


def checkable(*sizes):
    """Inputs whose log_decay stays below 0 when gradcheck moves it."""
    return [x.requires_grad_() for x in draw(*sizes)]


@pytest.mark.parametrize("backend", backends_here(torch.float64))
def test_gradcheck(backend):
    assert gradcheck(lambda *x: tuple(scan(backend)(*x)), checkable(2, 9, 2, 3, 2))


def test_gradcheck_packed():
    *inputs, _ = checkable(1, 37, 1, 2, 2)
    state = torch.randn(4, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    packed = scan("torch", cu_seqlens=torch.tensor([0, 1, 1, 34, 37]))
    assert gradcheck(lambda *x: tuple(packed(*x)), (*inputs, state))


def test_gradcheck_step():
    *inputs, state = (x.detach() for x in draw(2, 1, 2, 3, 4))
    leaves = [x.requires_grad_() for x in (*(t[:, 0].contiguous() for t in inputs), state)]
    assert gradcheck(lambda *x: tuple(delta_step(*x)), leaves)


@pytest.mark.parametrize("backend", backends_here(torch.float64))
@pytest.mark.parametrize("bounds", [None, [0, 2, 2, 5]], ids=["plain", "packed"])
def test_gradgradcheck(backend, bounds):
    *inputs, state = checkable(1, 5, 1, 2, 2)
    options = {}
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds)
        state = torch.randn(3, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda *x: tuple(scan(backend, **options)(*x)), (*inputs, state))


def test_second_derivatives_over_several_chunks():
    """A gradient penalty by the torch backend is that of the specification."""
    penalties = []
    for backend in ("torch", "recurrent"):
        inputs = checkable(2, 70, 1, 4, 3)
        y, state = scan(backend)(*inputs)
        slopes = torch.autograd.grad((y**3).sum() + (state**3).sum(), inputs, create_graph=True)
        penalty = sum(slope.square().sum() for slope in slopes)
        penalties.append([penalty.detach(), *torch.autograd.grad(penalty, inputs)])
    assert worst_error(*penalties) < EXACT


def test_transforms_of_torch_func():
    """grad, jvp, vmap and their compositions, and dual numbers, against autograd's gradients."""
    inputs = draw(2, 40, 1, 4, 3)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def loss(*x):
        return scan("auto")(*x).y.square().sum()

    def one(*x):
        return loss(*(t[None] for t in x))

    expected = torch.autograd.grad(loss(*leaves), leaves)
    every = tuple(range(6))
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
    """One token in 16 forgets so much: outputs, state and gradients against float64.

    With 16 key channels: a chunk overwrites a state of 8 four times, and its sums over tokens,
    which cancel then, cost the initial state's gradient 1.2 times what the rule allows.
    """
    tensors = draw(1, 100, 2, 16, 8, dtype=torch.float32, device=DEVICE)
    tensors[4][:, ::16] = decay
    exact = with_gradients(scan("recurrent"), widen(tensors))
    assert all(x.isfinite().all() for x in exact)
    usual = with_gradients(scan("recurrent"), tensors)
    assert_all_as_good(with_gradients(scan(backend), tensors), usual, exact)


def test_a_slow_decay_keeps_its_digits():
    """Over 32K tokens nothing is written: what is left of the state is exp(-rate t)."""
    time, rate = 32_768, 1e-5
    zeros, beta = torch.zeros(1, time, 1, 1), torch.zeros(1, time, 1)
    log_decay = torch.full_like(beta, -rate)
    state = torch.randn(1, 1, 1, 1)
    _, final = delta_scan(zeros, zeros, zeros, beta, log_decay, initial_state=state)
    exact = state.double() * (log_decay[0, 0, 0].double() * time).exp()
    assert relative_error(final, exact) < 1e-5


def test_a_key_finds_its_value():
    """Without decay, orthogonal keys written in full: each query finds the last value."""
    keys = torch.eye(8)[torch.randint(8, (100,))]
    values = torch.randn(100, 3)
    ones = torch.ones(1, 100, 1)
    tokens = (keys[None, :, None], keys[None, :, None], values[None, :, None])
    y, state = delta_scan(*tokens, ones, 0 * ones)
    torch.testing.assert_close(y[0, :, 0], values)
    for key in keys.unique(dim=0):
        last = values[(keys == key).all(-1).nonzero().max()]
        torch.testing.assert_close(key @ state[0, 0], last)


def test_compiles_without_graph_breaks():
    inputs = [x.requires_grad_() for x in draw(1, 40, 1, 4, 8, dtype=torch.float32)]

    def loss(*x):
        y, state = scan("torch")(*x)
        return y.square().sum() + state.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*inputs), inputs))


def test_one_graph_serves_all_lengths():
    """Of torch.compile and torch.export alike, on both sides of every size inside."""

    def plain(*x):
        return tuple(delta_scan(*x, backend="torch"))

    class Scan(torch.nn.Module):
        def forward(self, *x):
            return plain(*x)

    counter = CompileCounter()
    compiled = torch.compile(plain, fullgraph=True, backend=counter, dynamic=True)
    dynamic = tuple({1: torch.export.Dim.AUTO} for _ in range(5))
    example = tuple(draw(2, 40, 3, 4, 5)[:5])
    exported = torch.export.export(Scan(), example, dynamic_shapes={"x": dynamic}).module()
    for time in (31, 2, 33, 512, 513):
        inputs = draw(2, time, 3, 4, 5)[:5]
        expected = delta_scan(*inputs, backend="recurrent")
        for got in (compiled(*inputs), exported(*inputs)):
            assert worst_error(got, expected) < EXACT, time
    assert counter.frame_count == 1


def test_autocast_does_not_touch_the_scan():
    tensors = draw(1, 64, 1, 8, 16, dtype=torch.float32)
    expected = with_gradients(scan("torch"), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = with_gradients(scan("torch"), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_strides_are_free():
    """Parts of one projection, as a layer has them."""
    *inputs, state = draw(2, 40, 2, 4, 3, dtype=torch.float32)
    spread = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    assert not spread[0].is_contiguous()
    expected = with_gradients(scan("torch"), [*inputs, state])
    got = with_gradients(scan("torch"), [*spread, state])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def scan_error(match, *, change=None, **options):
    names = ("q", "k", "v", "beta", "log_decay")
    inputs = dict(zip(names, random_delta_inputs(2, 6, 2, 4, 3), strict=True))
    inputs.update(change or {})
    with pytest.raises(ValueError, match=match):
        delta_scan(**inputs, **options)


def test_errors_name_the_argument():
    x = torch.zeros
    scan_error(r"v must be .*\(B, T, H, D\).*\(2, 6\)", change={"v": x(2, 6)})
    scan_error(r"v must be .*int64", change={"v": x(2, 6, 2, 3, dtype=torch.long)})
    scan_error(r"q must have shape \(B, T, H, K\)", change={"q": x(2, 6, 4)})
    scan_error(r"k must have shape \(2, 6, 2, 4\), got \(2, 6, 2, 5\)", change={"k": x(2, 6, 2, 5)})
    scan_error(r"beta must have shape \(2, 6, 2\)", change={"beta": x(2, 6, 2, 1)})
    scan_error("beta must be a floating-point", change={"beta": x(2, 6, 2, dtype=torch.long)})
    scan_error("q must be torch.float32 like v", change={"q": x(2, 6, 2, 4).bfloat16()})
    scan_error("log_decay must be float32", change={"log_decay": x(2, 6, 2).bfloat16()})
    scan_error("log_decay must be at most 0.*got 0.5", change={"log_decay": x(2, 6, 2) + 0.5})
    scan_error("beta must be on cpu", change={"beta": x(2, 6, 2, device="meta")})
    scan_error(r"initial_state must have shape \(2, 2, 4, 3\)", initial_state=x(1, 2, 4, 3))
    scan_error("initial_state must be torch.float32", initial_state=x(2, 2, 4, 3).bfloat16())
    scan_error("backend must be one of 'auto'.*'nope'", backend="nope")
    scan_error("cu_seqlens needs one packed row", cu_seqlens=torch.tensor([0, 6]))
    inputs = [t[:, 0] for t in random_delta_inputs(2, 1, 2, 4, 3)]
    with pytest.raises(ValueError, match=r"state must have shape \(2, 2, 4, 3\)"):
        delta_step(*inputs, x(2, 2, 4, 4))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton on this machine")
@pytest.mark.parametrize("operator", ["delta", "delta_step"])
def test_kernels_have_limits(operator):
    """The torch backend takes over where the kernels end."""
    for keys, values in ((MOST_KEYS + 1, 8), (8, MOST_VALUES + 1)):
        v, k = torch.zeros(1, 1, 1, values), torch.zeros(1, 1, 1, keys)
        with pytest.raises(ValueError, match=f"up to 128 .* got {keys} and {values}"):
            choose(operator, "triton", v, k)
        assert choose(operator, "auto", v, k) is choose(operator, "torch", v, k)


@pytest.mark.parametrize("backend", backends_here())
def test_sizes_of_zero(backend):
    """No row and no token are nothing to do; no head or channel is a mistake."""
    for sizes in ((0, 6, 2, 4, 3), (2, 0, 2, 4, 3)):
        y, state = delta_scan(*random_delta_inputs(*sizes, device=DEVICE), backend=backend)
        assert y.shape == (*sizes[:3], 3) and state.shape == (sizes[0], 2, 4, 3)
    for axis, sizes in {"H": (2, 6, 0, 4, 3), "K": (2, 6, 2, 0, 3), "D": (2, 6, 2, 4, 0)}.items():
        inputs = random_delta_inputs(*sizes, device=DEVICE)
        with pytest.raises(ValueError, match=f"at least one .*got {axis} = 0"):
            delta_scan(*inputs, backend=backend)
        state = torch.zeros(sizes[0], *sizes[2:], device=DEVICE)
        with pytest.raises(ValueError, match=f"at least one .*got {axis} = 0"):
            delta_step(*(x[:, 0] for x in inputs), state, backend=backend)
    empty = [x[:0, 0] for x in random_delta_inputs(2, 6, 2, 4, 3, device=DEVICE)]
    nothing = torch.zeros(0, 2, 4, 3, device=DEVICE)
    assert delta_step(*empty, nothing, backend=backend).y.shape == (0, 2, 3)


def test_a_key_of_unit_length_in_16_bits():
    """Rounded keys are longer than 1 by up to 2^-8: the state stays bounded over 4K tokens."""
    inputs = random_delta_inputs(1, 4096, 1, 8, 4, dtype=torch.bfloat16)
    k = F.normalize(torch.randn(8), dim=0).bfloat16().expand_as(inputs.k)
    ones = torch.ones_like(inputs.beta)
    y, state = delta_scan(inputs.q, k, inputs.v, ones, 0 * inputs.log_decay)
    assert y.isfinite().all() and state.norm() < 10
