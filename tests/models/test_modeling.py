"""FracModel and its heads: caching, padding, packing, training, saving, precision, compilation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DynamicCache

from flash_frac.layers import TIME_PARAMETERS
from flash_frac.models import FracCache, FracForCausalLM, FracForSequenceClassification, read_state
from tests.models.conftest import each_backend, make_model
from tests.models.hybrids import make_kind

close = torch.testing.assert_close


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1], [20], [39], [3, 4, 21]])
@each_backend
def test_continuing_from_a_cache_is_the_whole(model, ids, cuts):
    whole = model(ids, use_cache=True)
    cache, parts = None, []
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    close(torch.cat(parts, 1), whole.logits, check_dtype=False)
    assert cache.get_seq_length() == 40
    for layer in range(3):
        a, b = read_state(cache, layer), read_state(whole.past_key_values, layer)
        close(a.recurrent, b.recurrent)
        close(a.conv, b.conv)


@torch.no_grad()
def test_a_plain_dynamic_cache_serves(model, ids):
    cache = DynamicCache(config=model.config)
    first = model(ids[:, :30], past_key_values=cache, use_cache=True).logits
    second = model(ids[:, 30:], past_key_values=cache, use_cache=True).logits
    close(torch.cat([first, second], 1), model(ids).logits)


@torch.no_grad()
@each_backend
def test_padding_anywhere_is_no_padding(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :13], mask[1, 31:], mask[2, 9:17] = 0, 0, 0
    out = model(ids, attention_mask=mask, use_cache=True)
    for row in range(3):
        real = mask[row] == 1
        alone = model(ids[row : row + 1, real], use_cache=True)
        close(out.logits[row, real], alone.logits[0])
        for layer in range(3):
            a = read_state(out.past_key_values, layer).select([row])
            b = read_state(alone.past_key_values, layer)
            close(a.recurrent, b.recurrent)
            close(a.conv, b.conv)


@torch.no_grad()
@each_backend
def test_packed_documents(model, ids):
    """Packed prefill equals separate ones, and its cache decodes as a batch of documents."""
    ends = torch.tensor([0, 12, 13, 40])
    packed = model(ids[:1], cu_seqlens=ends, use_cache=True)
    token = torch.tensor([[7], [8], [9]])
    nexts = model(token, past_key_values=packed.past_key_values, use_cache=True).logits
    for n in range(3):
        part = ids[:1, ends[n] : ends[n + 1]]
        close(packed.logits[:, ends[n] : ends[n + 1]], model(part).logits)
        close(nexts[n], model(torch.cat([part, token[n : n + 1]], 1)).logits[0, -1:])


@each_backend
def test_gradients_through_a_cache(model, ids):
    """Two calls joined by a cache train like one."""
    weight = model.model.layers[0].mixer.in_proj.weight
    whole = torch.autograd.grad(model(ids).logits[:, 20:].sum(), weight)[0]
    cache = model(ids[:, :20], use_cache=True).past_key_values
    out = model(ids[:, 20:], past_key_values=cache, use_cache=True)
    close(torch.autograd.grad(out.logits.sum(), weight)[0], whole)


@torch.no_grad()
def test_inputs_embeds_and_logits_to_keep(model, ids):
    logits = model(ids).logits
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, logits)
    close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, logits[:, [0, 5]])


@torch.no_grad()
def test_hidden_states_and_tuples(model, ids):
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    close(out.hidden_states[0], model.get_input_embeddings()(ids))
    base = model.model(ids, return_dict=False)
    close(out.hidden_states[-1], base[0])
    logits, cache = model(ids, return_dict=False)
    close(logits, out.logits)
    assert isinstance(cache, FracCache)
    assert model(ids, use_cache=False).past_key_values is None


def test_loss_is_shifted_and_masked(model, ids):
    labels = ids.clone()
    labels[:, :10] = -100
    logits = model(ids).logits
    flat = torch.nn.functional.cross_entropy(logits[:, 9:-1].flatten(0, 1), ids[:, 10:].flatten())
    close(model(ids, labels=labels).loss, flat)
    total = model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    close(total, flat * labels[:, 1:].ne(-100).sum() / 7)


def test_gradient_checkpointing_refuses_a_cache(ids):
    """transformers would leave it out in silence."""
    model = make_model(num_hidden_layers=1)
    cache = model(ids[:, :10], use_cache=True).past_key_values
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="past_key_values must be None in training with gradient"):
        model(ids[:, 10:], past_key_values=cache)
    assert model.eval()(ids[:, 10:], past_key_values=cache).past_key_values is cache


def test_gradient_checkpointing_changes_nothing(ids):
    gradients = []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
        assert model(ids, use_cache=True).past_key_values is None or not checkpointing
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient)


def test_overfits_one_batch(ids):
    model = make_model(torch.float32, initializer_range=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(60):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, ids, tied):
    model = make_model(torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    saved = model.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in loaded.state_dict().items())
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("changes", [{}, {"frac_learned_timescales": True}])
def test_time_keeps_its_precision_on_disk(tmp_path, ids, changes):
    """In bfloat16, by .to() and by from_pretrained, saved and loaded again."""
    model = make_model(torch.float32, **changes)
    for block in model.model.layers:
        block.mixer.base_log_tau.data += 1e-4
    exact = {n: v.clone() for n, v in model.state_dict().items()}
    time = {n for n in exact if n.split(".")[-1] in TIME_PARAMETERS}
    assert len(time) == 3 * len(TIME_PARAMETERS)
    model.save_pretrained(tmp_path / "float32")
    narrow = FracForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    narrow.save_pretrained(tmp_path / "bfloat16")
    again = FracForCausalLM.from_pretrained(tmp_path / "bfloat16", dtype="auto")
    for other in (model.to(torch.bfloat16), narrow, again):
        for name, value in other.state_dict().items():
            if name in time:
                assert torch.equal(value, exact[name]), name
            else:
                assert value.dtype == torch.bfloat16, name
    cache = again(ids, use_cache=True).past_key_values
    state = read_state(cache, 0)
    assert state.recurrent.dtype == torch.float32 and state.conv.dtype == torch.bfloat16


def test_missing_tensors_are_initialised(tmp_path):
    """A checkpoint without some tensors gets fresh ones, and keeps the rest."""
    model = make_model(torch.float32)
    tensors = {n: v.clone() for n, v in model.state_dict().items() if n != "lm_head.weight"}
    for name in ("base_log_tau", "dt_bias", "D"):
        del tensors[f"model.layers.1.mixer.{name}"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    loaded = FracForCausalLM.from_pretrained(tmp_path)
    mixer = loaded.model.layers[1].mixer
    close(mixer.base_log_tau, torch.tensor(mixer.log_tau_init))
    assert (mixer.dt_bias == 0).all() and (mixer.D == 0).all()
    for name, value in tensors.items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_meta_device():
    with torch.device("meta"):
        model = FracForCausalLM(make_model().config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.num_parameters() == make_model().num_parameters()


def test_initialisation():
    model = FracForCausalLM(make_model(initializer_range=0.02, frac_residual_read_init=-1.0).config)
    mixer = model.model.layers[0].mixer
    assert mixer.read_residual_logit.item() == -1
    close(mixer.write_residual_scale.sigmoid(), torch.tensor([0.25]))
    assert (mixer.D == 0).all() and (mixer.dt_bias == 0).all() and (mixer.dyn_proj.bias == 0).all()
    assert (mixer.out_norm.weight == 1).all() and (mixer.conv1d.bias == 0).all()
    for weight in (mixer.in_proj.weight, mixer.conv1d.weight, mixer.rw_proj.weight):
        assert 0.015 < weight.std() < 0.025
    close(mixer.base_log_tau[[0, -1]].exp(), torch.tensor([1.0, 65536.0]))


def test_sequence_classification(tmp_path, ids):
    model = make_model(torch.float32, FracForSequenceClassification, num_labels=4)
    out = model(ids, labels=torch.tensor([0, 3, 1]))
    assert out.logits.shape == (3, 4)
    out.loss.backward()
    assert model.score.weight.grad.abs().max() > 0
    padded = torch.cat([ids, torch.zeros(3, 5, dtype=torch.long)], 1)
    mask = (padded != 0).long()
    close(model(padded, attention_mask=mask).logits, out.logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, out.logits)


def test_resize_embeddings(model, ids):
    before = model(ids).logits
    model.resize_token_embeddings(70)
    after = model(ids).logits
    assert after.shape[-1] == 70
    close(after[..., :61], before)


@pytest.mark.slow
@torch.no_grad()
def test_forward_compiles_without_graph_breaks(ids):
    """With its cache, which then decodes."""
    model = make_model(torch.float32, num_hidden_layers=1)
    out = torch.compile(model, fullgraph=True)(ids)
    close(out.logits, model(ids).logits)
    following = model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
    close(following.logits, model(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:])


def test_training_step_compiles_without_graph_breaks(ids):
    model = make_model(torch.float32, num_hidden_layers=1).train()
    torch.compile(lambda ids: model(ids, labels=ids).loss, fullgraph=True)(ids).backward()
    compiled = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        close(compiled[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (lambda ids, e: {}, "exactly one of input_ids and inputs_embeds .* neither"),
        (lambda ids, e: {"input_ids": ids, "inputs_embeds": e}, "exactly one of .* got both"),
        (lambda ids, e: {"input_ids": ids[0]}, r"input_ids must have shape \(B, T\), got \(40,\)"),
        (lambda ids, e: {"input_ids": ids[:0]}, r"input_ids must hold at least one token"),
        (lambda ids, e: {"input_ids": ids[:, :0]}, r"at least one token, got shape \(3, 0\)"),
        (
            lambda ids, e: {"inputs_embeds": e[..., :3]},
            r"inputs_embeds must have shape \(B, T, 16\)",
        ),
        (lambda ids, e: {"input_ids": ids + 21}, r"input_ids must be in \[0, 61\)"),
        (
            lambda ids, e: {"input_ids": ids * 0 + 99},
            r"\), got ids from 99 to 99; the vocab",
        ),
        (lambda ids, e: {"input_ids": ids - 99}, r"input_ids must be in \[0, 61\)"),
        (lambda ids, e: {"input_ids": ids.float()}, r"int64 or torch.int32, got torch.float32"),
        (
            lambda ids, e: {"input_ids": ids, "labels": ids[:, 1:]},
            r"labels must be integers of shape \(3, 40\), .* got torch.int64 of shape \(3, 39\)",
        ),
        (
            lambda ids, e: {"inputs_embeds": e, "labels": ids.float()},
            r"labels must be integers of shape \(3, 40\), .* got torch.float32",
        ),
        (
            lambda ids, e: {"input_ids": ids, "labels": ids + 61},
            r"labels must be in \[0, 61\), the vocabulary, or -100",
        ),
        (
            lambda ids, e: {"input_ids": ids, "labels": 0 * ids - 100, "ignore_index": -1},
            r"or -1 where there is nothing to predict, got labels from -100 to -100",
        ),
        (
            lambda ids, e: {"input_ids": ids, "attention_mask": torch.full((3, 40), -1.0)},
            r"attention_mask must be 1 at tokens and 0 at padding, got values from -1 to -1",
        ),
        (
            lambda ids, e: {"input_ids": ids, "position_ids": torch.arange(5)[None]},
            r"position_ids must have shape .* B = 3 and T = 40, got \(1, 5\)",
        ),
        (
            lambda ids, e: {"input_ids": ids, "past_key_values": ((e, e),)},
            r"past_key_values must be a FracCache, got tuple; use the past_key_values that",
        ),
        (
            lambda ids, e: {"input_ids": ids, "past_key_values": DynamicCache()},
            r"must have the layers of this model, got a DynamicCache with others",
        ),
        (
            lambda ids, e: {
                "input_ids": ids,
                "past_key_values": FracCache(make_kind("all").config),
            },
            r"must have the layers of this model, got a FracCache with others",
        ),
        (
            lambda ids, e: {"input_ids": ids, "elapsed": torch.full((3, 40), -2.0)},
            r"elapsed must be at least 0, got -2",
        ),
        (
            lambda ids, e: {"input_ids": ids, "attention_mask": ids[:, :9]},
            r"attention_mask must have shape \(3, 40\), got \(3, 9\)",
        ),
        (
            lambda ids, e: {"input_ids": ids, "attention_mask": ids[:, None, None]},
            r"attention_mask must have shape \(3, 40\), got \(3, 1, 1, 40\)",
        ),
        (
            lambda ids, e: {"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 39])},
            "cu_seqlens must rise from 0 to T = 40",
        ),
        (
            lambda ids, e: {"input_ids": ids, "cu_seqlens": torch.tensor([0, 40])},
            "cu_seqlens needs one packed row, a batch of 1, got a batch of 3",
        ),
    ],
)
def test_wrong_inputs(model, ids, arguments, match):
    with pytest.raises(ValueError, match=match):
        model(**arguments(ids, model.get_input_embeddings()(ids)))


def test_wrong_mask_beside_a_cache(model, ids):
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"or, with earlier tokens, \(3, past \+ 40\)"):
        model(ids, past_key_values=cache, attention_mask=torch.ones(3, 7))
