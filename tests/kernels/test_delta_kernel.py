"""The Triton backend of the delta rule against float64: outputs, states and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from flash_frac.ops import delta_scan, delta_step
from flash_frac.ops.arithmetic import INTERPRETED
from flash_frac.ops.delta import plan
from flash_frac.ops.delta.step import delta_step_op, fused_delta_step, fused_delta_step_op
from flash_frac.ops.delta.triton import delta_op
from tests.errors import assert_as_good, widen
from tests.kernels.devices import DEVICE, DTYPES

NAMES = ("y", "state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dinitial")


def draw(batch, time, heads, keys, channels, *, dtype=torch.float32, num=None):
    """q, k, v, beta, log_decay and a state; some tokens forget all, some nothing."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    size = (batch, time, heads)
    q, k = (F.normalize(normal(*size, keys), dim=-1) for _ in range(2))
    log_decay = -torch.exp(3 * normal(*size) - 3)
    tokens = [q, k, normal(*size, channels), normal(*size).sigmoid()]
    state = normal(num or batch, heads, keys, channels)
    tokens = [x.to(DEVICE, dtype) for x in tokens]
    return [*tokens, *(x.to(DEVICE, torch.float32) for x in (log_decay, state))]


def run(inputs, cu_seqlens, backend):
    """Outputs, and gradients of all inputs by random gradients of both."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    options = {"initial_state": leaves[5], "cu_seqlens": cu_seqlens, "backend": backend}
    outputs = delta_scan(*leaves[:5], **options)
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    given = [x for x in leaves if x is not None]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, given, weights)]


def check_inputs(inputs, cu_seqlens=None, *, exact="recurrent"):
    """Error against float64 at most twice that of the torch backend in the same dtype."""
    true = run(widen(inputs), cu_seqlens, exact)
    usual, got = (run(inputs, cu_seqlens, backend) for backend in ("torch", "triton"))
    for name, a, b, c in zip(NAMES, got, usual, true, strict=False):
        assert_as_good(a, b, c, name, inputs[2].dtype)


def check(sizes, dtype, *, lengths=None, **options):
    cu_seqlens, num = None, None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        num = len(lengths)
    check_inputs(draw(*sizes, dtype=dtype, num=num), cu_seqlens, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(3, 1, 3, 8, 8), (1, 31, 1, 5, 33), (2, 64, 1, 8, 16), (1, 70, 1, 20, 20), (1, 40, 1, 96, 24)],
    ids=str,
)
def test_scan(sizes, dtype):
    check(sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[1, 0, 35, 20], [0, 0, 40]], ids=str)
def test_packed(lengths, dtype):
    check((1, sum(lengths), 1, 8, 16), dtype, lengths=lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_token_leaves_the_state(dtype):
    *tokens, state = draw(1, 0, 2, 8, 16, dtype=dtype)
    bounds = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    out = delta_scan(*tokens, initial_state=state, cu_seqlens=bounds, backend="triton")
    assert torch.equal(out.state, state)


@pytest.fixture
def chunks_of_64(monkeypatch):
    """The chunks that 16-bit inputs have on Hopper, for float32."""
    tuning = plan.FLOAT32._replace(chunk=64)
    monkeypatch.setattr(plan, "tuning_for", lambda dtype, device: tuning)
    plan.forget_plans()
    yield
    plan.forget_plans()


def test_chunks_of_64(chunks_of_64):
    check((1, 70, 1, 8, 16), torch.float32)


def test_keys_that_repeat():
    """The triangular system is at its worst: powers of its matrix would be up to 10^9.

    With 16 bits the corrections of a chunk are rounded, and their sum is small: no test of it.
    """
    q, k, v, beta, log_decay, state = draw(1, 40, 1, 8, 16)
    k = k[:, :1].expand_as(k).contiguous()
    check_inputs([q, k, v, torch.ones_like(beta), torch.zeros_like(log_decay), state])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_that_forget_everything(dtype):
    """A log_decay down to -inf costs other tokens no digits, and nothing becomes NaN."""
    inputs = draw(1, 40, 1, 8, 16, dtype=dtype)
    log_decay = inputs[4] * 1e-3
    log_decay[:, [3, 17]], log_decay[:, [18, 30]] = -torch.inf, -1e30
    inputs[4] = log_decay
    check_inputs(inputs)


def test_a_bad_token_spoils_what_follows():
    """In its own sequence alone; the contracts say the same of gradients and other tensors."""
    clean = draw(1, 60, 1, 8, 20, num=3)
    bounds = torch.tensor([0, 20, 45, 60], device=DEVICE)

    def scan(inputs):
        *tokens, state = inputs
        return delta_scan(*tokens, initial_state=state, cu_seqlens=bounds, backend="triton")

    expected = scan(clean)
    for i, value in ((1, torch.nan), (2, torch.inf), (3, torch.nan), (4, torch.nan)):
        inputs = [x.clone() for x in clean]
        inputs[i][0, 30].view(-1)[-1] = value
        y, state = scan(inputs)
        assert torch.equal(y[:, :30], expected.y[:, :30]), i
        assert torch.equal(y[:, 45:], expected.y[:, 45:]), i
        assert not y[:, 30:45].isfinite().any() and not state[1].isfinite().any(), i
        assert torch.equal(state[::2], expected.state[::2]), i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large(dtype):
    """The shapes of real models, many chunks, and channels that fill no block."""
    if INTERPRETED:
        pytest.skip("too slow in the interpreter; needs a CUDA device")
    check((2, 1000, 4, 96, 192), dtype, exact="torch")
    check((1, 777, 3, 128, 256), dtype, exact="torch")
    check((1, 500, 2, 64, 96), dtype, exact="torch")
    check((1, 1500, 3, 48, 96), dtype, lengths=[1, 700, 0, 64, 735], exact="torch")


def test_long():
    """Errors do not grow along 16,384 tokens."""
    if INTERPRETED:
        pytest.skip("too slow in the interpreter; needs a CUDA device")
    check((1, 16_384, 2, 96, 192), torch.bfloat16, exact="torch")


def test_more_than_2_31_elements():
    """int64 offsets: the last sequence of a batch that is too large for int32 is what it is alone.

    Without gradients it takes 40 GB.
    """
    if INTERPRETED:
        pytest.skip("too large for the interpreter; needs a CUDA device")
    *tokens, _ = draw(1, 4096, 16, 96, 192, dtype=torch.bfloat16)
    alone = delta_scan(*tokens, backend="triton")
    tokens = [x.expand(176, *x.shape[1:]).contiguous() for x in tokens]
    many = delta_scan(*tokens, backend="triton")
    assert many.y.numel() > 2**31
    assert torch.equal(many.y[-1], alone.y[0]) and torch.equal(many.state[-1], alone.state[0])


def test_in_a_cuda_graph():
    """Packed sequences too: nothing is read back from the device."""
    if INTERPRETED:
        pytest.skip("needs a CUDA device")
    inputs = draw(1, 300, 2, 96, 192, dtype=torch.bfloat16, num=3)
    bounds = torch.tensor([0, 100, 100, 300], device=DEVICE)
    expected = run(inputs, bounds, "triton")
    leaves = [x.clone().requires_grad_() for x in inputs]
    generator = torch.Generator().manual_seed(4)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in expected[:2]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        options = {"initial_state": leaves[5], "cu_seqlens": bounds, "backend": "triton"}
        outputs = delta_scan(*leaves[:5], **options)
        gradients = torch.autograd.grad(outputs, leaves, weights)
    graph.replay()
    got = [*(x.detach() for x in outputs), *gradients]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_results_repeat_to_the_bit():
    inputs = draw(1, 40, 2, 8, 16)
    first, second = (run(inputs, None, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_differentiable_only_once():
    inputs = [x.requires_grad_() for x in draw(1, 5, 1, 4, 16)[:5]]
    loss = delta_scan(*inputs, backend="triton").y.square().sum()
    with pytest.raises(RuntimeError, match=r"differentiable once.*backend='torch'"):
        torch.autograd.grad(loss, inputs, create_graph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 16, 16), (1, 1, 5, 33), (3, 2, 96, 192)], ids=str)
def test_step(sizes, dtype):
    batch, *rest = sizes
    *tokens, state = draw(batch, 1, *rest, dtype=dtype)
    token = [x[:, 0] for x in tokens]
    got = delta_step(*token, state, backend="triton")
    exact = delta_step(*widen(token), state.double(), backend="torch")
    usual = delta_step(*token, state, backend="torch")
    for name, a, b, c in zip(NAMES[:2], got, usual, exact, strict=True):
        assert_as_good(a, b, c, name)


def test_gradients_of_a_step():
    *tokens, state = draw(2, 1, 2, 8, 16)
    results = []
    for backend in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in (*(x[:, 0] for x in tokens), state)]
        y, new = delta_step(*leaves, backend=backend)
        results.append(torch.autograd.grad(y.sin().sum() + new.cos().sum(), leaves))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def layer_token(batch, heads, keys, channels, dtype=torch.float32):
    """Arguments of `fused_delta_step`, rows of a projection apart, and a gate with its norm."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    sizes = [heads * (2 * keys + channels), heads, heads, heads * channels]
    qkv, a, b, gate = normal(batch, sum(sizes)).split(sizes, -1)
    shared = [normal(heads, dtype=torch.float32) for _ in range(2)]
    state = normal(batch, heads, keys, channels, dtype=torch.float32)
    return (qkv, a, b, *shared, state), {"gate": gate, "norm_weight": normal(channels)}


