"""Head and loss in chunks, against F.cross_entropy on all logits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from flash_frac.ops import resolve_backend
from flash_frac.ops.loss.api import _summed_loss, linear_cross_entropy
from flash_frac.ops.testing import relative_error

VOCAB, WIDTH = 37, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


def random_inputs(dtype=torch.float64, *, size=(3, 7), device="cpu", ignored=0.3):
    hidden = torch.randn(*size, WIDTH, dtype=torch.float64).to(device, dtype)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64).to(device, dtype)
    labels = torch.randint(0, VOCAB, size).masked_fill(torch.rand(size) < ignored, -100)
    return hidden.requires_grad_(), weight.requires_grad_(), labels.to(device)


def plain(hidden, weight, labels, **kwargs):
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **kwargs)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 21, 4096])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_cross_entropy(reduction, chunk_tokens):
    hidden, weight, labels = random_inputs()
    got = linear_cross_entropy(
        hidden, weight, labels, reduction=reduction, chunk_tokens=chunk_tokens
    )
    expected = plain(hidden, weight, labels, reduction=reduction)
    torch.testing.assert_close(got, expected)
    leaves = (hidden, weight)
    torch.testing.assert_close(
        torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * expected, leaves)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding(dtype, device):
    """Errors against float64 are at most twice those of the plain form plus a unit rounding."""
    hidden, weight, labels = random_inputs(dtype, size=(300,), device=device)
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    results = []
    for loss, leaves in (
        (linear_cross_entropy(hidden, weight, labels, chunk_tokens=64), (hidden, weight)),
        (plain(hidden, weight, labels), (hidden, weight)),
        (plain(*exact_leaves, labels), exact_leaves),
    ):
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    assert results[0][0].dtype == torch.float32
    for got, theirs, exact in zip(*results, strict=True):
        assert got.dtype == theirs.dtype
        error, allowed = ((x.double() - exact).norm() for x in (got, theirs))
        assert error <= 2 * (allowed + torch.finfo(dtype).eps / 2 * exact.norm())


def test_gradcheck():
    hidden, weight, labels = random_inputs(size=(5,))

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, chunk_tokens=2)

    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_labels_all_ignored():
    """No label: NaN and gradients of 0, as in F.cross_entropy."""
    hidden, weight, labels = random_inputs(ignored=2)
    for loss in (linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)):
        assert loss.isnan()
        assert all((x == 0).all() for x in torch.autograd.grad(loss, (hidden, weight)))
    assert linear_cross_entropy(hidden, weight, labels, reduction="sum") == 0


def test_another_ignore_index():
    hidden, weight, labels = random_inputs(ignored=0)
    got = linear_cross_entropy(hidden, weight, labels, ignore_index=5)
    torch.testing.assert_close(got, plain(hidden, weight, labels, ignore_index=5))


def test_no_tokens():
    hidden, weight, labels = random_inputs(size=(0,))
    loss = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    loss.backward()
    assert loss == 0 and (weight.grad == 0).all() and hidden.grad.shape == hidden.shape


def test_num_items():
    """Two calls that divide by the count of both are one call."""
    hidden, weight, labels = random_inputs(size=(8, 3))
    count = (labels != -100).sum()
    parts = [slice(0, 5), slice(5, 8)]
    got = sum(linear_cross_entropy(hidden[p], weight, labels[p], num_items=count) for p in parts)
    expected = plain(hidden, weight, labels)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))
    )


def test_tied_weight():
    """The weight of the head is also the embedding: both gradients meet in it."""
    _, weight, labels = random_inputs()
    tokens = torch.randint(0, VOCAB, labels.shape)
    gradients = []
    for loss in (linear_cross_entropy, plain):
        value = loss(torch.tanh(F.embedding(tokens, weight)), weight, labels)
        gradients.append(torch.autograd.grad(value, weight))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("which", ["hidden", "weight", "neither"])
def test_only_what_needs_a_gradient(which):
    hidden, weight, labels = random_inputs()
    hidden.requires_grad_(which == "hidden")
    weight.requires_grad_(which == "weight")
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
    torch.testing.assert_close(loss, plain(hidden, weight, labels))
    assert loss.requires_grad == (which != "neither")
    if which != "neither":
        loss.backward()
        assert (hidden.grad is None, weight.grad is None) == (which != "hidden", which != "weight")
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


def test_backward_twice():
    hidden, weight, labels = random_inputs()
    loss = linear_cross_entropy(hidden, weight, labels)
    first, second = (
        torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast():
    """Products in bfloat16, and gradients in the dtype of the parameters, float32."""
    hidden, weight, labels = random_inputs(torch.float32)
    exact = plain(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels)
        theirs = F.cross_entropy((hidden @ weight.T).float().flatten(0, 1), labels.flatten())
    assert 0 < (got - exact).abs() <= 2 * ((theirs - exact).abs() + 2**-9 * exact)
    results = [torch.autograd.grad(x, (hidden, weight)) for x in (got, theirs, exact)]
    for mine, plainly, truth in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - truth).norm() <= 2 * ((plainly - truth).norm() + 2**-9 * truth.norm())


def test_unlikely_label_stays_finite():
    """A label of probability e^-1000 costs 1000, not infinity."""
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([1]))
    assert loss == 1000 and torch.autograd.grad(loss, hidden)[0] == 1


def test_compiles_in_one_graph():
    hidden, weight, labels = random_inputs()

    def loss(hidden, weight):
        return linear_cross_entropy(torch.tanh(hidden), weight, labels, chunk_tokens=4)

    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(hidden, weight), (hidden, weight))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("need", [(True, True), (True, False), (False, False)])
def test_operator_is_registered_well(need):
    hidden, weight, labels = random_inputs(torch.float32, size=(5,))
    hidden.requires_grad_(need[0])
    weight.requires_grad_(need[1])
    arguments = (hidden, weight, labels, -100, 2, torch.float32, *need, False)
    torch.library.opcheck(_summed_loss, arguments)


PEAK = """
from pathlib import Path
import torch
from flash_frac.ops.loss.api import linear_cross_entropy

