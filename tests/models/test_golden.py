"""The published code's results on a small random model, in float32 (tests/data/official_a.*).

Both sides round in float32. Theirs takes 1 - exp(-x) and log(exp(-x)). Both build decays from
differences of running sums that grow by up to 13.8 per token inside a chunk of C, so an exponential
has an error of about 2^-24 * 13.8 * C, at worst 3e-5. Against this code in float64, the error of
their gradients is up to 1.0e-4 for one gate and 1.2e-5 elsewhere, of ours 2.1e-5 and 1.1e-5. BOUNDS
are the measured relative differences between the two; a test fails at three times the bound.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from flash_frac.models import FracConfig, FracForCausalLM, read_state
from flash_frac.ops.testing import relative_error

DATA = Path(__file__).parents[1] / "data"
BOUNDS = {
    "logits": 7.6e-7,
    "hidden": 8.2e-7,
    "conv_state": 3.6e-7,
    "state": 1.2e-6,
    "loss": 1.2e-7,
    "decode_logits": 5.2e-7,
    "grad": 1.5e-5,
    # A scalar that is the small difference of large terms.
    "grad.model.layers.1.mixer.read_residual_logit": 8.3e-5,
}


@pytest.fixture(scope="module")
def expected():
    return load_file(DATA / "official_a.expected.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Their checkpoint as it would lie on disk, through the Auto classes."""
    folder = tmp_path_factory.mktemp("official")
    shutil.copy(DATA / "official_a.config.json", folder / "config.json")
    shutil.copy(DATA / "official_a.weights.safetensors", folder / "model.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is FracForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.fixture(scope="module")
def outputs(model, expected):
    mask = expected["attention_mask"]
    labels = expected["input_ids"].masked_fill(mask == 0, -100)
    model.zero_grad()
    out = model(
        expected["input_ids"],
        attention_mask=mask,
        labels=labels,
        output_hidden_states=True,
        use_cache=True,
    )
    out.loss.backward()
    return out


def check(name, value, expected):
    bound = BOUNDS.get(name, BOUNDS[name.split(".")[0]])
    error = relative_error(value, expected[name])
    assert error <= 3 * bound, f"{name}: {error:.1e} > 3 * {bound:.1e}"


def test_config_is_read_in_full():
    values = json.loads((DATA / "official_a.config.json").read_text())
    config = AutoConfig.for_model(**values)
    assert type(config) is FracConfig
    assert {key: getattr(config, key) for key in values} == values


def test_logits_and_loss(outputs, expected):
    check("logits", outputs.logits, expected)
    check("loss", outputs.loss[None], expected)


def test_hidden_states(outputs, expected):
    assert len(outputs.hidden_states) == 3
    for n, hidden in enumerate(outputs.hidden_states):
        check(f"hidden.{n}", hidden, expected)


def test_states(outputs, expected):
    for layer in range(2):
        state = read_state(outputs.past_key_values, layer)
        check(f"state.{layer}", state.recurrent, expected)
        check(f"conv_state.{layer}", state.conv, expected)


def test_every_gradient(model, outputs, expected):
    parameters = dict(model.named_parameters())
    names = [name for name in expected if name.startswith("grad.")]
    assert {name.removeprefix("grad.") for name in names} == set(parameters)
    for name in names:
        check(name, parameters[name.removeprefix("grad.")].grad, expected)


@torch.no_grad()
def test_decode(model, expected):
    cache = model(
        expected["input_ids"], attention_mask=expected["attention_mask"], use_cache=True
    ).past_key_values
    steps = [
        model(token[:, None], past_key_values=cache, use_cache=True).logits
        for token in expected["decode_ids"].T
    ]
    check("decode_logits", torch.cat(steps, 1), expected)


def test_greedy(model, expected):
    prompt = expected["greedy"][:, :16]
    got = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert torch.equal(got, expected["greedy"])
