"""The norm kernels against the torch forms in float64, with all gradients."""

import pytest
import torch
import torch.nn.functional as F
from flash_frac.ops.custom_ops import norm as ops
from flash_frac.ops.custom_ops.norm import (
    fused_add_rms_norm,
    fused_gated_rms_norm,
    fused_rms_norm,
)

from flash_frac.ops import rms_norm
from flash_frac.ops.testing import relative_error
from tests.kernels.devices import DEVICE, DTYPES

LARGE = [] if DEVICE == "cpu" else [(4097, 2048), (1030, 4096), (70, 8192), (8195, 64)]
# In rows of a few elements gradients cancel, and which of two forms errs less is a matter of luck.
SHAPES = [(1, 64), (2, 65), (3, 63), (63, 33), (64, 100), (100, 17), *LARGE]
EPS, GATE_BIAS = 1e-6, 0.5


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def torch_norm(x, weight):
    return (rms_norm(x, weight, EPS).to(x.dtype),)


def torch_add_norm(x, residual, weight):
    z = x + residual
    return *torch_norm(z, weight), z


def torch_gated(x, gate, weight, d=None, u=None):
    """`FracMixer` from the end of its scan to its last projection."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    x = x if d is None else x + d.flatten() * u
    gated = x.to(dtype) * F.silu(gate.to(dtype) + GATE_BIAS)
    return (rms_norm(gated, weight, EPS).to(gate.dtype),)


def fused_norm(x, weight):
    return (fused_rms_norm(x, weight, EPS),)


def fused_add_norm(x, residual, weight):
    return fused_add_rms_norm(x, residual, weight, EPS)


def fused_gated(x, gate, weight, d=None, u=None):
    skip = None if d is None else (d, u)
    return (fused_gated_rms_norm(x, gate, weight, EPS, GATE_BIAS, skip=skip),)


def with_gradients(function, tensors):
    """Outputs, and gradients of a random functional of all of them."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(DEVICE)
        loss = loss + (y.double() * weights).sum()
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, leaves)]


