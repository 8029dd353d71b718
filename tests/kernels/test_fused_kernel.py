"""The fused linear layers of a step, against float64; and steps of a model by each plan."""

import pytest
import torch
import torch.nn.functional as F

from flash_frac.ops import causal_conv, rms_norm
from flash_frac.ops.decode import plan
from flash_frac.ops.decode.fused import (
    output_step,
    output_step_op,
    pair_step,
    pair_step_op,
    projection_step,
    projection_step_op,
)
from flash_frac.ops.decode.plan import QUANTISED, StepPlan, product_options, step_kind
from tests.errors import assert_as_good, widen
from tests.kernels.devices import DEVICE, DTYPES
from tests.kernels.launches import watch
from tests.kernels.test_decode_kernel import assert_guarded, guarded
from tests.kernels.test_gemv_kernel import dequantise, quantise
from tests.models.conftest import make_model, on_backend

GPU = DEVICE != "cpu"
# Vectors of a gemv; of a product in blocks of 16, and of more than 16.
NUMBERS = [("gemv", 1), ("gemv", 4), ("product", 3), ("product", 16), ("product", 40)]
# On a GPU also blocks of 64 outputs, all of whose inputs one program reads.
LARGE = [(6144, 512, 3072)] if GPU else []
PRODUCTS = StepPlan(fuses=True, most_products=64, early=False)


@pytest.fixture
def use(monkeypatch):
    """Take a plan for the device of the tests."""
    return lambda chosen: monkeypatch.setitem(plan.PLANS, DEVICE, chosen)


def normal(*shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def projection_inputs(num, num_outputs, size, channels, dtype, *, taps=4, bias=True):
    """As `projection_step` takes them; rows of x are apart, and weights keep outputs near 1."""
    weight = normal(num_outputs, size, dtype=dtype) / size**0.5
    conv = normal(channels, 1, taps, dtype=dtype), normal(channels, dtype=dtype) if bias else None
    window = normal(num, channels, taps - 1, dtype=dtype)
    x, norm_weight = normal(num, 2 * size, dtype=dtype)[:, :size], normal(size, dtype=dtype)
    return x, weight, norm_weight, *conv, window


def plain_projection(x, weight, norm_weight, conv_weight, conv_bias, window):
    y = F.linear(rms_norm(x, norm_weight, 1e-6).to(x.dtype), weight)
    inner = y[:, None, : len(conv_weight)]
    u, window = causal_conv(inner, conv_weight, conv_bias, window=window, backend="torch")
    return y, u[:, 0], window


def check_projection(given, kind, mask=None, scale=None, weight=None):
    """weight: the quantised one, of which `given` holds the values that it stands for."""
    exact, usual = plain_projection(*widen(given)), plain_projection(*given)
    x, plain, norm_weight, conv_weight, conv_bias, old = given
    window, whole = guarded(old)
    y, u = projection_step(
        x, plain if weight is None else weight, norm_weight, 1e-6, conv_weight, conv_bias, window,
        kind=kind, scale=scale, mask=mask,
    )  # fmt: skip
    expected = [exact[2], usual[2]]
    if mask is not None:
        expected = [torch.where(mask[:, None, None] != 0, w, old.to(w.dtype)) for w in expected]
    if window.numel():
        assert_as_good(window, expected[1], expected[0], "window")
        assert_guarded(window, whole)
    assert_as_good(y, usual[0], exact[0], "y")
    assert_as_good(u, usual[1], exact[1], "u")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "num"), NUMBERS)
@pytest.mark.parametrize(("num_outputs", "size", "channels"), [(70, 40, 33), (96, 257, 48), *LARGE])
def test_projection(kind, num, num_outputs, size, channels, dtype):
    check_projection(projection_inputs(num, num_outputs, size, channels, dtype), kind)


@pytest.mark.parametrize("kind", ["gemv", "product"])
@pytest.mark.parametrize("taps", [1, 2, 8])
def test_taps_and_padding(kind, taps):
    given = projection_inputs(3, 40, 24, 20, torch.float32, taps=taps, bias=False)
    check_projection(given, kind)
    mask = torch.tensor([1, 0, 1], device=DEVICE)
    for dtype in (torch.bool, torch.int64):
        check_projection(given, kind, mask.to(dtype))


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_quantised_projection(kind):
    x, weight, *rest = projection_inputs(2, 40, 24, 20, torch.float32)
    values, scale = quantise(weight, kind)
    given = (x, dequantise(values, scale, torch.float32), *rest)
    check_projection(given, "gemv", scale=scale, weight=values)


def pair_inputs(num, sizes, size, dtype):
    x, other = normal(num, 3 * size, dtype=dtype).split([size, 2 * size], 1)
    weights = [normal(n, size, dtype=dtype) for n in sizes]
    return x, weights[0], other[:, :size], weights[1], normal(sizes[1], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "num"), NUMBERS)
