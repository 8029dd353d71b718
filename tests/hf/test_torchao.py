"""torchao: weights of integers or of 8-bit floats are never read as if they were plain ones."""

import pytest
import torch

from flash_frac.inference import FracStream, Generator
from tests.errors import assert_as_good
from tests.models.conftest import make_model

quantization = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.hf
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
