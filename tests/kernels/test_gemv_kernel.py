"""Linear layers on a few vectors: against float64, with every part on and off."""

import itertools

import pytest
import torch

from flash_frac.ops import rms_norm, swiglu
from flash_frac.ops.decode.triton import (
    MOST_VECTORS,
    fused_norm_linear,
    fused_norm_swiglu,
    norm_linear_op,
    norm_swiglu,
    norm_swiglu_op,
)
from tests.errors import assert_as_good, widen
from tests.kernels.devices import DEVICE, DTYPES


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
@pytest.mark.parametrize("batch", [3, MOST_VECTORS + 1])
def test_error_of_gate_and_up(dtype, num_outputs, size, batch):
    given = gated_inputs(dtype, num_outputs, size, batch)
    got = norm_swiglu(*given, 1e-6)
    assert_as_good(got, plain_gated(*given), plain_gated(*widen(given)))


def test_operator():
    torch.library.opcheck(
        norm_swiglu_op.registered, (*gated_inputs(torch.float32, 20, 40, 2), 1e-6)
    )
    given = inputs(torch.float32, 20, 40, 2, (True, True, True))
    x, weight, bias, norm_weight, residual = given
    torch.library.opcheck(norm_linear_op.registered, (x, weight, bias, norm_weight, 1e-6, residual))


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
