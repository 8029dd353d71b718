"""The kernels of silu(gate) up against the torch form in float64, with both gradients."""

from functools import partial

import pytest
import torch

from flash_frac.ops import swiglu
from flash_frac.ops.swiglu.triton import swiglu_op
from tests.errors import assert_all_as_good, widen, with_gradients
from tests.kernels.devices import DEVICE, DTYPES

LARGE = [] if DEVICE == "cpu" else [(4097, 6144), (1030, 5632), (8195, 64)]
# Blocks along rows and columns: of one element, less than one, exactly one, and a rest.
SHAPES = [(1, 64), (2, 3, 65), (63, 33), (2, 1024), (3, 1025), (2049, 1), (70,), *LARGE]
triton = partial(swiglu, backend="triton")


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_close(tensors):
    got, usual = (with_gradients(partial(swiglu, backend=b), tensors) for b in ("triton", "torch"))
    exact = with_gradients(partial(swiglu, backend="torch"), widen(tensors))
    assert_all_as_good(got, usual, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error(shape, dtype):
    assert_close([3 * normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)])


@pytest.mark.parametrize("shape", [(2, 3, 33), (3, 1, 33), (1, 4, 33)], ids=str)
def test_halves_of_a_projection(shape):
    """Read where they are."""
    halves = normal(*shape[:-1], 2 * shape[-1]).chunk(2, -1)
    whole = triton(*(x.contiguous() for x in halves))
    assert torch.equal(triton(*halves), whole) and triton(*halves).is_contiguous()
    assert_close(halves)


def test_any_strides():
    """Rows that no single stride reaches, and columns that are apart, are copied."""
    tensors = [normal(3, 2, 12) for _ in range(2)]
    expected = with_gradients(triton, tensors)
    turned = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]
    spread = [normal(3, 4, 12)[:, :2].copy_(t) for t in tensors]
    for gate, up in ((turned[0], tensors[1]), (tensors[0], turned[1]), spread):
        got = with_gradients(triton, [gate, up])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_no_rows():
    y, dgate, dup = with_gradients(triton, [normal(0, 6), normal(0, 6)])
    assert y.shape == dgate.shape == dup.shape == (0, 6)


@pytest.mark.parametrize("value", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_far_gates(value):
    """silu and its slope are finite wherever the gate is."""
    gate, up = normal(1, 16).fill_(value), normal(1, 16)
    got, expected = (
        with_gradients(partial(swiglu, backend=name), [gate, up]) for name in ("triton", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-30)


def test_opcheck():
    gate, up = normal(4, 12).chunk(2, -1)
    torch.library.opcheck(swiglu_op.registered, (gate.requires_grad_(), up.requires_grad_()))


def test_keeps_gate_and_up_alone():
    gate, up = (normal(4, 6).requires_grad_() for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        triton(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]


def test_compiles_whole():
    both = normal(2, 5, 12).requires_grad_()

    def function(both):
        return triton(*both.chunk(2, -1)).square().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (expected,), (got,) = (torch.autograd.grad(f(both), both) for f in (function, compiled))
    assert torch.equal(got, expected)


def test_second_derivatives_are_refused():
    gate, up = (normal(4, 6).requires_grad_() for _ in range(2))
    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='torch'"):
        torch.autograd.grad(triton(gate, up).sum(), gate, create_graph=True)


def test_more_than_2_31_elements():
    """int64 offsets: the last rows of halves of a large projection are what they are alone."""
    if DEVICE == "cpu":
        pytest.skip("too large for the interpreter; needs a CUDA device")
    both = torch.zeros(2**18 + 8, 2**14, dtype=torch.bfloat16, device=DEVICE)
    both[-8:].normal_()

    def run(both):
        leaves = [x.detach().requires_grad_() for x in both.chunk(2, -1)]
        y = triton(*leaves)
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
        return [x[-8:].clone() for x in (y.detach(), *gradients)]

    assert both[:, : 2**13].numel() > 2**31
    got, expected = run(both), run(both[-8:].clone())
    assert all(x.abs().max() > 0 for x in expected)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_errors():
    gate = normal(4, 6)
    for up, found in ((normal(4, 5), r"\(4, 5\) and torch.float32"), (gate.double(), "float64")):
        with pytest.raises(ValueError, match=rf"up must have the shape \(4, 6\) .* got .*{found}"):
            triton(gate, up)
