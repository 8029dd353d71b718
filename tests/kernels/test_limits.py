"""Inputs beyond the kernels' limits: "triton" raises and says why, "auto" runs torch."""

import logging

import pytest
import torch

from flash_frac.ops import causal_conv, delta_scan, frac_scan, gated_norm, norm, swiglu
from flash_frac.ops.backends import _log_choice
from flash_frac.ops.testing import random_inputs
from tests.errors import assert_all_as_good, widen, with_gradients
from tests.kernels.devices import DEVICE
from tests.kernels.launches import watch

NARROWEST = "computes float32 only" if DEVICE == "cpu" else "got torch.float64"


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def conv(taps):
    return lambda backend: causal_conv(normal(1, 5, 3), normal(3, 1, taps), None, backend=backend)


def wide_norm(backend):
    return norm(normal(1, 8193), normal(8193), 1e-6, backend=backend)


def wide_gated_norm(backend):
    return gated_norm(normal(1, 3, 2731), normal(1, 8193), normal(8193), 1e-6, backend=backend)


def double_swiglu(backend):
    return swiglu(*normal(2, 3, 4, dtype=torch.float64), backend=backend)


def scan(dtype):
    inputs = random_inputs(1, 3, 1, 4, 2, dtype=dtype, device=DEVICE)
    return lambda backend: frac_scan(*inputs, backend=backend)


def delta(keys, channels):
    tokens = normal(1, 3, 1, keys), normal(1, 3, 1, keys), normal(1, 3, 1, channels)
    controls = torch.zeros(1, 3, 1, device=DEVICE)
    return lambda backend: delta_scan(*tokens, controls, controls, backend=backend)


CASES = {
    "one tap": ("conv", conv(1), "takes 2 to 8 taps, got 1"),
    "nine taps": ("conv", conv(9), "takes 2 to 8 taps, got 9"),
    "a wide row": ("norm", wide_norm, "takes rows up to 8192, got 8193"),
    "a wide gate": ("gated_norm", wide_gated_norm, "takes rows up to 8192, got 8193"),
    "many keys": ("delta", delta(129, 4), "channels of a head, got 129 and 4"),
    "many values": ("delta", delta(4, 257), "channels of a head, got 4 and 257"),
    "float64": ("scan", scan(torch.float64), NARROWEST),
    "float64 in an MLP": ("swiglu", double_swiglu, NARROWEST),
}
if DEVICE == "cpu":
    CASES["bfloat16"] = ("scan", scan(torch.bfloat16), "computes float32 only")


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that have run."""
    names = []
    watch(monkeypatch, names.append)
    return names


@pytest.mark.parametrize("case", CASES)
def test_it_raises(case, launched):
    _, call, reason = CASES[case]
    pattern = f"backend 'triton' cannot run here: .*{reason}.*; use backend='auto' or 'torch'"
    with pytest.raises(ValueError, match=pattern):
        call("triton")
    assert launched == []


@pytest.mark.parametrize("case", CASES)
def test_auto_runs_torch_and_says_so(case, launched, caplog):
    operator, call, reason = CASES[case]
    _log_choice.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="flash_frac.ops"):
        call("auto")
        call("auto")
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(f"auto runs {operator} on torch (triton: ") and reason in line
    assert launched == []


def test_auto_runs_the_kernels_where_it_can(launched):
    conv(4)("auto")
    norm(normal(1, 8), normal(8), 1e-6)
    swiglu(normal(1, 8), normal(1, 8))
    scan(torch.float32)("auto")
    around = ["conv_forward_kernel", "norm_forward_kernel", "swiglu_forward_kernel"]
    assert launched[:4] == [*around, "mix_kernel"]


def test_a_masked_convolution_runs_the_kernel(launched):
    mask = torch.ones(4, 70, device=DEVICE)
    mask[0, :9], mask[1, 40:], mask[2, 5:8], mask[3] = 0, 0, 0, 0
    inputs = normal(4, 70, 33), normal(33, 1, 4), normal(33), normal(4, 33, 3)

    def convolve(backend):
        def function(x, weight, bias, window):
            options = {"window": window, "mask": mask, "backend": backend}
            return causal_conv(x, weight, bias, **options)

        return function

    usual = with_gradients(convolve("torch"), inputs)
    exact = with_gradients(convolve("torch"), widen(inputs))
    assert launched == []
    got = with_gradients(convolve("triton"), inputs)
    forward, *backward = launched
    assert forward == "conv_forward_kernel"
    assert set(backward) == {"conv_backward_kernel", "conv_window_backward_kernel"}
    assert_all_as_good(got, usual, exact)
