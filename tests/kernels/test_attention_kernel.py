"""Attention of one token over a KV cache, against float64, with shared heads, spans and rings."""

import pytest
import torch

from flash_frac.models.buffered_attention import attend_one_plain
from flash_frac.ops.attention import triton
from flash_frac.ops.attention.triton import attend_step, attend_step_op
from tests.errors import assert_as_good, widen
from tests.kernels.devices import DEVICE, DTYPES


def inputs(dtype, heads, key_heads, columns, channels, last):
    generator = torch.Generator().manual_seed(columns + channels)
    sizes = [(len(last), heads, channels)] + 2 * [(len(last), key_heads, columns + 5, channels)]
    q, k, v = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)
    # Nobody may look at columns after the last one that is seen.
    for row, n in enumerate(last):
        k[row, :, n + 1 :] = torch.nan
        v[row, :, n + 1 :] = torch.nan
    return q, k[:, :, :columns], v[:, :, :columns], torch.tensor(last, device=DEVICE)


def plain(q, k, v, positions, scaling):
    k, v = k.nan_to_num(), v.nan_to_num()
    return attend_one_plain(q[:, :, None], k, v, positions[:, None], scaling)[:, :, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "columns", "channels", "last"),
    [
        (4, 4, 200, 16, [199, 0, 63]),
        (6, 2, 130, 40, [64, 129]),
        (2, 1, 64, 5, [0]),
        # Rings: all columns are seen.
        (2, 2, 7, 8, [6, 7, 100]),
    ],
)
def test_error(dtype, heads, key_heads, columns, channels, last, monkeypatch):
    for programs in (1, 256):
        monkeypatch.setattr(triton, "PROGRAMS", programs)
        q, k, v, positions = inputs(dtype, heads, key_heads, columns, channels, last)
        exact = plain(*widen((q, k, v)), positions, 0.3)
        got = attend_step(q, k, v, positions, 0.3)
        assert_as_good(got, plain(q, k, v, positions, 0.3), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context(dtype):
    q, k, v, positions = inputs(dtype, 16, 4, 65536, 128, [65535, 40000])
    exact = plain(*widen((q, k, v)), positions, 128**-0.5)
    got = attend_step(q, k, v, positions, 128**-0.5)
    assert_as_good(got, plain(q, k, v, positions, 128**-0.5), exact)


def test_operator():
    given = inputs(torch.float32, 4, 2, 70, 8, [69, 69])
    torch.library.opcheck(attend_step_op.registered, (*given, 0.5))


def test_errors():
    q, k, v, positions = inputs(torch.float32, 4, 2, 70, 8, [69, 3])
    with pytest.raises(ValueError, match=r"v must have shape \(2, h, S, 8\), h a divisor of 4"):
        attend_step(q, k, v[:, :, :-1], positions, 1.0)
    with pytest.raises(ValueError, match=r"k must have contiguous columns, got strides"):
        attend_step(q, k.mT.contiguous().mT, v, positions, 1.0)
    with pytest.raises(ValueError, match=r"positions must have shape \(2,\), got \(1,\)"):
        attend_step(q, k, v, positions[:1], 1.0)
    with pytest.raises(ValueError, match="q must have at most 256 channels, got 300"):
        attend_step(torch.zeros(2, 4, 300, device=DEVICE), k, v, positions, 1.0)
