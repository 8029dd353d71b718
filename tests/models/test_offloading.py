"""Weights on other devices: accelerate's offloading, and layers on two devices, through hooks."""

import copy

import accelerate
import pytest
import torch

from flash_frac.inference import FracStream, Generator
from flash_frac.models import FracForCausalLM
from flash_frac.ops.testing import relative_error
from tests.models.conftest import make_model
from tests.models.hybrids import KINDS, OPTIONS, make_kind

CPU = torch.device("cpu")


@pytest.fixture(params=["frac", *KINDS])
def model(request):
    kind = request.param
    return make_model(torch.float32) if kind == "frac" else make_kind(kind, torch.float32)


def assert_same(model, other, ids):
    assert any(parameter.device.type == "meta" for parameter in other.parameters())
    with torch.no_grad():
        found, expected = other(ids).logits, model(ids).logits
        if "delta" in model.config.mixer_types:
            # Projections that are watched are not joined to one product.
            exact = copy.deepcopy(model).double()(ids).logits
            bound = 2 * (relative_error(expected, exact) + 2**-24)
            assert relative_error(found, exact) <= bound
        else:
            assert torch.equal(found, expected)
    assert torch.equal(other.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))


def test_cpu_offload(model, ids):
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    accelerate.cpu_offload(other, execution_device=CPU, offload_buffers=True)
    assert_same(model, other, ids)


@pytest.mark.parametrize("on_disk", ["all", "some"])
def test_device_map_with_offloading_to_disk(model, ids, tmp_path, on_disk):
    model.save_pretrained(tmp_path / "model")
    parts = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    layers = {f"model.layers.{n}": ("cpu", "disk")[n % 2] for n in range(len(model.model.layers))}
    devices = {"": "disk"} if on_disk == "all" else {**parts, **layers, "lm_head": "cpu"}
    other = FracForCausalLM.from_pretrained(
        tmp_path / "model", device_map=devices, offload_folder=tmp_path / "disk"
    )
    assert_same(model, other, ids)


def test_inference_refuses_weights_that_are_elsewhere(ids):
    """It keeps its buffers where the weights are, and records their addresses."""
    model = make_model(torch.float32)
    accelerate.cpu_offload(model, execution_device=CPU)
    for build in (Generator, FracStream):
        with pytest.raises(ValueError, match=r"model must not be offloaded .* model\.generate"):
            build(model)


def test_the_fused_loss_calls_a_head_that_is_elsewhere(ids):
    model = make_model(torch.float32, fuse_linear_cross_entropy=True).train()
    expected = model(ids, labels=ids)
    assert expected.logits is None
    accelerate.cpu_offload(model, execution_device=CPU)
    torch.testing.assert_close(model(ids, labels=ids).loss, expected.loss)
