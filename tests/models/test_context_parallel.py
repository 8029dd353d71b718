"""Mixers and models with rows sharded over ranks: loss and every parameter's gradient."""

import pytest
import torch
import torch.distributed as dist

from flash_frac.inference.state import empty_cache
from flash_frac.layers import FracMixer
from flash_frac.models import FracForSequenceClassification, FracModel
from flash_frac.models.cache import FracStaticCache
from flash_frac.ops.testing import relative_error
from tests.layers.test_delta import make_mixer as make_delta
from tests.layers.test_mixer import E, make_mixer
from tests.models.conftest import make_model
from tests.models.hybrids import KINDS, make_kind
from tests.ops.test_context_parallel import EXACT, alone, local_boundaries, run_world

__all__ = ["alone"]  # a fixture

T = 32  # four slices end at 8, 16 and 24, two at 16
DOCUMENTS = {
    "rows": None,
    "beginning with the slices": [0, 8, 16, 24, 32],
    "beginning one after": [0, 9, 17, 25, 32],
    "beginning one before": [0, 7, 15, 23, 32],
    "beginning two before": [0, 6, 14, 22, 32],
    "over several slices": [0, 3, 29, 32],
    "all kinds, and empty ones": [0, 1, 2, 8, 8, 15, 16, 17, 23, 32],
}


def bounds_of(documents, start=0, end=None):
    if documents is None:
        return None
    if end is None:
        return torch.tensor(documents)
    return local_boundaries(documents, start, end)


def summed_gradients(module, group):
    """The gradients of all parameters, summed over the ranks, and cleared."""
    gradients = {}
    for name, parameter in module.named_parameters():
        gradients[name] = parameter.grad
        parameter.grad = None
        if group is not None:
            dist.all_reduce(gradients[name], group=group)
    return gradients


def gradient_errors(got, expected):
    return [relative_error(got[name], expected[name]) for name in expected]