def plain_layer_token(arguments, *, gate=None, norm_weight=None):
    """What `fused_delta_step` computes, in plain torch and in the dtype of the state."""
    qkv, a, b, A_log, dt_bias, state = (x.to(arguments[-1].dtype) for x in arguments)
    heads, keys, channels = state.shape[1:]
    q, k, v = qkv.split([heads * keys, heads * keys, heads * channels], -1)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    log_decay = -A_log.exp() * F.softplus(a + dt_bias)
    y, state = delta_step(q * keys**-0.5, k, v, b.sigmoid(), log_decay, state, backend="torch")
    if gate is not None:
        gate, norm_weight = (x.to(state.dtype) for x in (gate, norm_weight))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * norm_weight
        y = y * F.silu(gate.unflatten(-1, (heads, -1)))
    return y.to(arguments[0].dtype), state


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 16, 32), (1, 3, 5, 10), (2, 1, 96, 192)], ids=str)
def test_fused_step(sizes, dtype, gated):
    arguments, gating = layer_token(*sizes, dtype=dtype)
    gating = gating if gated else {}
    usual = plain_layer_token(arguments, **gating)
    wide = {name: x.double() for name, x in gating.items()}
    exact = plain_layer_token(widen(arguments), **wide)
    y = fused_delta_step(*arguments, **gating)
    for name, a, b, c in zip(NAMES[:2], (y, arguments[-1]), usual, exact, strict=True):
        assert_as_good(a, b, c, name)