def mib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024

hidden = torch.randn(2048, 64, requires_grad=True)
weight = torch.randn(32000, 64, requires_grad=True)
labels = torch.randint(0, 32000, (2048,))
linear_cross_entropy(hidden[:8], weight, labels[:8])
Path("/proc/self/clear_refs").write_text("5")
before = mib("VmRSS")
linear_cross_entropy(hidden, weight, labels, chunk_tokens=512)
print(mib("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_one_chunk_is_gone_before_the_next():
    """Logits and their logarithms of one chunk, 62.5 MiB each, and 8 MiB of gradients and parts."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.5 * 62.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_that_of_a_chunk():
    tokens, vocab, width, chunk = 8192, 32000, 256, 512
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk).backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * 4 * vocab * width + 2 * 2 * tokens * width
    # The workspace of cuBLAS, 32 MB, and small tensors.
    assert peak <= 6 * chunk * vocab + gradients + 2 * vocab * width + 2**26


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, r"labels must have shape \(3, 7\)"),
        ({"weight": torch.zeros(4, 5)}, r"weight must have shape \(V, 12\), got \(4, 5\)"),
        ({"weight": torch.zeros(4, 12)}, "weight must have the dtype of hidden, torch.float64"),
        ({"reduction": "none"}, "reduction must be 'mean' or 'sum', got 'none'"),
        ({"reduction": "sum", "num_items": torch.tensor(3)}, "num_items divides the sum"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(changes, message):
    inputs = dict(zip(("hidden", "weight", "labels"), random_inputs(), strict=True))
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(inputs | changes))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_kernel_is_as_exact(autocast):
    """On CUDA auto takes the kernel: the error rule for loss and both gradients."""
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden = torch.randn(3, 100, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1000, 64, device="cuda", dtype=dtype)
    labels = torch.randint(1000, (3, 100), device="cuda")
    labels[0, :7] = -100

    def run(hidden, weight, **options):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast and "backend" in options):
            loss = linear_cross_entropy(*leaves, labels, **options)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    exact = run(hidden.double(), weight.double())
    got, plain = (run(hidden, weight, backend=name) for name in ("auto", "torch"))
    assert resolve_backend("auto", hidden, "loss") == "triton"
    for a, b, c in zip(got, plain, exact, strict=True):
        assert a.dtype == b.dtype
        # Products round to bfloat16 in both.
        assert relative_error(a, c) <= 2 * (relative_error(b, c) + 2**-9)


def test_kernel_needs_a_gpu():
    hidden, weight, labels = torch.randn(2, 3), torch.randn(5, 3), torch.tensor([0, 4])
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run here: .*CUDA.*'torch'"):
        linear_cross_entropy(hidden, weight, labels, backend="triton")


def test_gradgradcheck():
    """The gradient is made with the loss; asked for its own gradient, it is made again."""
    hidden, weight, labels = random_inputs(size=(4,))

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, chunk_tokens=3, backend="torch")

    assert torch.autograd.gradgradcheck(loss, (hidden, weight))
    assert torch.autograd.gradgradcheck(lambda x: loss(x, weight.detach()), (hidden,))
