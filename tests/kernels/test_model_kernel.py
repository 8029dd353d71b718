"""Whole models with the kernels, against float64: training, prefill and decoding."""

import pytest
import torch

from flash_frac.inference import Generator, SamplingSettings
from flash_frac.ops.testing import relative_error
from tests.backends import repeat
from tests.errors import assert_as_good
from tests.kernels.devices import DEVICE, DTYPES
from tests.models.conftest import make_model, on_backend
from tests.models.hybrids import OWN_LOOP

SIZES = {"num_hidden_layers": 2, "frac_num_modes": 4}
# Tokens to decode, and how often: a GPU records a graph and then replays it.
STEPS, RUNS = (8, 3) if DEVICE == "cuda" else (3, 1)


def build(dtype, backend, **changes):
    return on_backend(make_model(torch.float64, **SIZES | changes).to(DEVICE, dtype), backend)


def one_layer():
    """For what one layer shows as well as two: the interpreter needs a second for each token."""
    return build(torch.float32, "triton", num_hidden_layers=1)


def models(dtype, **changes):
    """On the kernels, in plain torch, and in float64; with the same weights, rounded alike."""
    kernels, plain = (build(dtype, backend, **changes) for backend in ("triton", "torch"))
    exact = build(torch.float64, "torch", **changes)
    exact.load_state_dict({k: v.double() for k, v in plain.state_dict().items()})
    return kernels, plain, exact


def tokens(batch, length):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 61, (batch, length), generator=generator).to(DEVICE)


def assert_all_as_good(got, usual, exact, dtype):
    """The rule for dicts of tensors."""
    few = [name for name in exact if exact[name].numel() < 100]
    for name in exact:
        if name not in few:
            assert_as_good(*(r[name].detach() for r in (got, usual, exact)), name, dtype)
    # The error of a few numbers is a matter of luck: all such tensors together.
    errors = [[relative_error(r[n].detach(), exact[n]) for n in few] for r in (got, usual)]
    mine, others = (torch.tensor(e).square().mean().sqrt() for e in errors)
    assert mine <= 2 * (others + torch.finfo(dtype).eps / 2)


CASES = {
    "plain": {},
    "padded": {"mask": True},
    "packed": {"packed": True},
    "no D, no bias": {"config": {"frac_use_D": False, "frac_conv_bias": False}},
    "fixed alpha": {"config": {"frac_alpha_fixed": 0.5, "frac_gate_bias_init": 0.5}},
    "exact prior": {"config": {"frac_prior": "exact"}},
    "equal variance, norms": {
        "config": {"frac_beta": "equal_variance", "frac_rw_norm": True, "frac_bank": "per_head"}
    },
}


# The others differ in one kernel alone, which has tests of its own.
QUICK = ("padded", "packed")
EVERY = [name if name in QUICK else repeat(name) for name in CASES]


def forward_arguments(case, ids):
    if case.get("mask"):
        mask = torch.ones_like(ids)
        mask[0, :7], mask[1, 3] = 0, 0
        return {"attention_mask": mask}
    if case.get("packed"):
        return {"cu_seqlens": torch.tensor([0, 9, 9, ids.shape[1]], device=DEVICE)}
    return {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EVERY)
def test_training(dtype, case):
    case = CASES[case]
    ids = tokens(1 if case.get("packed") else 2, 40)
    arguments = forward_arguments(case, ids)
    results = []
    for model in models(dtype, **case.get("config", {})):
        output = model.train()(ids, labels=ids, **arguments)
        output.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append({"logits": output.logits, "loss": output.loss} | gradients)
    assert_all_as_good(*results, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EVERY)
@torch.no_grad()
def test_reading_and_decoding(dtype, case):
    """In pieces, then token by token; the states too."""
    case = CASES[case]
    batch = 1 if case.get("packed") else 2
    ids = tokens(batch, 45)
    arguments = forward_arguments(case, ids[:, :30])
    results = []
    for model in models(dtype, **case.get("config", {})):
        output = model(ids[:, :30], use_cache=True, **arguments)
        found, cache = {"first": output.logits}, output.past_key_values
        rest = ids[:, 30:].expand(3, -1) if case.get("packed") else ids[:, 30:]
        found["piece"] = model(rest[:, :7], past_key_values=cache).logits
        for t in range(7, 7 + STEPS):
            found[f"token {t}"] = model(rest[:, t : t + 1], past_key_values=cache).logits
        found |= {f"state {n}": state.clone() for n, state in enumerate(cache.tensors())}
        results.append(found)
    for name in results[0]:
        assert_as_good(*(r[name] for r in results), name, dtype)


