"""The Triton backend of the scan against float64: outputs, states and every gradient."""

import pytest
import torch

from flash_frac.ops import frac_scan, frac_step
from flash_frac.ops.arithmetic import INTERPRETED
from flash_frac.ops.scan.step import step_op
from flash_frac.ops.scan.triton import scan_op
from flash_frac.ops.testing import random_inputs, relative_error
from tests.errors import assert_as_good
from tests.kernels.devices import DEVICE, DTYPES

NAMES = ("y", "state", "du", "dread", "dwrite", "dlog_decay", "dinitial")


def run(inputs, state, cu_seqlens, backend, weights):
    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    y, final = frac_scan(
        *leaves[:4], initial_state=leaves[4], cu_seqlens=cu_seqlens, backend=backend
    )
    torch.autograd.backward(
        [y, final], [w.to(x.dtype) for w, x in zip(weights, (y, final), strict=True)]
    )
    return [y.detach(), final.detach(), *(x.grad for x in leaves)]


def check(sizes, dtype, *, lengths=None, rho_eps=1e-6):
    """Error against float64 at most twice that of the torch backend in the same dtype."""
    inputs = random_inputs(*sizes, dtype=dtype, device=DEVICE, rho_eps=rho_eps)
    batch, _, heads, modes, channels = sizes
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        batch = len(lengths)
    generator = torch.Generator().manual_seed(4)
    state = torch.randn(batch, heads, modes, channels, generator=generator).to(DEVICE)
    weights = [
        torch.randn(x.shape, generator=generator).to(DEVICE, dtype) for x in (inputs.u, state)
    ]
    exact = run(inputs.to(torch.float64), state.double(), cu_seqlens, "torch", weights)
    reference = run(inputs, state, cu_seqlens, "torch", weights)
    got = run(inputs, state, cu_seqlens, "triton", weights)
    for name, a, b, c in zip(NAMES, got, reference, exact, strict=True):
        assert_as_good(a, b, c, name, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 1, 1, 16, 16),
        (1, 31, 1, 4, 33),
        (2, 64, 2, 8, 16),
        (1, 100, 4, 16, 20),
        (1, 65, 1, 32, 48),
    ],
    ids=str,
)
def test_scan(sizes, dtype):
    check(sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[1, 0, 63, 36], [0, 0, 40], [97], [0]], ids=str)
def test_packed(lengths, dtype):
    if sum(lengths) == 0:
        inputs = random_inputs(1, 0, 2, 8, 16, dtype=dtype, device=DEVICE)
        state = torch.randn(1, 2, 8, 16, device=DEVICE)
        bounds = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        out = frac_scan(*inputs, initial_state=state, cu_seqlens=bounds, backend="triton")
        assert torch.equal(out.state, state)
    else:
        check((1, sum(lengths), 2, 8, 16), dtype, lengths=lengths)


def test_the_whole_range_of_decays():
    check((1, 96, 2, 16, 16), torch.float32, rho_eps=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large(dtype):
    """Several segments, several blocks of channels, and the shape of the 1.3B model."""
    if INTERPRETED:
        pytest.skip("too slow in the interpreter; needs a CUDA device")
    check((2, 3000, 4, 16, 256), dtype)
    check((1, 5000, 3, 16, 100), dtype, lengths=[1, 700, 0, 2299, 2000], rho_eps=0.0)


def test_more_than_2_31_elements():
    """int64 offsets: the last sequence of a batch that is too large for int32 is what it is alone.

    Up to the rounding of bfloat16, because the walk is cut into other segments.
    """
    if INTERPRETED:
        pytest.skip("too large for the interpreter; needs a CUDA device")
    inputs = random_inputs(1, 4096, 16, 16, 256, dtype=torch.bfloat16, device=DEVICE)
    alone = frac_scan(*inputs, backend="triton")
    many = frac_scan(*(x.expand(132, -1, -1, -1).contiguous() for x in inputs), backend="triton")
    assert many.y.numel() > 2**31
    assert relative_error(many.y[-1], alone.y[0]) < 2**-9
    assert relative_error(many.state[-1], alone.state[0]) < 2**-9


def test_results_repeat_to_the_bit():
    inputs = random_inputs(1, 100, 2, 16, 16, device=DEVICE)
    state = torch.zeros(1, 2, 16, 16, device=DEVICE)
    weights = [torch.ones_like(inputs.u), torch.ones_like(state)]
    first = run(inputs, state, None, "triton", weights)
    second = run(inputs, state, None, "triton", weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 16, 16), (1, 1, 5, 33), (3, 2, 32, 100)], ids=str)
def test_step(sizes, dtype):
    batch, heads, modes, channels = sizes
    inputs = random_inputs(batch, 1, heads, modes, channels, dtype=dtype, device=DEVICE, rho_eps=0)
    token = [x[:, 0] for x in inputs]
    state = torch.randn(batch, heads, modes, channels, device=DEVICE)
    got = frac_step(*token, state, backend="triton")
    exact = frac_step(*(x.double() for x in token), state.double(), backend="torch")
    reference = frac_step(*token, state, backend="torch")
    for name, a, b, c in zip(NAMES[:2], got, reference, exact, strict=True):
        assert_as_good(a, b, c, name)


def test_gradients_of_a_step():
    results = []
    for backend in ("triton", "torch"):
        inputs = random_inputs(2, 1, 2, 8, 16, device=DEVICE, rho_eps=1e-6)
        leaves = [x[:, 0].contiguous().requires_grad_() for x in inputs]
        generator = torch.Generator().manual_seed(6)
        leaves.append(torch.randn(2, 2, 8, 16, generator=generator).to(DEVICE).requires_grad_())
        y, state = frac_step(*leaves, backend=backend)
        results.append(torch.autograd.grad(y.sin().sum() + state.cos().sum(), leaves))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck():
    """Registration does not depend on the length: one chunk, and two sequences of one."""
    inputs = [x.requires_grad_() for x in random_inputs(1, 9, 1, 4, 16, device=DEVICE)]
    state = torch.randn(1, 1, 4, 16, device=DEVICE, requires_grad=True)
    torch.library.opcheck(scan_op.registered, (*inputs, state, None))
    bounds = torch.tensor([0, 7, 9], device=DEVICE)
    torch.library.opcheck(
        scan_op.registered, (*inputs, torch.randn(2, 1, 4, 16, device=DEVICE), bounds)
    )
    torch.library.opcheck(scan_op.registered, (*inputs, None, None))
    token = [x[:, 0].detach().contiguous() for x in inputs]
    torch.library.opcheck(step_op.registered, (*(x.requires_grad_() for x in token), state))
