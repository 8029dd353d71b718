"""Backends of the table that can be tested here, with their devices and dtypes."""

import os

import pytest
import torch

from flash_frac.ops import BACKENDS

INTERPRETED = "TRITON_INTERPRET" in os.environ
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


def dtype_of(backend):
    """The wider of float64 and float32 that a backend takes here; None if it takes neither."""
    for dtype in (torch.float64, torch.float32):
        if BACKENDS[backend].refusal(torch.zeros(1, dtype=dtype, device=DEVICE)) is None:
            return dtype
    return None


def backends_here(dtype=None):
    """Names of the backends that can run here; with a dtype, of those that are tested in it."""
    found = {name: dtype_of(name) for name in BACKENDS}
    return [name for name, d in found.items() if d is not None and dtype in (None, d)]


def repeat(value):
    """A parameter that the interpreter leaves to `make test-slow`; a GPU always tests it."""
    return pytest.param(value, marks=[pytest.mark.slow] if INTERPRETED else [])
