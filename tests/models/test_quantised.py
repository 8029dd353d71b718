"""Weights quantised by torchao: computing, loading, saving, adapters, and refusals."""

import pytest
import torch
from torchao import quantization
from transformers import AutoModelForCausalLM, TorchAoConfig, Trainer, TrainingArguments

from flash_frac.doctor.checkpoint import examine_checkpoint
from flash_frac.inference import FracStream, Generator
from flash_frac.models import FracForCausalLM, quantizing, regrid
from flash_frac.models.loading import load_model
from flash_frac.train.arguments import ModelArguments
from flash_frac.train.run import build_model
from tests.errors import assert_as_good
from tests.models.conftest import make_model

SIZES = {"hidden_size": 64, "initializer_range": 0.05, "tie_word_embeddings": False}
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


def quantised(name, device, dtype, **layers):
    """A model with quantised projections, and two whose plain tensors hold the same weights."""
    models = [make_model(d, **SIZES, **layers).to(device) for d in (dtype, dtype, torch.float64)]
    quantization.quantize_(models[0], getattr(quantization, name)())
    linears = [x for x in models[0].model.layers.modules() if isinstance(x, torch.nn.Linear)]
    kinds = {type(linear.weight) for linear in linears}
    assert kinds.isdisjoint({torch.Tensor, torch.nn.Parameter})
    weights = models[0].state_dict()
    plain = {n: w.dequantize() if hasattr(w, "qdata") else w for n, w in weights.items()}
    for model in models[1:]:
        model.load_state_dict(plain)
    return models


@torch.no_grad()
def assert_decodes_like_its_weights(name, device, dtype, **layers):
    """Tokens one by one, as good as with the same weights in plain tensors."""
    models = quantised(name, device, dtype, **layers)
    ids, results = torch.randint(3, 61, (2, 24), device=device), []
    for model in models:
        cache = model(ids[:, :20], use_cache=True).past_key_values
        steps = [model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(20, 24)]
        results.append(torch.cat(steps, 1))
    assert_as_good(*results, name, dtype)
    expected = models[0].generate(ids, **OPTIONS)
    if layers:
        assert torch.equal(models[0].generate(ids, use_cache=False, **OPTIONS), expected)
        return
    assert torch.equal(Generator(models[0]).generate(ids, max_new_tokens=8), expected)
    stream = FracStream(models[0], batch_size=2).feed(ids).advance(2)
    assert stream.feed(ids[:, :1]).logits.isfinite().all()


def test_int8_weights_on_a_cpu():
    assert_decodes_like_its_weights("Int8WeightOnlyConfig", "cpu", torch.float32)


def test_int8_weights_of_a_mixed_model():
    types = ["delta", "attention", "sliding_attention"]
    layers = {"mixer_types": types, "sliding_window": 7, "mlp_intermediate_size": 96}
    assert_decodes_like_its_weights("Int8WeightOnlyConfig", "cpu", torch.float32, **layers)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_8_bits_on_a_gpu(name):
    assert_decodes_like_its_weights(name, "cuda", torch.bfloat16)


@pytest.fixture
def saved(tmp_path):
    model = make_model(torch.float32, hidden_size=64, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def kinds(model):
    """Names of the classes of weights, by the layer's name."""
    modules = model.model.layers[0].mixer.named_modules()
    return {n: type(x.weight).__name__ for n, x in modules if hasattr(x, "weight")}


QUANTISED = ("in_proj", "dyn_proj", "rw_proj", "out_proj")
CLASSES = {"int8": "Int8Tensor", "fp8": "Float8Tensor"}


@torch.no_grad()
@pytest.mark.parametrize("kind", CLASSES)
def test_a_quantised_checkpoint_is_loaded_and_saved(saved, tmp_path, kind):
    """By transformers' own argument and by our option; the head is that of the embeddings."""
    config = TorchAoConfig(getattr(quantization, quantizing.CONFIGS[kind])())
    model = FracForCausalLM.from_pretrained(saved, quantization_config=config)
    assert {n for n, x in kinds(model).items() if x == CLASSES[kind]} == set(QUANTISED)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert quantizing.is_quantized(model) and not quantizing.is_quantized(make_model())
    ids = torch.randint(3, 61, (2, 9))
    logits = model(ids).logits
    assert torch.equal(load_model(saved, quantize=kind)(ids).logits, logits)
    model.save_pretrained(tmp_path / "small")
    for loaded in (AutoModelForCausalLM.from_pretrained, load_model):
        again = loaded(tmp_path / "small")
        assert kinds(again) == kinds(model)
        assert torch.equal(again(ids).logits, logits)
    with pytest.raises(ValueError, match="small already has quantised weights; omit quantize"):
        load_model(tmp_path / "small", quantize=kind)


def test_the_doctor_names_the_dtypes_of_quantised_weights(saved, tmp_path):
    load_model(saved, quantize="int8").save_pretrained(tmp_path / "small")
    found = {x.name: x for x in examine_checkpoint(str(tmp_path / "small"))}
    assert found["weights"].status == "ok" and ", float32, int8, all" in found["weights"].found


def test_scales_that_are_not_finite_are_refused(saved, tmp_path):
    model = load_model(saved, quantize="int8")
    model.model.layers[0].mixer.rw_proj.weight.scale[3] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"NaN or inf: model.layers.0.mixer.rw_proj.weight"):
        load_model(tmp_path / "broken")


def test_kinds_that_are_not_there_are_refused(saved, monkeypatch):
    with pytest.raises(ValueError, match="quantize must be int8 or fp8, got 'int3'"):
        load_model(saved, quantize="int3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(ValueError, match=r"capability 8.9 or more, got 8.0; use int8"):
        quantizing.quantization_config("fp8")


def test_adapters_learn_on_top_of_quantised_weights(saved):
    peft = pytest.importorskip("peft")
    model = load_model(saved, quantize="int8")
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    ids = torch.randint(3, 61, (2, 9))
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    learned = [n for n, x in adapted.named_parameters() if x.grad is not None]
    assert learned and all("lora_" in n for n in learned)
    for name in QUANTISED:
        assert any(name in n for n in learned), name
    adapted.eval()
    cache = adapted(ids[:, :-1], use_cache=True).past_key_values
    step = adapted(ids[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(step, adapted(ids).logits[:, -1:], rtol=1e-3, atol=1e-3)


def test_quantised_weights_are_not_trained(saved, tmp_path):
    model = load_model(saved, quantize="int8")
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"small has quantised weights, which have no gradient"):
        build_model(ModelArguments(model_name_or_path=str(tmp_path / "small")), None)
    with pytest.raises(ValueError, match="purely quantized models"):
        Trainer(model, TrainingArguments(tmp_path, report_to=[]))


def test_the_bank_of_quantised_layers_is_not_changed(saved):
    with pytest.raises(ValueError, match="plain weight, got a quantised Int8Tensor"):
        regrid(load_model(saved, quantize="int8"), num_modes=4)
