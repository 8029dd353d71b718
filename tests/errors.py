"""The error rule: against float64, at most twice the reference's error plus one rounding."""

import torch

from flash_frac.ops.testing import relative_error


def with_gradients(function, tensors):
    """Outputs, and gradients of a random functional of all of them by the tensors that are given.

    Strides stay as they are, and None stays None.
    """
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for y in outputs:
        weights = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        loss = loss + (y.double() * weights.to(y.device)).sum()
    given = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(loss, given, materialize_grads=True)
    return [*(y.detach() for y in outputs), *gradients]


def widen(tensors):
    return [None if t is None else t.double() for t in tensors]


def assert_as_good(got, usual, exact, name="", dtype=None):
    """One tensor obeys the rule; the rounding is that of its own dtype unless one is given."""
    assert got.dtype == usual.dtype and got.shape == usual.shape == exact.shape, name
    bound = 2 * (relative_error(usual, exact) + torch.finfo(dtype or got.dtype).eps / 2)
    error = relative_error(got, exact)
    assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


def assert_all_as_good(got, usual, exact):
    for i, (a, b, c) in enumerate(zip(got, usual, exact, strict=True)):
        assert_as_good(a, b, c, f"tensor {i}")