def mixer_errors(group, documents, length=T, make=make_mixer, **options):
    """Errors of y, the last state, and the gradients of the input and of all parameters."""
    torch.manual_seed(7)
    mixer = make(**options)
    batch = 2 if documents is None else 1
    x = torch.randn(batch, length, E, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(batch, length, E, dtype=torch.float64)
    y, state = mixer(x, cu_seqlens=bounds_of(documents))
    (y * weights).sum().backward()
    expected = summed_gradients(mixer, None)

    start, end = (length * r // group.size() for r in (group.rank(), group.rank() + 1))
    part = x.detach()[:, start:end].clone().requires_grad_()
    mixer.context_group = group
    local_y, local_state = mixer(part, cu_seqlens=bounds_of(documents, start, end))
    (local_y * weights[:, start:end]).sum().backward()
    errors = gradient_errors(summed_gradients(mixer, group), expected)
    errors.append(relative_error(local_y, y[:, start:end]))
    errors.append(relative_error(part.grad, x.grad[:, start:end]))
    if end == length:
        errors.append(relative_error(local_state.recurrent[-1], state.recurrent[-1]))
        errors.append(relative_error(local_state.conv[-1], state.conv[-1]))
    return errors


def shifted_labels(ids, documents):
    """The next token of each, none at the ends of documents, and none in 8 tokens of the middle."""
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, torch.tensor([] if documents is None else documents[1:], dtype=torch.long) - 1] = -100
    labels[:, 8:16] = -100  # all of the second of four slices
    return labels


def model_of(kind, **changes):
    """A mixed model by name, or one of Frac layers alone."""
    return (
        make_model(num_hidden_layers=2, **changes) if kind is None else make_kind(kind, **changes)
    )


def model_errors(group, documents, checkpointing=None, train=True, kind=None, length=T, **changes):
    """Errors of the loss and of the gradients of all parameters of a language model."""
    model = model_of(kind, fuse_linear_cross_entropy=True, **changes).train(train)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 61, (2 if documents is None else 1, length), generator=generator)
    labels = shifted_labels(ids, documents)

    def loss_of(start, end, bounds):
        part = labels[:, start:end]
        return model(
            ids[:, start:end],
            labels=part,
            shift_labels=part,
            num_items_in_batch=int((labels != -100).sum()),
            cu_seqlens=bounds,
            use_cache=False,
        ).loss

    loss = loss_of(0, length, bounds_of(documents))
    loss.backward()
    expected = summed_gradients(model, None)
    model.set_context_group(group)
    start, end = (length * r // group.size() for r in (group.rank(), group.rank() + 1))
    share = loss_of(start, end, bounds_of(documents, start, end))
    share.backward()
    errors = gradient_errors(summed_gradients(model, group), expected)
    total = share.detach().clone()
    dist.all_reduce(total, group=group)
    return [*errors, relative_error(total, loss)]


@torch.no_grad()
def cached_errors(group, kind=None):
    """The states that the last rank's cache holds continue the row, without the group."""
    model = model_of(kind)
    ids = torch.randint(3, 61, (2, T + 1), generator=torch.Generator().manual_seed(5))
    start, end = (T * r // group.size() for r in (group.rank(), group.rank() + 1))
    model.set_context_group(group)
    out = model(ids[:, start:end], use_cache=True)
    model.set_context_group(None)
    whole = model(ids).logits
    # Logits are float32, to be compared after one rounding of nearly equal numbers.
    errors = [relative_error(out.logits, whole[:, start:end])]
    if end == T:
        step = model(ids[:, T:], past_key_values=out.past_key_values, use_cache=True).logits
        errors.append(relative_error(step, whole[:, T:]))
    return errors


@torch.no_grad()
def packed_cache_errors(group, kind):
    """The same of the documents that the last slice holds, all of which go on."""
    documents, model = [0, 3, 27, 29, T], make_kind(kind)
    ids = torch.randint(3, 61, (1, T), generator=torch.Generator().manual_seed(5))
    start, end = (T * r // group.size() for r in (group.rank(), group.rank() + 1))
    model.set_context_group(group)
    bounds = bounds_of(documents, start, end)
    cache = model(ids[:, start:end], cu_seqlens=bounds, use_cache=True).past_key_values
    model.set_context_group(None)
    if end < T:
        return []
    token = torch.full((3, 1), 7)
    steps = model(token, past_key_values=cache, use_cache=True).logits
    alone = [torch.cat([ids[:, b:e], token[:1]], 1) for b, e in ((3, 27), (27, 29), (29, T))]
    whole = torch.cat([model(x).logits[:, -1:] for x in alone])
    return [relative_error(steps, whole)]


def layer_cases(groups):
    results = {}
    for n, group in groups.items():
        for name, documents in DOCUMENTS.items():
            results[f"mixer: {name} {n}"] = mixer_errors(group, documents)
        several = DOCUMENTS["over several slices"]
        results[f"mixer: one tap {n}"] = mixer_errors(group, several, conv_kernel=1)
        results[f"mixer: slices of K - 1 tokens {n}"] = mixer_errors(group, None, length=3 * n)
        for reentrant in (True, False):
            name = f"model: checkpointing, reentrant {reentrant} {n}"
            results[name] = model_errors(group, several, checkpointing=reentrant)
        results[f"logits: in float32 {n}"] = model_errors(group, several, train=False)
        results[f"logits: from a cache {n}"] = cached_errors(group)
    # All of what follows needs the states of more than one rank before.
    group = groups[4]
    for name, documents in DOCUMENTS.items():
        results[f"model: {name} 4"] = model_errors(group, documents)
        results[f"delta mixer: {name}"] = mixer_errors(group, documents, make=make_delta)
    for kind in KINDS:
        results[f"{kind}: several"] = model_errors(group, several, kind=kind)
    mixed, empty = "all", DOCUMENTS["all kinds, and empty ones"]
    results |= {
        f"{mixed}: empty": model_errors(group, empty, kind=mixed, checkpointing=True),
        # Slices of more than two windows.
        f"{mixed}: uneven": model_errors(group, None, kind=mixed, length=30, sliding_window=3),
        # Its softmax is float32.
        "logits: of eager attention 4": model_errors(
            group, None, kind="transformer", attn_implementation="eager"
        ),
        "cache: rows": cached_errors(group, mixed),
        "cache: packed": packed_cache_errors(group, mixed),
    }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_world(layer_cases, tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", [*DOCUMENTS, "one tap", "slices of K - 1 tokens"])
def test_mixers_share_a_row(results, case, ranks):
    for result in results:
        assert all(error < EXACT for error in result[f"mixer: {case} {ranks}"])


@pytest.mark.parametrize("case", DOCUMENTS)
def test_delta_mixers_share_a_row(results, case):
    for result in results:
        assert all(error < EXACT for error in result[f"delta mixer: {case}"])


CHECKPOINTING = ["checkpointing, reentrant True", "checkpointing, reentrant False"]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [*((case, 4) for case in [*DOCUMENTS, *CHECKPOINTING]), *((case, 2) for case in CHECKPOINTING)],
)
def test_models_share_a_row(results, case, ranks):
    """Loss and gradients, summed over ranks, one of which has no label that counts."""
    for result in results:
        assert all(error < EXACT for error in result[f"model: {case} {ranks}"])


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_models_share_a_row(results, kind):
    """States of every mixer go on, and attention sees the tokens of all ranks before."""
    for result in results:
        found = {name: x for name, x in result.items() if name.startswith(f"{kind}: ")}
        assert len(found) == (3 if kind == "all" else 1)
        assert all(error < EXACT for errors in found.values() for error in errors)


@pytest.mark.parametrize("case", ["rows", "packed"])
def test_the_last_cache_of_mixed_models_goes_on(results, case):
    assert results[-1][f"cache: {case}"]
    for result in results:
        assert all(error < 1e-6 for error in result[f"cache: {case}"])


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        *((case, ranks) for case in ("in float32", "from a cache") for ranks in (2, 4)),
        ("of eager attention", 4),
    ],
)
def test_logits_of_shared_rows(results, case, ranks):
    # Logits are rounded to float32, and the loss is computed from them: 6e-8 a rounding.
    for result in results:
        assert all(error < 1e-6 for error in result[f"logits: {case} {ranks}"])


def test_setting_the_group_of_a_model(alone):
    model = FracModel(make_model(num_hidden_layers=2).config)
    mixers = [module for module in model.modules() if isinstance(module, FracMixer)]
    assert len(mixers) == 2 and all(mixer.context_group is None for mixer in mixers)
    names = set(model.state_dict())
    model.set_context_group(alone)
    assert all(mixer.context_group is alone for mixer in mixers)
    assert set(model.state_dict()) == names
    model.set_context_group(None)
    assert all(mixer.context_group is None for mixer in mixers)


def test_what_needs_whole_rows_refuses_a_group(alone):
    """One rank would answer for its own slice of a row."""
    config = make_model(num_hidden_layers=1, pad_token_id=0).config
    model = FracForSequenceClassification(config)
    with pytest.raises(ValueError, match="group must be None: a classifier reads the end of a"):
        model.set_context_group(alone)
    model = make_model(torch.float32, mixer_types=["attention"], num_hidden_layers=1)
    model.set_context_group(alone)
    ids = torch.randint(3, 61, (1, 8))
    for cache in (FracStaticCache(model.config, 32), empty_cache(model, 1)):
        with pytest.raises(ValueError, match=f"while ranks share rows, got {type(cache).__name__}"):
            model(ids, past_key_values=cache)


def test_slices_of_labels_for_several_rows():
    """Slices of rows are not contiguous."""
    model = make_model(torch.float32, num_hidden_layers=1)
    ids = torch.randint(3, 61, (2, 32))
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)[:, :16]
    found = model(ids[:, :16], labels=shifted, shift_labels=shifted, num_items_in_batch=62).loss
    same = shifted.contiguous()
    assert found == model(ids[:, :16], labels=same, shift_labels=same, num_items_in_batch=62).loss


def test_errors_name_the_argument(alone):
    mixer, x = make_mixer(torch.float32), torch.randn(2, 6, E)
    _, state = mixer(x)
    mixer.context_group = alone
    with pytest.raises(ValueError, match="state must be None with a context_group"):
        mixer(x, state=state)
    with pytest.raises(ValueError, match="attention_mask must be None with a context_group"):
        mixer(x, attention_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match="x must hold at least kernel - 1 = 3 tokens, got 2"):
        mixer(x[:, :2])
    model = make_model(num_hidden_layers=1)
    ids = torch.ones(1, 6, dtype=torch.long)
    model.set_context_group(alone)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="set context_group to None to continue"):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
    mixed = make_kind("transformer", num_hidden_layers=1)
    mixed.set_context_group(alone)
    with torch.no_grad():
        cache = mixed(ids, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match=r"must be empty .* call set_context_group\(None\) to cont"
    ):
        mixed(ids[:, :1], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="attention_mask must be None with a context_group"):
        mixed(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    mixed.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="must be 'sdpa' or 'eager' with a context_group, got 'fl"):
        mixed(ids)
    # A mask without padding is no mask.
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits)
