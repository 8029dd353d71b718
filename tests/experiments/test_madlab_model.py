"""Shapes, sizes and initialisation of MADLab's models; its protocol."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from experiments.language_model import num_parameters
from experiments.madlab.model import (
    DESIGNS,
    AutoEncoder,
    linears,
    make_model,
    position_table,
    swiglu_size,
)
from experiments.madlab.settings import PRESETS, Protocol
from experiments.madlab.tasks import TASKS

RECALL, COMPRESSION = TASKS["in-context-recall"], TASKS["compression"]


@pytest.mark.parametrize("task", [RECALL, COMPRESSION], ids=["recall", "compression"])
@pytest.mark.parametrize("name", DESIGNS)
def test_shapes_and_gradients(name, task):
    model = make_model(name, task, seed=0)
    tokens = torch.randint(task.vocab_size, (2, task.seq_len))
    logits = model(tokens)
    assert logits.shape == (2, task.seq_len, task.vocab_size)
    logits.square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    unused = [n for n, p in model.named_parameters() if p.grad is None]
    assert not unused


@pytest.mark.parametrize("name", DESIGNS)
def test_all_models_are_of_one_size(name):
    """About half a million parameters, at most a tenth more or less."""
    assert num_parameters(make_model(name, RECALL, seed=0)) == pytest.approx(5e5, rel=0.1)


def test_a_mixed_model_has_a_layer_of_each():
    blocks = make_model("frac_delta", RECALL, seed=0).blocks
    assert [type(block.mixer).__name__ for block in blocks] == ["Frac", "GatedDeltaNet"]


def test_sizes_of_the_parts():
    model = make_model("frac", RECALL, seed=0)
    assert swiglu_size(128) == 352
    assert num_parameters(model.blocks[0].swiglu) == 135_168
    assert num_parameters(model.head) == 128 * 16 + 16
    assert num_parameters(model) == 505_924
    mixer = model.blocks[0].mixer
    assert (mixer.num_heads, mixer.head_dim, mixer.num_modes) == (6, 32, 16)
    assert mixer.base_log_tau[[0, -1]].exp().tolist() == pytest.approx([1, 2**17])
    assert model.blocks[0].mixer_norm.eps == model.out_norm.eps == 1e-5


@pytest.mark.parametrize("name", DESIGNS)
def test_language_model_is_causal(name):
    model = make_model(name, RECALL, seed=0).eval()
    tokens = torch.randint(16, (1, 40))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 16
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def standard_deviation(weight):
    """Of a weight, and the spread that its estimate has."""
    return weight.std().item(), weight.std().item() / math.sqrt(2 * weight.numel())


@pytest.mark.parametrize("name", DESIGNS)
def test_start_of_the_language_model(name):
    model = make_model(name, RECALL, seed=0)
    deviation, spread = standard_deviation(model.embed.weight)
    assert deviation == pytest.approx(0.02, abs=5 * spread)
    assert all((linear.bias == 0).all() for linear in linears(model) if linear.bias is not None)
    # Linear layers keep torch's own start, uniform up to 1 / sqrt(inputs).
    deviation, spread = standard_deviation(model.blocks[0].swiglu.gate.weight)
    assert deviation == pytest.approx(1 / math.sqrt(3 * 128), abs=5 * spread)


@pytest.mark.parametrize("name", DESIGNS)
def test_start_of_the_autoencoder(name):
    model = make_model(name, COMPRESSION, seed=0)
    assert isinstance(model, AutoEncoder)
    for linear in linears(model):
        deviation, spread = standard_deviation(linear.weight)
        assert deviation == pytest.approx(0.02, abs=5 * spread)
        assert linear.bias is None or (linear.bias == 0).all()


def test_what_carries_time_keeps_its_start():
    """It belongs to no Linear layer, so that the autoencoder's start does not reach it."""
    mixer = make_model("frac", COMPRESSION, seed=0).blocks[0].mixer
    for name, value in mixer.initial_time_values().items():
        assert torch.equal(getattr(mixer, name), value)
    for name in ("mamba2", "gated_deltanet", "mamba3"):
        dt_bias = make_model(name, COMPRESSION, seed=0).blocks[0].mixer.dt_bias
        dt = nn.functional.softplus(dt_bias)
        assert (dt > 9e-4).all() and (dt < 0.11).all()


def test_autoencoder_reads_the_last_state_alone():
    model = make_model("attention", COMPRESSION, seed=0).eval()
    tokens = torch.randint(16, (2, 32))
    with torch.no_grad():
        hidden = model.encode(tokens)[:, -1]
        each = [
            model.head(model.out_norm(model.decoder(hidden + place))) for place in model.positions
        ]
        torch.testing.assert_close(model(tokens), torch.stack(each, 1))
    with pytest.raises(ValueError, match=r"tokens must have shape \(B, 32\), got \(2, 31\)"):
        model(tokens[:, :-1])


def test_position_table():
    table = position_table(32, 128)
    assert table.shape == (32, 128)
    for place, j in ((0, 0), (1, 0), (5, 17), (31, 63)):
        angle = place * 1e4 ** (-j / 63)
        assert table[place, j].item() == pytest.approx(math.sin(angle), abs=1e-5)
        assert table[place, 64 + j].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_the_seed_decides_the_weights_alone():
    before = torch.random.get_rng_state()
    one, same, other = (make_model("frac", RECALL, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.embed.weight, same.embed.weight)
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_unknown_models_are_named():
    with pytest.raises(ValueError, match=r"name must be one of frac, .*, got 'mamba'"):
        make_model("mamba", RECALL, seed=0)


def test_presets():
    official, paper = PRESETS["official"], PRESETS["paper"]
    assert (official.lr_schedule, official.select) == ("constant", "best_test_ppl")
    assert (paper.lr_schedule, paper.select) == ("cosine", "last")
    assert official == dataclasses.replace(paper, lr_schedule="constant", select="best_test_ppl")
    assert len(official.sweep) == 6 and len(official.seeds) == 5
    assert official.num_steps(12800) == 20_000 and official.num_steps(256) == 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_schedule": "linear"}, "lr_schedule must be one of constant, cosine, got 'linear'"),
        ({"select": "first"}, "select must be one of last, best_test_ppl"),
        ({"average": "mean"}, "average must be one of batch_macro, macro, micro"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"lrs": ()}, "lrs must name at least one value"),
    ],
)
def test_protocol_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        Protocol(**({"lr_schedule": "cosine", "select": "last"} | changes))
