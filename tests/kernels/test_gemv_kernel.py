"""Linear layers on a few vectors, against float64, with every part on and off."""

import itertools

import pytest
import torch

from flash_frac.ops import rms_norm, swiglu
from flash_frac.ops.decode.linear import (
    MOST_VECTORS,
    QUANTISED,
    fused_norm_linear,
    fused_norm_swiglu,
    norm_linear,
    norm_linear_op,
    norm_swiglu_op,
)
from tests.errors import assert_as_good, widen
from tests.kernels.devices import DEVICE, DTYPES
from tests.kernels.launches import watch


def inputs(dtype, num_outputs, size, batch, parts):
    generator = torch.Generator().manual_seed(num_outputs + size)
    shapes = [(batch, 2 * size), (num_outputs, size), (num_outputs,), (size,), (batch, num_outputs)]
    tensors = [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]
    x, weight, *rest = tensors
    return x[:, :size], weight, *(t if on else None for t, on in zip(rest, parts, strict=True))


def plain(x, weight, bias, norm_weight, residual):
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, 1e-6).to(x.dtype)
    y = torch.nn.functional.linear(x, weight, bias)
    return y if residual is None else y + residual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "size"), [(2050, 33), (48, 2049), (7, 4096), (1, 1)])
@pytest.mark.parametrize("batch", [1, MOST_VECTORS])
def test_error(dtype, num_outputs, size, batch):
    for parts in itertools.product((True, False), repeat=3):
        given = inputs(dtype, num_outputs, size, batch, parts)
        exact = plain(*widen(given))
        x, weight, bias, norm_weight, residual = given
        y = fused_norm_linear(x, weight, bias, norm_weight=norm_weight, eps=1e-6, residual=residual)
        assert_as_good(y, plain(*given), exact)


def gated_inputs(dtype, num_outputs, size, batch):
    """x, the matrices of gate and up, and the weight of the norm; gates of a usual size."""
    x, weights, _, norm_weight, _ = inputs(dtype, 2 * num_outputs, size, batch, (0, 1, 0))
    return x, *(weights / size**0.5).chunk(2), norm_weight


