"""Hybrid models: attention layers between Frac layers, in inference, training and saving."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from flash_frac.models import (
    FracCache,
    FracConfig,
    FracForCausalLM,
    FracForSequenceClassification,
    regrid,
)
from flash_frac.ops.testing import relative_error
from tests.models.conftest import SIZES, make_model
from tests.models.hybrids import (
    KINDS,
    LAYERS,
    OPTIONS,
    close,
    greedy_by_hand,
    make_hybrid,
    make_kind,
    padded,
)

each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def model():
    return make_hybrid()


def test_layers(model):
    assert model.config.layer_types == [
        *("linear_attention", "full_attention", "linear_attention", "full_attention"),
    ]
    kinds = [type(block).__name__ for block in model.model.layers]
    assert kinds == ["FracBlock", "AttentionBlock"] * 2
    cache = FracCache(model.config)
    assert cache.state_layers == [0, 2] and cache.attention_layers == [1, 3]


@pytest.mark.parametrize("layers", [None, []])
def test_without_attention_nothing_changes(ids, layers, tmp_path):
    plain, same = make_model(), make_model(attention_layers=layers)
    assert plain.state_dict().keys() == same.state_dict().keys()
    assert torch.equal(plain(ids).logits, same(ids).logits)
    # A file written before there were such fields.
    saved = json.loads(same.config.to_json_string())
    old = {key: x for key, x in saved.items() if not key.startswith("attention_")}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert FracConfig.from_pretrained(tmp_path).layer_types == ["linear_attention"] * 3


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("cuts", [[1], [20], [3, 4, 21], list(range(1, 40))])
def test_continuing_from_a_cache_is_the_whole(ids, kind, cuts):
    model = make_kind(kind)
    whole, cache, parts = model(ids).logits, None, []
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        assert cache.get_seq_length() == end
        parts.append(out.logits)
    close(torch.cat(parts, 1), whole)


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_anywhere_is_no_padding(ids, kind, implementation):
    """In float32, as near to float64 as without padding.

    Hugging Face's eager softmax makes NaN of a mask in float64.
    """
    model, exact = make_kind(kind, torch.float32), make_kind(kind)
    model.set_attn_implementation(implementation)
    mask = padded(ids)
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row in range(3):
        real = mask[row] == 1
        part = ids[row : row + 1, real]
        expected = exact(part).logits[0]
        plain = relative_error(model(part).logits[0], expected)
        assert relative_error(logits[row, real], expected) <= 2 * (plain + 2**-24)


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("whole_mask", [True, False])
def test_padding_and_a_cache(ids, kind, whole_mask):
    """Given in pieces, the mask may be that of the piece or of all tokens so far."""
    model = make_kind(kind)
    mask, cache, parts = padded(ids), None, []
    for start, end in ((0, 11), (11, 12), (12, 33), (33, 40)):
        part = mask[:, 0 if whole_mask else start : end]
        out = model(ids[:, start:end], attention_mask=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    logits = torch.cat(parts, 1)
    for row in range(3):
        real = mask[row] == 1
        close(logits[row, real], model(ids[row : row + 1, real]).logits[0])


@torch.no_grad()
@each_kind
def test_padding_that_begins_late(ids, kind):
    """First none, then tokens one by one with some: positions go on from all tokens before."""
    model, mask = make_kind(kind), torch.ones_like(ids)
    mask[1, 16:18], mask[2, 30] = 0, 0
    out = model(ids[:, :15], use_cache=True)
    parts, cache = [out.logits], out.past_key_values
    for n in range(15, 40):
        part = mask[:, n : n + 1]
        out = model(ids[:, n : n + 1], attention_mask=part, past_key_values=cache, use_cache=True)
        parts.append(out.logits)
    logits = torch.cat(parts, 1)
    for row in range(3):
        real = mask[row] == 1
        close(logits[row, real], model(ids[row : row + 1, real]).logits[0])


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_documents(ids, kind, implementation):
    """Packed equals separate, and the cache decodes as a batch of documents."""
    model = make_kind(kind)
    model.set_attn_implementation(implementation)
    ends = torch.tensor([0, 12, 13, 40], dtype=torch.int32)
    packed = model(ids[:1], cu_seqlens=ends, use_cache=True)
    close(model(ids[:1], cu_seqlens=ends, use_cache=False).logits, packed.logits)
    tokens, cache, nexts = torch.tensor([[7, 3], [8, 4], [9, 5]]), packed.past_key_values, []
    assert cache.get_seq_length() == (27 if cache.attention_layers else 40)
    for token in tokens.split(1, 1):
        nexts.append(model(token, past_key_values=cache, use_cache=True).logits)
    for n in range(3):
        part = ids[:1, ends[n] : ends[n + 1]]
        close(packed.logits[:, ends[n] : ends[n + 1]], model(part).logits)
        alone = model(torch.cat([part, tokens[n : n + 1]], 1)).logits[0, -2:]
        close(torch.cat(nexts, 1)[n], alone)


@each_kind
def test_packed_training_is_that_of_separate_documents(ids, kind):
    model, ends = make_kind(kind).train(), [0, 12, 13, 40]
    model(ids[:1], cu_seqlens=torch.tensor(ends)).logits.square().sum().backward()
    packed = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    for start, end in pairwise(ends):
        model(ids[:1, start:end]).logits.square().sum().backward()
    for name, x in model.named_parameters():
        bound = 1e-5 * x.grad.abs().max().item()
        torch.testing.assert_close(packed[name], x.grad, rtol=1e-5, atol=bound)


def test_attention_sees_an_early_token():
    """A Frac layer forgets it as a power law; attention gives it the share of any other token."""
    ids, gradients = torch.randint(3, 61, (1, 2000)), []
    for layers in ([1], None):
        model = make_model(
            num_hidden_layers=2, attention_layers=layers, frac_tau_max=8.0, frac_conv_kernel=1
        )
        embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(inputs_embeds=embeds).logits[0, -1].square().sum().backward()
        norms = embeds.grad[0].norm(dim=-1)
        gradients.append((norms[:100].mean() / norms[-100:].mean()).item())
    assert gradients[0] > 0.01 and gradients[1] < 1e-6


@torch.no_grad()
def test_positions_matter(model, ids):
    """By itself, attention is blind to order; rotary positions are not."""
    base, other = model.model, make_hybrid(attention_rope_parameters={"rope_theta": 10.0})
    assert base.rotary_emb.inv_freq.tolist() != other.model.rotary_emb.inv_freq.tolist()
    assert (base(ids)[0] - other.model(ids)[0]).abs().max() > 1e-3
    assert base.to(torch.bfloat16).rotary_emb.inv_freq.dtype == torch.float64


def test_save_and_load(tmp_path, ids):
    options = {"attention_head_dim": 6, "attention_intermediate_size": 40, "attention_bias": True}
    model = make_hybrid(torch.float32, attention_rope_parameters={"rope_theta": 500.0}, **options)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.attention_layers == [1, 3]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    shapes = {name.split("layers.1.")[-1]: x.shape for name, x in loaded.state_dict().items()}
    assert shapes["self_attn.q_proj.weight"] == (12, 16)
    assert shapes["self_attn.k_proj.bias"] == (6,)
    assert shapes["mlp.up_proj.weight"] == (40, 16)


def test_low_precision(tmp_path, ids):
    make_hybrid(torch.float32).save_pretrained(tmp_path)
    model = FracForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.model.layers[1].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.generate(ids, **OPTIONS).shape == (3, 52)


@each_kind
def test_gradient_checkpointing_changes_nothing(ids, kind):
    gradients = []
    for checkpointing in (False, True):
        model = make_kind(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids, attention_mask=padded(ids)).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_a_cache_are_chosen_and_repeated(ids, kind):
    """With padding, whose places the cache remembers."""
    model, mask = make_kind(kind), padded(ids)
    cache = FracCache(model.config)
    cache.batch_repeat_interleave(2)
    model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    order = torch.arange(2 * len(ids)).flip(0)
    cache.batch_select_indices(order)
    rows = order // 2
    whole, real = model(ids[rows], attention_mask=mask[rows]).logits[:, 20:], mask[rows, 20:] != 0
    got = model(ids[rows, 20:], attention_mask=mask[rows, 20:], past_key_values=cache).logits
    close(got[real], whole[real])


def test_the_cache_of_full_attention_does_not_fit_a_sliding_one(ids):
    """Both have attention at the same layers."""
    full, sliding = make_kind("no positions"), make_kind("sliding")
    with pytest.raises(ValueError, match="must have the layers of this model, got a FracCache"):
        sliding(ids, past_key_values=FracCache(full.config))


@pytest.mark.parametrize("kind", ["transformer", "sliding"])
def test_the_cache_of_another_batch_does_not_fit(kind, ids):
    model = make_kind(kind)
    cache = model(ids[:2], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="from another model or batch"):
        model(ids[:1], past_key_values=cache)


def test_the_cache_of_another_window_does_not_fit(ids):
    """It would keep other tokens than the mask expects."""
    narrow, wide = make_kind("sliding"), make_kind("sliding", sliding_window=9)
    assert narrow.config.sliding_window != 9
    cache = narrow(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"must have the sliding_window of this model \(9\)"):
        wide(ids, past_key_values=cache)


def test_gradients_through_a_cache(model, ids):
    weight = model.model.layers[1].self_attn.k_proj.weight
    whole = torch.autograd.grad(model(ids).logits[:, 20:].sum(), weight)[0]
    cache = model(ids[:, :20], use_cache=True).past_key_values
    out = model(ids[:, 20:], past_key_values=cache, use_cache=True)
    parts = torch.autograd.grad(out.logits.sum(), weight)[0]
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5 * whole.abs().max().item())


def test_overfits_one_batch(ids):
    model = make_hybrid(torch.float32, initializer_range=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


@torch.no_grad()
@each_kind
def test_hidden_states_and_classification(kind, ids):
    model = make_kind(kind)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 5
    close(out.hidden_states[-1], model.model(ids)[0])
    judge = make_kind(kind, model_class=FracForSequenceClassification, num_labels=4)
    longer = torch.cat([ids, torch.zeros(3, 5, dtype=torch.long)], 1)
    close(judge(longer, attention_mask=(longer != 0).long()).logits, judge(ids).logits)


def test_initialisation():
    model = FracForCausalLM(make_hybrid(initializer_range=0.02).config)
    block = model.model.layers[1]
    for weight in (block.self_attn.q_proj.weight, block.mlp.up_proj.weight):
        assert 0.015 < weight.std() < 0.025
    assert (block.self_attn.q_norm.weight == 1).all() and (block.input_layernorm.weight == 1).all()


@torch.no_grad()
def test_forward_compiles_once_for_all_lengths(ids):
    """Without graph breaks, and with nothing that changes from one call to the next."""
    model = make_kind("all")
    # What is made of the graph is tested with the operators, and takes seconds a layer.
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    close(compiled(ids, use_cache=False).logits, model(ids).logits)
    shorter = ids[:, :29].clone()
    with torch.compiler.set_stance("fail_on_recompile"):
        close(compiled(shorter, use_cache=False).logits, model(shorter).logits)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attention_layers": [4]}, r"attention_layers must be .* from 0 to 3, .* got \[4\]"),
        ({"attention_layers": [-1]}, r"attention_layers must be .* got \[-1\]"),
        ({"attention_layers": [1, 1]}, r"different whole numbers .* got \[1, 1\]"),
        ({"attention_layers": [True]}, r"attention_layers must be .* got \[True\]"),
        ({"attention_layers": [1.0]}, r"attention_layers must be .* got \[1.0\]"),
        ({"attention_layers": 1}, "attention_layers must be a list"),
        ({"attention_layers": "1"}, "attention_layers must be a list"),
        ({"attention_head_dim": 7}, "attention_head_dim must be even"),
        ({"attention_head_dim": 0}, "attention_head_dim must be at least 1, got 0"),
        ({"num_attention_heads": 3, "frac_expand": 3.0}, "attention_head_dim must be given"),
        ({"attention_key_value_heads": 3}, "must divide num_attention_heads"),
        (
            {"attention_intermediate_size": True},
            "attention_intermediate_size must be a whole number or None, got True",
        ),
    ],
)
def test_wrong_configurations(changes, match):
    with pytest.raises(ValueError, match=match):
        FracConfig(**{**SIZES, **LAYERS, **changes})


def test_layers_are_sorted():
    assert FracConfig(num_hidden_layers=4, attention_layers=(3, 1)).attention_layers == [1, 3]


def test_what_hybrids_cannot_do(model, ids):
    with pytest.raises(ValueError, match=r"must be a FracCache, .* got DynamicCache"):
        model(ids, past_key_values=DynamicCache(config=model.config), use_cache=True)
    ends = torch.tensor([0, 20, 40])
    with pytest.raises(ValueError, match="attention_mask with cu_seqlens is not supported"):
        model(ids[:1], cu_seqlens=ends, attention_mask=padded(ids)[:1])
    cache = model(ids[:1], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cu_seqlens cannot continue from a cache"):
        model(ids[:1], cu_seqlens=ends, past_key_values=cache)


@each_kind
def test_models_name_the_blocks_that_they_have_to_fsdp(kind):
    """FSDP refuses to wrap a class that the model does not have."""
    model = make_kind(kind)
    kinds = {type(layer).__name__ for layer in model.model.layers}
    assert set(model._no_split_modules) == set(model.model._no_split_modules) == kinds


@each_kind
def test_regrid_changes_frac_layers_only(ids, kind):
    model = make_kind(kind)
    if "frac" not in model.config.mixer_types:
        with pytest.raises(
            ValueError, match=r"must have a layer of type frac, .* got mixer_types="
        ):
            regrid(model, num_modes=9)
        return
    longer = regrid(model, tau_max=2.0**17, num_modes=9)
    types = dict(enumerate(model.config.mixer_types))
    frac = [n for n, name in types.items() if name == "frac"]
    assert len(longer.layers) == len(frac) and longer.numbers == frac
    assert longer.unchanged == {n: types[n] for n in types if n not in frac}
    *_, last = str(longer).splitlines()[2:]
    rest = ", ".join(f"{n} {name}" for n, name in longer.unchanged.items())
    assert last == f"unchanged, without a bank: {rest}" if rest else last.startswith("    3  ")
    for n, old in enumerate(model.model.layers):
        new = longer.model.model.layers[n].state_dict()
        assert old.state_dict().keys() == new.keys()
        same = [torch.equal(new[name], x) for name, x in old.state_dict().items()]
        assert all(same) == (n not in frac)
    assert longer.model(ids).logits.isfinite().all()


def test_the_document_runs():
    document = Path(__file__).parents[2] / "docs" / "mixed.md"
    (block,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(block, "docs/mixed.md", "exec"), names)
    assert torch.equal(names["text"], greedy_by_hand(names["model"], names["prompt"], 20))