def assert_close(fused, reference, tensors):
    got = with_gradients(fused, tensors)
    expected = with_gradients(reference, tensors)
    exact = with_gradients(reference, [t.double() for t in tensors])
    for i, (a, b, c) in enumerate(zip(got, expected, exact, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        bound = 2 * (relative_error(b, c) + torch.finfo(a.dtype).eps / 2)
        assert relative_error(a, c) <= bound, f"tensor {i}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape, dtype):
    assert_close(fused_norm, torch_norm, [normal(*shape, dtype=dtype), normal(shape[1])])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_norm(shape, dtype):
    x, residual = (normal(*shape, dtype=dtype) for _ in range(2))
    assert_close(fused_add_norm, torch_add_norm, [x, residual, normal(shape[1])])


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm(shape, dtype, skip):
    x, gate, u = (normal(*shape, dtype=dtype) for _ in range(3))
    more = [normal(shape[1], 1), u] if skip else []
    assert_close(fused_gated, torch_gated, [x, gate, normal(shape[1]), *more])


@pytest.mark.parametrize("shape", [(2, 3, 33), (3, 1, 33), (1, 4, 33)])
def test_gate_is_half_of_a_projection(shape):
    both = normal(*shape[:-1], 2 * shape[-1])
    x, weight = normal(*shape), normal(shape[-1])
    gate = both.chunk(2, -1)[1]
    whole = fused_gated(x, gate.contiguous(), weight)[0]
    assert torch.equal(fused_gated(x, gate, weight)[0], whole)
    assert_close(fused_gated, torch_gated, [x, gate, weight])


def test_rows_of_one_element():
    x, both = normal(4, 1, 1), normal(4, 1, 2)
    got, expected = (f(x, both[..., 1:], normal(1).fill_(2)) for f in (fused_gated, torch_gated))
    torch.testing.assert_close(got, expected)


def test_a_wide_row():
    assert_close(fused_gated, torch_gated, [*(normal(2, 8192) for _ in range(2)), normal(8192)])


def test_skip_takes_heads():
    x, gate, u, d = normal(2, 3, 12), normal(2, 3, 12), normal(2, 3, 4, 3), normal(4, 3)
    got = fused_gated(x, gate, normal(12).fill_(1), d, u)
    torch.testing.assert_close(got, torch_gated(x, gate, 1.0, d, u.flatten(-2)))


def test_no_rows():
    x = normal(0, 6).requires_grad_()
    weight = normal(6).requires_grad_()
    gradients = torch.autograd.grad(fused_rms_norm(x, weight, EPS).sum(), (x, weight))
    assert gradients[0].shape == (0, 6) and torch.equal(gradients[1], torch.zeros_like(weight))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes float32 only")
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_dtypes(dtype):
    """As under autocast: a float32 residual and float32 scan results beside a low-precision x."""
    x, gate = (normal(33, 300, dtype=dtype) for _ in range(2))
    assert_close(fused_add_norm, torch_add_norm, [x, normal(33, 300), normal(300)])
    more = [normal(3, 100), normal(33, 300, dtype=dtype)]
    assert_close(fused_gated, torch_gated, [normal(33, 300), gate, normal(300), *more])


def test_gradients_are_deterministic():
    tensors = [normal(100, 30), normal(100, 30), normal(30), normal(3, 10), normal(100, 30)]
    first, second = (with_gradients(fused_gated, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def leaf(*shape):
    return normal(*shape).requires_grad_()


def test_opcheck():
    x, weight = leaf(4, 6), leaf(6)
    torch.library.opcheck(ops._rms_norm.registered, (x, weight, EPS))
    torch.library.opcheck(ops._add_rms_norm.registered, (x, leaf(4, 6), weight, EPS))
    gate = normal(4, 12).chunk(2, -1)[1].requires_grad_()
    torch.library.opcheck(ops._gated_rms_norm.registered, (x, gate, weight, None, None, EPS, 0.5))
    skip = (leaf(2, 3), leaf(4, 6))
    torch.library.opcheck(ops._gated_rms_norm.registered, (x, gate, weight, *skip, EPS, 0.5))


def test_compiles_whole():
    both, x, residual, d = leaf(2, 5, 12), leaf(2, 5, 6), leaf(2, 5, 6), leaf(2, 3)
    weight = leaf(6)

    def function(both, x, residual, d, weight):
        u, gate = both.chunk(2, -1)
        gated = fused_gated_rms_norm(x, gate, weight, EPS, skip=(d, u.contiguous()))
        y, z = fused_add_rms_norm(gated, residual, weight, EPS)
        return (y * fused_rms_norm(z, weight, EPS)).sum()

    tensors = (both, x, residual, d, weight)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*tensors), tensors)
    for a, b in zip(torch.autograd.grad(compiled(*tensors), tensors), expected, strict=True):
        assert torch.equal(a, b)


def test_errors():
    x, weight = normal(4, 6), normal(6)
    with pytest.raises(ValueError, match=r"x must have shape \(4, 3\) and be contiguous"):
        fused_rms_norm(x[:, :3], weight[:3], EPS)
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 6\)"):
        fused_add_rms_norm(x, normal(3, 6), weight, EPS)
    with pytest.raises(ValueError, match=r"weight must have shape \(6,\)"):
        fused_rms_norm(x, normal(5), EPS)
    with pytest.raises(ValueError, match=r"rows must be at most 8192 long, got 8193"):
        fused_rms_norm(normal(1, 8193), normal(8193), EPS)
    with pytest.raises(ValueError, match=r"gate must be contiguous in its last axis"):
        fused_gated_rms_norm(x, normal(6, 4).t(), weight, EPS)
    with pytest.raises(ValueError, match=r"rows evenly apart.*gate.contiguous\(\)"):
        fused_gated_rms_norm(normal(2, 2, 6), normal(2, 4, 6)[:, :2], weight, EPS)
    with pytest.raises(ValueError, match=r"D must have 6 elements, got \(2, 2\)"):
        fused_gated_rms_norm(x, x, weight, EPS, skip=(normal(2, 2), x))
    with pytest.raises(ValueError, match=r"u must have shape \(4, 6\) and be contiguous"):
        fused_gated_rms_norm(x, x, weight, EPS, skip=(normal(2, 3), normal(6, 4).t()))
    with pytest.raises(ValueError, match=r"fused_rms_norm cannot run here: .*float32"):
        fused_rms_norm(x.double(), weight, EPS)
