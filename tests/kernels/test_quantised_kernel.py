"""Models quantised by torchao, decoded by kernels that read their weights."""

import pytest
import torch
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    PerTensor,
    quantize_,
)

from flash_frac.layers.plain import stored
from tests.errors import assert_as_good
from tests.kernels.devices import DEVICE, DTYPES
from tests.kernels.launches import watch
from tests.models.conftest import make_model, on_backend

KINDS = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}
# A model, and how often a token launches the kernels for one matrix and for those of SwiGLU.
MODELS = {
    "frac": ({}, 4, 0),
    "delta": ({"mixer_types": ["delta"], "mlp_intermediate_size": 24}, 8, 1),
    "attention": ({"mixer_types": ["attention"]}, 4, 0),
}


def build(dtype, **changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "frac_num_modes": 4}
    model = make_model(torch.float64, **sizes, tie_word_embeddings=False, **changes)
    return model.to(DEVICE, dtype)


def dequantised(model, dtype, changes):
    """The same weights in plain tensors, computed by torch."""
    weights = model.state_dict()
    for name, x in weights.items():
        if hasattr(x, "qdata"):
            weights[name] = x.qdata.double() * x.scale.double()
    other = on_backend(build(dtype, **changes), "torch")
    other.load_state_dict(weights)
    return other


def decode(model, ids, backend):
    """Logits after the last of the tokens; those before it take torch's form, which is quicker."""
    cache = on_backend(model, "torch")(ids[:, :-1], use_cache=True).past_key_values
    return on_backend(model, backend)(ids[:, -1:], past_key_values=cache).logits


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "kind"), [*((x, "int8") for x in MODELS), ("frac", "fp8")])
def test_decoding(monkeypatch, name, kind, dtype):
    """As good as with the same weights in plain tensors; the head's are quantised too."""
    changes, num_products, num_gated = MODELS[name]
    model = build(dtype, **changes)
    others = [x for x in model.modules() if isinstance(x, nn.Linear)]
    quantize_(model, KINDS[kind]())
    assert all(stored(x.weight).scale is not None for x in others)
    ids = torch.randint(3, 61, (2, 5), device=DEVICE)
    launched = []
    with monkeypatch.context() as patch:
        watch(patch, launched.append)
        got = decode(model, ids, "triton")
    # One more for the head.
    assert launched.count("gemv_kernel") == num_products + 1
    assert launched.count("swiglu_gemv_kernel") == num_gated
    usual, exact = (dequantised(model, x, changes) for x in (dtype, torch.float64))
    results = [decode(x, ids, "torch") for x in (usual, exact)]
    assert_as_good(got, *results, name, dtype)


@torch.no_grad()
def test_a_quantised_model_that_is_cast_is_still_read(monkeypatch):
    """torchao leaves the dtype of a weight as it was when the rest of the model is cast."""
    model = build(torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig())
    model.float()
    assert model.model.layers[0].mixer.in_proj.weight.dtype == torch.bfloat16
    launched = []
    watch(monkeypatch, launched.append)
    decode(model, torch.randint(3, 61, (1, 3), device=DEVICE), "triton")
    assert launched.count("gemv_kernel") == 5


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        Int8WeightOnlyConfig(granularity=PerGroup(8)),
        Int8WeightOnlyConfig(granularity=PerTensor()),
        Int8DynamicActivationInt8WeightConfig(),
    ],
    ids=["groups", "one scale", "inputs too"],
)
def test_other_layouts_are_left_to_torchao(monkeypatch, config):
    model = build(torch.float32)
    quantize_(model, config)
    assert stored(model.model.layers[0].mixer.in_proj.weight) is None
    ids, launched = torch.randint(3, 61, (1, 3), device=DEVICE), []
    watch(monkeypatch, launched.append)
    got = decode(model, ids, "triton")
    assert "gemv_kernel" not in launched
    expected = on_backend(model, "torch")(ids).logits[:, -1:]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_fp8_needs_a_card_that_has_it(monkeypatch):
    layer = nn.Linear(8, 4)
    quantize_(layer, Float8WeightOnlyConfig())
    assert stored(layer.weight).values.dtype is torch.float8_e4m3fn
    monkeypatch.setattr("flash_frac.layers.plain._converts", lambda values: False)
    assert stored(layer.weight) is None