def plain_gated(x, gate_weight, up_weight, norm_weight):
    x = rms_norm(x, norm_weight, 1e-6).to(x.dtype)
    return swiglu(x @ gate_weight.t(), x @ up_weight.t(), backend="torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "size"), [(2050, 33), (48, 2049), (40, 1)])
@pytest.mark.parametrize("batch", [3, MOST_VECTORS])
def test_error_of_gate_and_up(dtype, num_outputs, size, batch):
    given = gated_inputs(dtype, num_outputs, size, batch)
    got = fused_norm_swiglu(*given, 1e-6)
    assert_as_good(got, plain_gated(*given), plain_gated(*widen(given)))


def quantise(weight, kind):
    """Values of 8 bits and the scales of their rows, so that the largest one of a row fits."""
    most = 127 if kind is torch.int8 else 448
    scale = weight.float().abs().amax(1) / most
    values = weight.float() / scale[:, None]
    return (values.round() if kind is torch.int8 else values).to(kind), scale


def dequantise(values, scale, dtype):
    """Exactly, in float64; else each weight is rounded to the dtype."""
    return (values.double() * scale.double()[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", QUANTISED, ids=str)
@pytest.mark.parametrize(("num_outputs", "size"), [(2050, 33), (48, 2049)])
@pytest.mark.parametrize("batch", [2, MOST_VECTORS + 1])
def test_error_with_quantised_weights(dtype, kind, num_outputs, size, batch):
    """Of few vectors by the kernel, of more by the matrix units."""
    for parts in ((True, True, True), (False, True, False), (False, False, True)):
        x, weight, bias, norm_weight, residual = inputs(dtype, num_outputs, size, batch, parts)
        values, scale = quantise(weight, kind)
        options = {"norm_weight": norm_weight, "eps": 1e-6, "residual": residual}
        y = norm_linear(x, values, bias, scale=scale, **options)
        rest = (bias, norm_weight, residual)
        exact = plain(x.double(), dequantise(values, scale, torch.float64), *widen(rest))
        assert_as_good(y, plain(x, dequantise(values, scale, dtype), *rest), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_sums_of_quantised_weights_stay_in_range(dtype, kind):
    """Inputs and weights with a mean, whose sums before scaling would exceed float16."""
    x, weight, bias, *_ = inputs(dtype, 48, 4096, MOST_VECTORS + 1, (True, False, False))
    x, (values, scale) = x + 1, quantise(weight / 64 + 1 / 64, kind)
    got = norm_linear(x, values, bias, scale=scale)
    given, wide = dequantise(values, scale, dtype), dequantise(values, scale, torch.float64)
    assert dtype is torch.bfloat16 or (x @ values.to(dtype).t()).isinf().all()
    usual = plain(x, given, bias, None, None)
    assert_as_good(got, usual, plain(*widen((x, wide, bias, None, None))))


@pytest.mark.parametrize("num", [1, 2, MOST_VECTORS, MOST_VECTORS + 1])
def test_only_16_bit_weights_are_too_large_for_a_few_vectors(monkeypatch, num):
    monkeypatch.setattr("flash_frac.ops.decode.linear.MOST_READ", 0)
    x, weight, *_ = inputs(torch.float32, 8, 16, num, (False, False, False))
    launched = []
    watch(monkeypatch, launched.append)
    norm_linear(x, weight)
    assert len(launched) == (num == 1)
    values, scale = quantise(weight, torch.int8)
    norm_linear(x, values, scale=scale)
    assert len(launched) == (num == 1) + (num <= MOST_VECTORS)


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_error_of_quantised_gate_and_up(kind):
    x, *matrices, norm_weight = gated_inputs(torch.float32, 48, 2049, 3)
    (gate, gate_scale), (up, up_scale) = (quantise(matrix, kind) for matrix in matrices)
    y = fused_norm_swiglu(x, gate, up, norm_weight, 1e-6, gate_scale=gate_scale, up_scale=up_scale)
    pairs, results = ((gate, gate_scale), (up, up_scale)), []
    for dtype in (torch.float32, torch.float64):
        weights = (dequantise(*pair, dtype) for pair in pairs)
        results.append(plain_gated(x.to(dtype), *weights, norm_weight.to(dtype)))
    assert_as_good(y, *results)


def test_operator():
    x, gate, up, norm_weight = gated_inputs(torch.float32, 20, 40, 2)
    given = (x, gate, up, None, None, norm_weight, 1e-6)
    torch.library.opcheck(norm_swiglu_op.registered, given)
    x, weight, bias, norm_weight, residual = inputs(torch.float32, 20, 40, 2, (True, True, True))
    for values, scale in ((weight, None), quantise(weight, torch.int8)):
        given = (x, values, scale, bias, norm_weight, 1e-6, residual)
        torch.library.opcheck(norm_linear_op.registered, given)


def test_errors():
    x, weight, *_ = inputs(torch.float32, 4, 8, 2, (False, False, False))
    with pytest.raises(ValueError, match=r"x must be at most 4 vectors"):
        fused_norm_linear(x.repeat(3, 1), weight)
    with pytest.raises(ValueError, match=r"fused_norm_linear has no gradient"):
        fused_norm_linear(x, weight.requires_grad_())
    weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"residual must have shape \(2, 4\)"):
        fused_norm_linear(x, weight, residual=x)
    with pytest.raises(ValueError, match=r"up_weight must have shape \(4, 8\) and be contiguous"):
        fused_norm_swiglu(x, weight, weight[:3], weight[0], 1e-6)
    with pytest.raises(ValueError, match=r"x must be at most 4 vectors"):
        fused_norm_swiglu(x.repeat(3, 1), weight, weight, weight[0], 1e-6)
    values, scale = quantise(weight, torch.int8)
    with pytest.raises(ValueError, match=r"weight of int8 .* got torch.int8 and no scale"):
        fused_norm_linear(x, values)
    with pytest.raises(ValueError, match=r"up_weight of int8 .* got torch.float32 and a scale"):
        fused_norm_swiglu(x, weight, weight, weight[0], 1e-6, up_scale=scale)
    with pytest.raises(ValueError, match=r"scale must have shape \(4,\)"):
        fused_norm_linear(x, values, scale=scale[:, None])