@pytest.mark.parametrize(("sizes", "size"), [((32, 6), 40), ((33, 65), 257)])
def test_pair(kind, num, sizes, size, dtype):
    def plain(x, weight, other, other_weight, bias):
        return F.linear(x, weight), F.linear(other, other_weight, bias)

    given = pair_inputs(num, sizes, size, dtype)
    for got, usual, exact in zip(
        pair_step(*given, kind=kind), plain(*given), plain(*widen(given)), strict=True
    ):
        assert_as_good(got, usual, exact)


@pytest.mark.parametrize("kind", QUANTISED, ids=str)
def test_quantised_pair(kind):
    x, weight, other, other_weight, bias = pair_inputs(2, (20, 6), 40, torch.float32)
    (values, scale), (others, other_scale) = (quantise(w, kind) for w in (weight, other_weight))
    given = (x, values, other, others, bias)
    found = pair_step(*given, kind="gemv", scale=scale, other_scale=other_scale)
    layers = ((x, values, scale, None), (other, others, other_scale, bias))
    for got, (x, values, scale, bias) in zip(found, layers, strict=True):
        usual = F.linear(x, dequantise(values, scale, torch.float32), bias)
        wide = dequantise(values, scale, torch.float64)
        assert_as_good(got, usual, F.linear(x.double(), wide, *widen((bias,))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num", [3, 16, 40])
@pytest.mark.parametrize(("num_outputs", "size"), [(70, 40), (130, 1024)])
def test_output(num, num_outputs, size, dtype):
    """Of more than 16 vectors by sums over parts of the inputs."""
    z, norm_weight = normal(num, size, dtype=dtype), normal(size, dtype=dtype)
    weight, residual = normal(num_outputs, size, dtype=dtype), normal(num, num_outputs, dtype=dtype)

    def plain(z, norm_weight, weight, residual):
        normed = rms_norm(z, norm_weight, 1e-6).to(z.dtype)
        return residual + F.linear(normed, weight)

    given = (z, norm_weight, weight, residual)
    squares = z.float().square().view(num, 5 if size == 40 else 8, -1).sum(-1)
    x = (z * norm_weight).to(dtype)
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, launched.append)
        got = output_step(x, weight, residual, 1e-6, squares=squares)
    assert ("join_kernel" in launched) == (num > 16 and size > 512)
    assert_as_good(got, plain(*given), plain(*widen(given)))


def test_operators_are_registered_well():
    *given, window = projection_inputs(3, 12, 8, 5, torch.float32)
    x, weight, norm_weight, *conv = given
    for kind in ("gemv", "product"):
        inputs = (x, weight, None, norm_weight, 1e-6, *conv, window, None, kind, False)
        torch.library.opcheck(projection_step_op.registered, inputs)
    x, weight, *others = pair_inputs(3, (4, 6), 8, torch.float32)
    other, other_weight, bias = others
    given = (x, weight, None, other, other_weight, None, bias, "product", False)
    torch.library.opcheck(pair_step_op.registered, given)
    given = (x, weight, normal(3, 4, dtype=torch.float32), x[:, :2].square(), 1e-6, False)
    torch.library.opcheck(output_step_op.registered, given)


def test_kinds_of_steps(use):
    x = torch.zeros(2, 8, device=DEVICE)
    weights, quantised = [x, x], [x.to(torch.int8)] * 2
    assert step_kind(x[:1], weights) is None
    use(PRODUCTS)
    assert step_kind(x[:1], weights) == "gemv"
    assert step_kind(x[:1], [weights[0], quantised[0]]) == "gemv"
    assert step_kind(x, quantised) == "gemv"
    assert step_kind(x, [weights[0], quantised[0]]) is None
    assert step_kind(x.repeat(3, 1), quantised) is None
    assert step_kind(x.half(), weights) == step_kind(x.half().repeat(32, 1), weights) == "product"
    assert step_kind(x.half().repeat(33, 1), weights) is None
    # float32 has no tensor cores; the interpreter has no 16-bit numbers.
    assert (step_kind(x, weights) is None) == GPU


@pytest.mark.parametrize("num", [2, 16, 17, 64])
@pytest.mark.parametrize("size", [32, 1024, 2048, 4096, 5120])
@pytest.mark.parametrize("num_outputs", [30, 560, 2048, 8192, 20480])
def test_products_fit_into_shared_memory(num_outputs, size, num):
    for splits in (True, False):
        found = product_options(num, num_outputs, size, torch.bfloat16, splits=splits)
        assert found["STAGES"] * (found["BB"] + found["BO"]) * found["BE"] * 2 <= 99 * 1024
        assert found["SPLITS"] == 1 or splits
        assert found["SPLITS"] * found["BE"] <= max(size, found["BE"])


CASES = {"plain": {}, "no D, no bias": {"frac_use_D": False, "frac_conv_bias": False}}
CASES |= {"fixed alpha": {"frac_alpha_fixed": 0.5, "frac_gate_bias_init": 0.5}}


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num", [1, 2, 20])
def test_steps_of_a_model(monkeypatch, use, case, dtype, num):
    """Logits and states by the plan are as good as by torch; one sequence is padding."""
    model = make_model(torch.float64, num_hidden_layers=1, **CASES[case]).to(DEVICE, dtype)
    exact = on_backend(make_model(torch.float64, num_hidden_layers=1, **CASES[case]), "torch")
    exact.to(DEVICE).load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    ids = torch.randint(3, 61, (num, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[num - 1, 5:] = num == 1

    def run(model, before=None):
        cache = on_backend(model, "torch")(ids[:, :5], use_cache=True).past_key_values
        if before is not None:
            on_backend(model, "triton")
            watch(monkeypatch, before)
        logits = []
        for t in range(5, 8):
            given = {"past_key_values": cache, "attention_mask": mask[:, t : t + 1]}
            logits.append(model(ids[:, t : t + 1], **given).logits)
        # The answer at padding is nobody's business.
        real = mask[:, 5:].bool()
        return [torch.cat(logits, 1)[real], *cache.tensors()]

    usual = run(model)
    use(PRODUCTS)
    launched = []
    got = run(model, launched.append)
    if dtype is not torch.float32 or not GPU or num == 1:
        # Four, and the norm before the head.
        assert len(launched) == 3 * 5
    for three in zip(got, usual, run(exact), strict=True):
        assert_as_good(*three)


@pytest.mark.skipif(not GPU, reason="kernels start early on a GPU only")
@torch.no_grad()
@pytest.mark.parametrize("num", [1, 3, 20, 64])
def test_early_launches_change_nothing(use, num):
    """To the bit, run one by one and from a graph, whose kernels are many."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 12}
    model = make_model(torch.float64, **sizes).to(DEVICE, torch.bfloat16)
    ids = torch.randint(3, 61, (num, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def run(recorded):
        cache = model(ids[:, :8], use_cache=True).past_key_values
        token = ids[:, 8:9].clone()

        def step():
            return model(token, past_key_values=cache).logits

        found, graph = [step()], torch.cuda.CUDAGraph()
        if recorded:
            with torch.cuda.graph(graph):
                logits = step()
        for t in range(9, 40):
            token.copy_(ids[:, t : t + 1])
            if recorded:
                graph.replay()
            found.append(logits.clone() if recorded else step())
        return [torch.stack(found), *cache.tensors()]

    use(PRODUCTS)
    expected = run(recorded=False)
    use(PRODUCTS._replace(early=True))
    for recorded in (False, True):
        for got, wanted in zip(run(recorded), expected, strict=True):
            assert torch.equal(got, wanted)


def test_errors(use):
    given = projection_inputs(2, 12, 8, 5, torch.float32)
    x, weight, norm_weight, conv_weight, conv_bias, window = given
    rest = (norm_weight, 1e-6, conv_weight, conv_bias)
    with pytest.raises(ValueError, match=r"window must have shape \(2, 5, 3\)"):
        projection_step(x, weight, *rest, window[:1], kind="gemv")
    with pytest.raises(ValueError, match=r"kind must be .*, got 'dot'"):
        projection_step(x, weight, *rest, window, kind="dot")
    with pytest.raises(ValueError, match='a quantised weight needs kind="gemv"'):
        projection_step(x, weight, *rest, window, kind="product", scale=weight[:, 0])
    with pytest.raises(ValueError, match=r"at most as many channels .* \(4\), got 5"):
        projection_step(x, weight[:4], *rest, window, kind="gemv")
    with pytest.raises(ValueError, match="projection_step has no gradient"):
        projection_step(x, weight.requires_grad_(), *rest, window, kind="gemv")
    x, weight, other, other_weight, bias = pair_inputs(2, (4, 6), 8, torch.float32)
    with pytest.raises(ValueError, match=r"other_x must have shape \(2, 8\)"):
        pair_step(x, weight, other[:1], other_weight, bias, kind="gemv")
    with pytest.raises(ValueError, match=r"residual must have shape \(2, 4\)"):
        output_step(x.contiguous(), weight, bias, 1e-6, squares=weight[:2])
    with pytest.raises(ValueError, match="output_step takes norm_weight, or squares"):
        output_step(x, weight, x, 1e-6)
    with pytest.raises(ValueError, match=r"squares must have shape \(2, 6\)"):
        output_step(x, weight, x, 1e-6, squares=bias[None])