def test_a_fused_step_leaves_padding():
    arguments, gating = layer_token(3, 2, 8, 16)
    before = arguments[-1].clone()
    _, after = plain_layer_token(arguments)
    fused_delta_step(*arguments, **gating, mask=torch.tensor([1, 0, 1], device=DEVICE))
    assert torch.equal(arguments[-1][1], before[1])
    torch.testing.assert_close(arguments[-1][::2], after[::2])


def test_errors_of_a_fused_step():
    (qkv, *rest), gating = layer_token(2, 2, 8, 16)
    with pytest.raises(ValueError, match=r"qkv must have shape \(2, 64\)"):
        fused_delta_step(qkv[:, 1:], *rest)
    with pytest.raises(ValueError, match=r"norm_weight must have shape \(16,\).*got None"):
        fused_delta_step(qkv, *rest, gate=gating["gate"])
    with pytest.raises(ValueError, match=r"state must have shape .* and be contiguous"):
        fused_delta_step(qkv, *rest[:-1], rest[-1].mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"state must be float32"):
        fused_delta_step(qkv, *rest[:-1], rest[-1].half())
    with pytest.raises(ValueError, match=r"no gradient.*torch\.no_grad"):
        fused_delta_step(qkv.requires_grad_(), *rest)


def test_opcheck():
    """Registration does not depend on the length: one chunk, and two sequences of one."""
    *tokens, state = draw(1, 9, 1, 4, 16)
    tokens = [x.requires_grad_() for x in tokens]
    torch.library.opcheck(delta_op.registered, (*tokens, state.requires_grad_(), None))
    bounds = torch.tensor([0, 7, 9], device=DEVICE)
    torch.library.opcheck(delta_op.registered, (*tokens, None, bounds))
    token = [x[:, 0].detach().contiguous().requires_grad_() for x in tokens]
    torch.library.opcheck(delta_step_op.registered, (*token, state))
    arguments, gating = layer_token(2, 2, 8, 16)
    arguments = (*arguments, None, *gating.values(), 1e-5)
    torch.library.opcheck(fused_delta_step_op.registered, arguments)
