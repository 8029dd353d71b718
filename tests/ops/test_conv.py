"""The causal convolution: against torch's, its window, its output at padding, its rounding."""

import pytest
import torch
import torch.nn.functional as F

from flash_frac.ops import causal_conv

CHANNELS = 6


def parameters(taps):
    return torch.randn(CHANNELS, 1, taps).double(), torch.randn(CHANNELS).double()


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_is_a_grouped_convolution(taps, bias):
    weight, b = parameters(taps)
    b = b if bias else None
    x = torch.randn(2, 11, CHANNELS).double()
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    expected = F.silu(F.conv1d(padded, weight, b, groups=CHANNELS)).transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weight, b).u, expected)


@pytest.mark.parametrize("taps", [1, 4])
def test_padding_gives_what_zeros_give(taps):
    """As in the published code; a row of padding keeps its window."""
    weight, bias = parameters(taps)
    x, window = torch.randn(2, 9, CHANNELS).double(), torch.randn(2, CHANNELS, taps - 1).double()
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 0], [0] * 9])
    got = causal_conv(x, weight, bias, window=window, mask=mask)
    torch.testing.assert_close(got.u[mask == 0], F.silu(bias).expand(13, -1))
    assert torch.equal(got.window[1], window[1])
    without = causal_conv(x, weight, None, window=window, mask=mask)
    assert (without.u[mask == 0] == 0).all()


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("time", [0, 1, 11])
def test_window_is_the_last_inputs(taps, time):
    weight, bias = parameters(taps)
    x, window = torch.randn(2, time, CHANNELS).double(), torch.randn(2, CHANNELS, taps - 1).double()
    inputs = torch.cat([window, x.transpose(1, 2)], 2)
    got = causal_conv(x, weight, bias, window=window).window
    assert torch.equal(got, inputs[..., time:])


def test_low_precision_rounds_once():
    weight, bias = parameters(4)
    x = torch.randn(1, 50, CHANNELS).bfloat16()
    got = causal_conv(x, weight.bfloat16(), bias.bfloat16()).u
    exact = causal_conv(x.double(), weight.bfloat16().double(), bias.bfloat16().double()).u
    assert got.dtype == torch.bfloat16
    assert ((got - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
