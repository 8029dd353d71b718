"""The causal convolution: against torch's, in pieces, padded and packed."""

import pytest
import torch
import torch.nn.functional as F

from flash_frac.layers import causal_conv

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


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 10, 11])
def test_in_pieces(cut):
    weight, bias = parameters(4)
    x = torch.randn(2, 11, CHANNELS).double()
    whole = causal_conv(x, weight, bias)
    first = causal_conv(x[:, :cut], weight, bias)
    second = causal_conv(x[:, cut:], weight, bias, window=first.window)
    torch.testing.assert_close(torch.cat([first.u, second.u], 1), whole.u)
    assert torch.equal(second.window, whole.window)
    assert whole.window.shape == (2, CHANNELS, 3)


@pytest.mark.parametrize("taps", [1, 4])
def test_padding_is_stepped_over(taps):
    """On the left, on the right, inside, and all of it."""
    weight, bias = parameters(taps)
    x = torch.randn(4, 9, CHANNELS).double()
    mask = torch.tensor(
        [
            [0, 0, 0, 1, 1, 1, 1, 1, 1],
            [1, 1, 0, 0, 0, 0, 0, 0, 0],
            [1, 0, 1, 1, 0, 0, 1, 1, 0],
            [0, 0, 0, 0, 0, 0, 0, 0, 0],
        ]
    )
    window = torch.randn(4, CHANNELS, taps - 1).double()
    got = causal_conv(x, weight, bias, window=window, mask=mask)
    for row in range(4):
        real = mask[row] == 1
        alone = causal_conv(x[row : row + 1, real], weight, bias, window=window[row : row + 1])
        torch.testing.assert_close(got.u[row, real], alone.u[0])
        assert torch.equal(got.window[row], alone.window[0])
        idle = F.silu(bias).expand(int((~real).sum()), -1)
        torch.testing.assert_close(got.u[row, ~real], idle)


@pytest.mark.parametrize("lengths", [[9], [0, 1, 2, 0, 7, 3], [1, 1, 1]])
def test_packed_is_separate(lengths):
    weight, bias = parameters(4)
    x = torch.randn(1, sum(lengths), CHANNELS).double().requires_grad_()
    window = torch.randn(len(lengths), CHANNELS, 3).double().requires_grad_()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    got = causal_conv(x, weight, bias, window=window, cu_seqlens=ends)
    parts = [
        causal_conv(x[:, ends[n] : ends[n + 1]], weight, bias, window=window[n : n + 1])
        for n in range(len(lengths))
    ]
    torch.testing.assert_close(got.u, torch.cat([p.u for p in parts], 1))
    torch.testing.assert_close(got.window, torch.cat([p.window for p in parts]))
    gradients = torch.autograd.grad(got.u.sin().sum() + got.window.cos().sum(), (x, window))
    loss = sum(p.u.sin().sum() + p.window.cos().sum() for p in parts)
    for a, b in zip(gradients, torch.autograd.grad(loss, (x, window)), strict=True):
        torch.testing.assert_close(a, b)


def test_low_precision_rounds_once():
    weight, bias = parameters(4)
    x = torch.randn(1, 50, CHANNELS).bfloat16()
    got = causal_conv(x, weight.bfloat16(), bias.bfloat16()).u
    exact = causal_conv(x.double(), weight.bfloat16().double(), bias.bfloat16().double()).u
    assert got.dtype == torch.bfloat16
    assert ((got - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
