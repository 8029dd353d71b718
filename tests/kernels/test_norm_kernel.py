"""The norm kernels against the torch forms in float64, with all gradients."""

import pytest
import torch

from flash_frac.ops import gated_norm, norm
from flash_frac.ops.norm.triton import gated_norm_op, norm_op
from tests.errors import assert_all_as_good, widen, with_gradients
from tests.kernels.devices import DEVICE, DTYPES

LARGE = [] if DEVICE == "cpu" else [(4097, 2048), (1030, 4096), (70, 8192), (8195, 64)]
# In rows of a few elements gradients cancel, and which of two forms errs less is a matter of luck.
SHAPES = [(1, 64), (2, 65), (3, 63), (63, 33), (64, 100), (100, 17), *LARGE]
EPS, GATE_BIAS = 1e-6, 0.5


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def plain(backend="triton"):
    return lambda x, weight: norm(x, weight, EPS, backend=backend)


def gated(backend="triton"):
    """x, u (..., H, D); gate (..., I); weight (I,); d (H, D)."""

    def function(x, gate, weight, d=None, u=None):
        skip = None if d is None else (d, u)
        return gated_norm(x, gate, weight, EPS, GATE_BIAS, skip=skip, backend=backend)

    return function


def assert_close(form, tensors):
    got, expected = (with_gradients(form(name), tensors) for name in ("triton", "torch"))
    assert_all_as_good(got, expected, with_gradients(form("torch"), widen(tensors)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape, dtype):
    assert_close(plain, [normal(*shape, dtype=dtype), normal(shape[1])])


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm(shape, dtype, skip):
    rows, width = shape
    x, u = (normal(rows, 1, width, dtype=dtype) for _ in range(2))
    more = [normal(1, width), u] if skip else []
    assert_close(gated, [x, normal(*shape, dtype=dtype), normal(width), *more])


@pytest.mark.parametrize("shape", [(2, 3, 33), (3, 1, 33), (1, 4, 33)])
def test_gate_is_half_of_a_projection(shape):
    gate = normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)[1]
    x, weight = normal(*shape[:-1], 3, 11), normal(shape[-1])
    whole = gated()(x, gate.contiguous(), weight)
    assert torch.equal(gated()(x, gate, weight), whole)
    assert_close(gated, [x, gate, weight])


def test_any_strides():
    """Rows that no single stride reaches, and columns that are apart, are copied."""
    x, gate, weight = normal(3, 2, 4, 3), normal(3, 2, 12), normal(12)
    expected = with_gradients(gated(), [x, gate, weight])
    turned = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, gate)]
    spread = [normal(3, 4, *t.shape[2:])[:, :2].copy_(t) for t in (x, gate)]
    for strided in (turned, spread):
        got = with_gradients(gated(), [*strided, weight])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(plain()(turned[1], weight), plain()(gate, weight))


def test_rows_of_one_element():
    x, gate, weight = normal(4, 1, 1, 1), normal(4, 1, 2)[..., 1:], normal(1).fill_(2)
    got, expected = (gated(name)(x, gate, weight) for name in ("triton", "torch"))
    torch.testing.assert_close(got, expected)


def test_a_wide_row():
    assert_close(gated, [normal(2, 2, 4096), normal(2, 8192), normal(8192)])


def test_skip_takes_heads():
    inputs = normal(2, 3, 4, 3), normal(2, 3, 12), normal(12), normal(4, 3), normal(2, 3, 4, 3)
    got, expected = (gated(name)(*inputs) for name in ("triton", "torch"))
    torch.testing.assert_close(got, expected)


def test_no_rows():
    y, dx, dweight = with_gradients(plain(), [normal(0, 6), normal(6)])
    assert y.shape == dx.shape == (0, 6) and torch.equal(dweight, torch.zeros_like(dweight))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes float32 only")
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes(dtype):
    """As under autocast: float32 scan results with a low-precision gate."""
    gate, u = normal(33, 300, dtype=dtype), normal(33, 3, 100, dtype=dtype)
    assert_close(gated, [normal(33, 3, 100), gate, normal(300), normal(3, 100), u])


def test_gradients_are_deterministic():
    tensors = [normal(100, 3, 10), normal(100, 30), normal(30), normal(3, 10), normal(100, 3, 10)]
    first, second = (with_gradients(gated(), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def leaf(*shape):
    return normal(*shape).requires_grad_()


def test_opcheck():
    x, weight = leaf(4, 6), leaf(6)
    torch.library.opcheck(norm_op.registered, (x, weight, EPS, torch.bfloat16))
    gate = normal(4, 12).chunk(2, -1)[1].requires_grad_()
    torch.library.opcheck(gated_norm_op.registered, (x, gate, weight, None, None, EPS, 0.5))
    skip = (leaf(2, 3), leaf(4, 6))
    torch.library.opcheck(gated_norm_op.registered, (x, gate, weight, *skip, EPS, 0.5))


def test_compiles_whole():
    tensors = (leaf(2, 5, 12), leaf(2, 5, 2, 3), leaf(2, 3), leaf(6))

    def function(both, x, d, weight):
        u, gate = both.chunk(2, -1)
        y = gated()(x, gate, weight, d, u.unflatten(-1, (2, 3)))
        return (y * plain()(y, weight)).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*tensors), tensors)
    for a, b in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        assert torch.equal(a, b)


def test_errors():
    x, gate, weight = normal(4, 2, 3), normal(4, 6), normal(6)
    for match, wrong in (
        (r"weight must have shape \(6,\) like the rows of gate, got \(5,\)", (x, gate, normal(5))),
        (
            r"x must have shape \(4, 'H', 'D'\) with H D = 6 .* \(4, 2, 2\)",
            (x[..., :2], gate, weight),
        ),
        (r"D must have shape \(2, 3\), got \(2, 2\)", (x, gate, weight, normal(2, 2), x)),
        (r"u must have shape \(4, 2, 3\), got \(4, 6\)", (x, gate, weight, normal(2, 3), gate)),
    ):
        with pytest.raises(ValueError, match=match):
            gated()(*wrong)
    with pytest.raises(ValueError, match=r"weight must have shape \(6,\) like the rows of x"):
        plain()(gate, normal(5))