@torch.no_grad()
def test_a_mask_on_one_token():
    """A padded token leaves the state of its sequence as it is, and those of others not."""
    model = one_layer()
    ids = tokens(2, 12)
    cache = model(ids[:, :10], use_cache=True).past_key_values
    before = [x.clone() for x in cache.tensors()]
    mask = torch.tensor([[1], [0]], device=DEVICE)
    model(ids[:, 10:11], past_key_values=cache, attention_mask=mask)
    for old, new in zip(before, cache.tensors(), strict=True):
        assert torch.equal(old[1], new[1]) and not torch.equal(old[0], new[0])


@torch.no_grad()
def test_hooks_and_adapters_are_not_passed_by():
    """What wraps or watches a part of a block sees every token."""
    model = one_layer()
    ids = tokens(1, 3)
    seen = []
    block = model.model.layers[0]
    for part in (block.mixer.in_proj, block.norm, block.mixer.out_norm, block.mixer):
        hook = part.register_forward_hook(lambda *a: seen.append(1))
        cache = model(ids[:, :2], use_cache=True).past_key_values
        model(ids[:, 2:], past_key_values=cache)
        hook.remove()
        assert len(seen) == 2
        seen.clear()


class Wrapper(torch.nn.Module):
    """A module around another that shows nothing of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments):
        return self.inner(*arguments)


@torch.no_grad()
@pytest.mark.parametrize("part", ["norm", "mixer.in_proj", "mixer.out_norm"])
def test_wrapped_parts_are_called(part):
    """Decoding goes the general way around a part that is not plain."""
    model = one_layer()
    ids = tokens(1, 4)
    expected = model(ids).logits[:, -1]
    block = model.model.layers[0]
    parent, _, name = part.rpartition(".")
    owner = block.get_submodule(parent)
    setattr(owner, name, Wrapper(getattr(owner, name)))
    cache = model(ids[:, :3], use_cache=True).past_key_values
    got = model(ids[:, 3:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, expected)


class Halved(torch.Tensor):
    """A weight that is twice what lies in its memory, as a quantised one is something else."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function is torch.nn.functional.linear:
            x, weight, *rest = arguments
            return function(x, 2 * weight.as_subclass(torch.Tensor), *rest, **(options or {}))
        return super().__torch_function__(function, types, arguments, options or {})


@torch.no_grad()
def test_weights_of_another_class_are_not_read_raw():
    model = one_layer()
    ids = tokens(1, 4)
    expected = model(ids).logits[:, -1]
    linear = model.model.layers[0].mixer.in_proj
    halved = (linear.weight / 2).as_subclass(Halved)
    linear.weight = torch.nn.Parameter(halved, requires_grad=False)
    assert type(linear.weight) is Halved
    cache = model(ids[:, :3], use_cache=True).past_key_values
    got = model(ids[:, 3:], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("batch", [repeat(1), 6])
def test_generator(batch):
    """Token for token as Hugging Face's loop on the same kernels; graphs, where there are any."""
    model = one_layer()
    ids = tokens(batch, 12)
    generator = Generator(model)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options, **OWN_LOOP)
    for _ in range(RUNS):
        assert torch.equal(generator.generate(ids, max_new_tokens=STEPS), expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_sampling_in_a_graph():
    """A seed draws the same whether steps are recorded, replayed or run one by one."""
    model = one_layer()
    ids, sampling = tokens(3, 12), SamplingSettings(temperature=1.0, top_k=20, top_p=0.9)
    options = {"max_new_tokens": 8, "sampling": sampling}
    generator = Generator(model)
    first = generator.generate(ids, seed=1, **options)
    assert torch.equal(generator.generate(ids, seed=1, **options), first)
    other = generator.generate(ids, seed=2, **options)
    assert not torch.equal(other, first)
    assert torch.equal(generator.generate(ids, seed=1, **options), first)
    assert torch.equal(Generator(model).generate(ids, seed=2, **options), other)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes float32 only")
def test_autocast():
    """Weights in float32, products in bfloat16, as trainers do it."""
    ids = tokens(2, 40)
    results = []
    for model in models(torch.float32, fuse_linear_cross_entropy=True):
        half = next(model.parameters()).dtype == torch.float32
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model.train()(ids, labels=ids).loss
        loss.backward()
        results.append({"loss": loss} | {n: p.grad for n, p in model.named_parameters()})
    assert_all_as_good(*results, torch.bfloat16)


def test_compiling():
    """Forward and a training step in one graph each, with the kernels in it as operators."""
    compiler = "inductor" if DEVICE == "cuda" else "aot_eager"
    model, _, exact = models(torch.float32, num_hidden_layers=1)
    ids = tokens(1, 40)

    def step(model, ids):
        return model(ids, labels=ids, use_cache=False)

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    with torch.no_grad():
        logits = [f(m, ids).logits for f, m in ((compiled, model), (step, model), (step, exact))]
        assert_as_good(*logits, "logits")
    results = []
    for function, trained in ((compiled, model), (step, model), (step, exact)):
        trained.train().zero_grad()
        function(trained, ids).loss.backward()
        results.append({n: p.grad for n, p in trained.named_parameters()})
    assert_all_as_good(*results, torch.float32)
