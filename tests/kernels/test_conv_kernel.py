"""The convolution kernels against the torch form in float64, with all gradients."""

import pytest
import torch
from flash_frac.ops.custom_ops import conv as ops
from flash_frac.ops.custom_ops.conv import fused_causal_conv

from flash_frac.ops import causal_conv
from flash_frac.ops.testing import relative_error
from tests.kernels.devices import DEVICE, DTYPES

LARGE = [] if DEVICE == "cpu" else [(4, 1000, 2048), (1, 5000, 4096), (2, 129, 300)]
# Sums of a handful of numbers differ by luck, so short inputs are wide.
SHAPES = [(2, 1, 33), (2, 2, 33), (2, 3, 33), (1, 63, 7), (1, 64, 7), (1, 100, 5), *LARGE]
LENGTHS = [[9], [0, 1, 2, 0, 7, 3, 0], [1, 1, 1, 5], [61, 1, 1, 1, 4]]


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def tensors(shape, taps, num, dtype, *, bias=True, window=True):
    """x, weight, bias and window; the parameters are float32, as under autocast."""
    x, weight = normal(*shape, dtype=dtype), normal(shape[2], 1, taps)
    b = normal(shape[2]) if bias else None
    return x, weight, b, normal(num, shape[2], taps - 1, dtype=dtype) if window else None


def with_gradients(function, x, weight, bias, window, cu_seqlens=None):
    """u, new window, and gradients of a random functional of both."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, window)]
    outputs = function(*leaves[:3], window=leaves[3], cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(DEVICE)
        loss = loss + (y.double() * weights).sum()
    given = [t for t in leaves if t is not None]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, given)]


def assert_close(inputs, cu_seqlens=None):
    got = with_gradients(fused_causal_conv, *inputs, cu_seqlens)
    expected = with_gradients(causal_conv, *inputs, cu_seqlens)
    wide = [None if t is None else t.double() for t in inputs]
    exact = with_gradients(causal_conv, *wide, cu_seqlens)
    for i, (a, b, c) in enumerate(zip(got, expected, exact, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        bound = 2 * (relative_error(b, c) + torch.finfo(a.dtype).eps / 2)
        assert relative_error(a, c) <= bound, f"tensor {i}"
    assert torch.equal(got[1], expected[1])


def boundaries(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch(shape, taps, dtype):
    assert_close(tensors(shape, taps, shape[0], dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [3, 8])
def test_without_window(taps, bias):
    assert_close(tensors((1, 70, 7), taps, 1, torch.float32, bias=bias, window=False))


@pytest.mark.parametrize("time", [1, 6, 9])
def test_more_taps_than_tokens(time):
    assert_close(tensors((2, time, 33), 8, 2, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed(lengths, taps, window, dtype):
    inputs = tensors((1, sum(lengths), 17), taps, len(lengths), dtype, window=window)
    assert_close(inputs, boundaries(lengths))


def test_packed_int32():
    inputs = tensors((1, 9, 33), 4, 3, torch.float32)
    assert_close(inputs, boundaries([2, 0, 7], torch.int32))


@pytest.mark.skipif(DEVICE == "cpu", reason="too slow for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_large(dtype):
    lengths = [1000, 0, 1, 63, 64, 65, 2, 777]
    assert_close(tensors((1, sum(lengths), 520), 4, len(lengths), dtype), boundaries(lengths))


@pytest.mark.parametrize("shape", [(2, 5, 17), (3, 1, 17), (1, 4, 17)])
def test_x_is_half_of_a_projection(shape):
    x = normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)[0]
    _, *parameters = tensors(shape, 4, shape[0], torch.float32)
    got = with_gradients(fused_causal_conv, x, *parameters)
    whole = with_gradients(fused_causal_conv, x.contiguous(), *parameters)
    assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
    assert got[0].is_contiguous()


@pytest.mark.parametrize("cut", [0, 1, 5, 66, 70])
def test_in_pieces(cut):
    x, *parameters = tensors((1, 70, 5), 4, 1, torch.float32)
    whole = fused_causal_conv(x, *parameters[:2], window=parameters[2])
    first = fused_causal_conv(x[:, :cut], *parameters[:2], window=parameters[2])
    second = fused_causal_conv(x[:, cut:], *parameters[:2], window=first[1])
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0])
    assert torch.equal(second[1], whole[1])


def test_only_the_window_is_used():
    x, weight, bias, window = (t.requires_grad_() for t in tensors((2, 2, 3), 4, 2, torch.float32))
    new = fused_causal_conv(x, weight, bias, window=window)[1]
    dx, dweight, dwindow = torch.autograd.grad(new.sum(), (x, weight, window))
    assert (dx == 1).all() and (dweight == 0).all()
    assert torch.equal(dwindow, torch.tensor([0.0, 0, 1], device=DEVICE).expand(2, 3, 3))


def test_gradients_are_deterministic():
    inputs = tensors((1, 70, 5), 4, 1, torch.float32)
    first, second = (with_gradients(fused_causal_conv, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_opcheck(packed, given):
    num = 3 if packed else 2
    shape = (1, 4, 3) if packed else (2, 2, 3)
    inputs = tensors(shape, 3, num, torch.float32, bias=given, window=given)
    leaves = [None if t is None else t.requires_grad_() for t in inputs]
    where = (boundaries([1, 0, 3]), torch.tensor([0, 2, 2, 2]).int().to(DEVICE))
    arguments = (*leaves, *(where if packed else (None, None)))
    torch.library.opcheck(ops._causal_conv.registered, arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(packed):
    both = normal(*((1, 4, 6) if packed else (2, 2, 6)))
    parameters = tensors((1, 1, 3), 3, 3 if packed else 2, torch.float32)[1:]
    leaves = [t.requires_grad_() for t in (both, *parameters)]
    cu_seqlens = boundaries([1, 0, 3]) if packed else None

    def function(both, weight, bias, window):
        u, new = fused_causal_conv(
            both.chunk(2, -1)[0], weight, bias, window=window, cu_seqlens=cu_seqlens
        )
        return u.sin().sum() + new.cos().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*leaves), leaves)
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        assert torch.equal(a, b)


def test_errors():
    x, weight, bias, window = tensors((2, 4, 3), 4, 2, torch.float32)
    with pytest.raises(ValueError, match=r"x must be contiguous in its last axis, got strides"):
        fused_causal_conv(normal(2, 3, 4).transpose(1, 2), weight, bias)
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 1, K\) with 1 <= K <= 8"):
        fused_causal_conv(x, normal(3, 1, 9), bias)
    with pytest.raises(ValueError, match=r"bias must have shape \(3,\), got \(4,\)"):
        fused_causal_conv(x, weight, normal(4))
    with pytest.raises(ValueError, match=r"window must have shape \(2, 3, 3\), got \(1, 3, 3\)"):
        fused_causal_conv(x, weight, bias, window=window[:1])
    with pytest.raises(ValueError, match=r"a batch of 1, got a batch of 2"):
        fused_causal_conv(x, weight, bias, cu_seqlens=boundaries([4]))
    with pytest.raises(ValueError, match=r"fused_causal_conv cannot run here: .*float32"):
        fused_causal_conv(x.double(), weight, bias)
