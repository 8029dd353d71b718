"""The convolution kernels against the torch form in float64, with all gradients."""

import pytest
import torch

from flash_frac.ops import causal_conv
from flash_frac.ops.conv.triton import conv_op, masked_conv_op
from tests.errors import assert_all_as_good, widen, with_gradients
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


def convolve(cu_seqlens=None, backend="triton"):
    """`causal_conv` as a function of the tensors above."""

    def function(x, weight, bias, window):
        options = {"cu_seqlens": cu_seqlens, "backend": backend}
        return causal_conv(x, weight, bias, window=window, **options)

    return function


def assert_close(inputs, cu_seqlens=None):
    plain = convolve(cu_seqlens, "torch")
    got = with_gradients(convolve(cu_seqlens), inputs)
    expected = with_gradients(plain, inputs)
    assert_all_as_good(got, expected, with_gradients(plain, widen(inputs)))
    assert torch.equal(got[1], expected[1])


def boundaries(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4])
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
@pytest.mark.parametrize("taps", [2, 4])
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


# Padding on the left, on the right, between tokens and alone; tokens alone; holes around a segment.
MASKS = {
    "any side": [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0] * 5, [1] * 5],
    "one token": [[0], [1]],
    "long": [[0] * 140 + [1] * 60, [1] * 2 + [0] * 150 + [1] * 48, [1] + [0] * 199],
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("rows", MASKS.values(), ids=MASKS)
def test_padding_is_stepped_over(rows, taps, given, monkeypatch):
    """To the bit as when tokens are moved, which is what happens where gradients are wanted."""
    mask = torch.tensor(rows, device=DEVICE)
    inputs = tensors((*mask.shape, 5), taps, len(rows), torch.float32, bias=given, window=given)
    launched = []
    kernel = masked_conv_op.kernel
    monkeypatch.setattr(masked_conv_op, "kernel", lambda *a: launched.append(0) or kernel(*a))
    wants = [tensor if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    moved = causal_conv(*wants[:3], window=wants[3], mask=mask, backend="triton")
    assert moved.u.requires_grad and not launched
    with torch.no_grad():
        got = causal_conv(*wants[:3], window=wants[3], mask=mask, backend="triton")
    assert launched
    assert torch.equal(got.u[mask != 0], moved.u[mask != 0])
    assert torch.equal(got.window, moved.window)
    torch.testing.assert_close(got.u, moved.u)


@pytest.mark.parametrize("shape", [(2, 5, 17), (3, 1, 17), (1, 4, 17)])
def test_x_is_half_of_a_projection(shape):
    x = normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)[0]
    _, *parameters = tensors(shape, 4, shape[0], torch.float32)
    got = with_gradients(convolve(), (x, *parameters))
    whole = with_gradients(convolve(), (x.contiguous(), *parameters))
    assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))
    assert got[0].is_contiguous()


@pytest.mark.parametrize("cut", [0, 1, 5, 66, 70])
def test_in_pieces(cut):
    x, *parameters = tensors((1, 70, 5), 4, 1, torch.float32)
    whole = convolve()(x, *parameters)
    first = convolve()(x[:, :cut], *parameters)
    second = convolve()(x[:, cut:], *parameters[:2], first[1])
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[0])
    assert torch.equal(second[1], whole[1])


def test_only_the_window_is_used():
    x, weight, bias, window = (t.requires_grad_() for t in tensors((2, 2, 3), 4, 2, torch.float32))
    new = convolve()(x, weight, bias, window)[1]
    dx, dweight, dwindow = torch.autograd.grad(new.sum(), (x, weight, window))
    assert (dx == 1).all() and (dweight == 0).all()
    assert torch.equal(dwindow, torch.tensor([0.0, 0, 1], device=DEVICE).expand(2, 3, 3))


def test_gradients_are_deterministic():
    inputs = tensors((1, 70, 5), 4, 1, torch.float32)
    first, second = (with_gradients(convolve(), inputs) for _ in range(2))
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
    torch.library.opcheck(conv_op.registered, arguments)


def test_opcheck_of_padding():
    mask = torch.tensor([[False, True], [True, True]], device=DEVICE)
    inputs = tensors((2, 2, 3), 3, 2, torch.float32)
    torch.library.opcheck(masked_conv_op.registered, (*inputs, mask))


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(packed):
    both = normal(*((1, 4, 6) if packed else (2, 2, 6)))
    parameters = tensors((1, 1, 3), 3, 3 if packed else 2, torch.float32)[1:]
    leaves = [t.requires_grad_() for t in (both, *parameters)]
    cu_seqlens = boundaries([1, 0, 3]) if packed else None

    def function(both, weight, bias, window):
        u, new = convolve(cu_seqlens)(both.chunk(2, -1)[0], weight, bias, window)
        return u.sin().sum() + new.cos().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*leaves), leaves)
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        assert torch.equal(a, b)


def test_x_of_any_strides():
    x, *parameters = tensors((2, 9, 17), 4, 2, torch.float32)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    got = with_gradients(convolve(), (turned, *parameters))
    whole = with_gradients(convolve(), (x, *parameters))
    assert all(torch.equal(a, b) for a, b in zip(got, whole, strict=True))


def test_errors():
    x, weight, bias, window = tensors((2, 4, 3), 4, 2, torch.float32)
    for match, wrong in (
        (r"bias must have shape \(3,\), got \(4,\)", (x, weight, normal(4), window)),
        (r"window must have shape \(2, 3, 3\), got \(1, 3, 3\)", (x, weight, bias, window[:1])),
    ):
        with pytest.raises(ValueError, match=match):
            convolve()(*wrong)
    with pytest.raises(ValueError, match=r"a batch of 1, got a batch of 2"):
        convolve(boundaries([4]))(x, weight, bias, None)
