"""The small language model: FracForCausalLM with other mixers; its loss, whole and in pieces."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.baselines import MIXERS
from experiments.language_model import (
    IGNORE,
    LanguageModel,
    LanguageModelDesign,
    loss,
    make_model,
    num_parameters,
    token_losses,
)
from experiments.training import Optimisation, Training, train_side_by_side
from flash_frac.models import FracConfig, FracForCausalLM

OPTIONS = {
    "frac": {"num_modes": 4},
    "attention": {},
    "mamba2": {"state_size": 8},
    "mamba3": {"state_size": 8},
    "gated_deltanet": {"expand_v": 2.0},
}
WITH_MLP = ("attention", "gated_deltanet")


def design(mixer, **changes):
    given = {
        "vocab_size": 11,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "options": OPTIONS[mixer],
        "mlp_size": 24 if mixer in WITH_MLP else 0,
    }
    return LanguageModelDesign(mixer=mixer, **(given | changes))


def drawn(shape, seed=0, vocab=11):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def test_every_mixer_is_tested():
    assert set(OPTIONS) == set(MIXERS)


@pytest.mark.parametrize("tied", [True, False])
def test_frac_is_the_models_of_the_library(tied):
    """With the same weights, the same logits; and every parameter has its place."""
    config = FracConfig(
        vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, frac_num_modes=4, frac_tau_max=131072.0, tie_word_embeddings=tied,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    official = FracForCausalLM(config).eval()
    ours = LanguageModel(design("frac", head_dim=12, tied=tied)).eval()
    weights = {name.removeprefix("model."): w for name, w in official.state_dict().items()}
    ours.load_state_dict(weights)
    assert num_parameters(ours) == num_parameters(official)
    tokens = drawn((2, 70))
    with torch.no_grad():
        assert torch.equal(ours(tokens), official(tokens).logits)


def test_frac_starts_as_the_models_of_the_library():
    """The spread of every weight at the start is that of FracForCausalLM."""
    config = FracConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=None,
    )  # fmt: skip
    official = dict(FracForCausalLM(config).named_parameters())
    sizes = {"vocab_size": 64, "hidden_size": 64, "head_dim": 48, "options": {"num_modes": 8}}
    ours = make_model(design("frac", **sizes), seed=0)
    for name, weight in ours.named_parameters():
        other = official[f"model.{name}"]
        spread = weight.std(correction=0).item()
        expected = other.std(correction=0).item()
        assert weight.mean().item() == pytest.approx(other.mean().item(), abs=5e-3), name
        assert spread == pytest.approx(expected, rel=0.25, abs=1e-6), name


@pytest.mark.parametrize("mixer", MIXERS)
def test_loss_is_plain_cross_entropy(mixer):
    """Value and gradients in float64, with targets that do not count."""
    model = make_model(design(mixer), seed=0).double()
    other = copy.deepcopy(model)
    tokens = drawn((3, 40)).to(torch.uint8)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].to(torch.int16)
    targets[1, 5:20] = IGNORE
    value = loss(model, inputs, targets)
    expected = F.cross_entropy(other(inputs).flatten(0, 1), targets.flatten().long())
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    value.backward()
    expected.backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_layers_of_two_kinds_carry_their_states():
    other = design("gated_deltanet", mlp_size=0)
    model = make_model(design("frac", num_layers=3, others={1: other}), seed=0).double().eval()
    assert [type(layer.mixer).__name__ for layer in model.layers] == [
        "Frac",
        "GatedDeltaNet",
        "Frac",
    ]
    tokens = drawn((2, 30))
    whole, _ = model.encode(tokens)
    first, states = model.encode(tokens[:, :11])
    second, _ = model.encode(tokens[:, 11:], states)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


def test_designs_of_other_layers_are_checked():
    other = design("gated_deltanet")
    with pytest.raises(ValueError, match=r"others must have numbers below num_layers \(2\)"):
        design("frac", others={2: other})
    with pytest.raises(ValueError, match=r"designs of hidden_size 16, got 1 and 32"):
        design("frac", others={1: design("gated_deltanet", hidden_size=32)})
    with pytest.raises(ValueError, match=r"dilation must be 1 where others differ"):
        design("frac", others={1: other}, dilation=4.0)


def test_loss_keeps_few_logits(monkeypatch):
    """Cut into many chunks, the loss is the same."""
    model, tokens = make_model(design("frac"), seed=0), drawn((2, 41))
    whole = loss(model, tokens[:, :-1], tokens[:, 1:])
    monkeypatch.setattr("experiments.language_model._LOGITS_AT_ONCE", 77)
    assert loss(model, tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(whole.item())


@pytest.mark.parametrize("mixer", MIXERS)
def test_nothing_waits_for_the_host(mixer):
    """Tensors without values cannot be waited for: a CUDA graph may hold loss and gradients."""
    with FakeTensorMode():
        model = LanguageModel(design(mixer))
        inputs = torch.empty(2, 130, dtype=torch.uint8)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = loss(model, inputs, inputs.to(torch.int8))
        value.backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("piece", [1, 7, 64, 99, 200])
@pytest.mark.parametrize("mixer", MIXERS)
def test_pieces_are_the_whole(mixer, piece):
    model = make_model(design(mixer), seed=0).double()
    tokens = drawn((2, 100))
    found = token_losses(model, tokens.to(torch.uint8), piece)
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    assert not found.requires_grad and model.training
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", MIXERS)
def test_pieces_in_bfloat16(mixer):
    """The error in pieces is of the size of that of the whole."""
    model, tokens = make_model(design(mixer), seed=0), drawn((4, 129))
    exact = token_losses(copy.deepcopy(model).double(), tokens, 128)
    with torch.autocast("cpu", torch.bfloat16):
        whole, pieces = token_losses(model, tokens, 128), token_losses(model, tokens, 32)
    assert whole.dtype == pieces.dtype == torch.float32
    rounding = (whole - exact).abs().max()
    assert (pieces - exact).abs().max() <= 2 * rounding


@pytest.mark.parametrize("mixer", MIXERS)
def test_no_token_sees_a_later_one(mixer):
    model = make_model(design(mixer), seed=0).double()
    tokens = drawn((1, 80))
    changed = tokens.clone()
    changed[:, 50:] = (changed[:, 50:] + 1) % 11
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :50], after[:, :50], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(before[:, 50], after[:, 50])


@pytest.mark.parametrize("mixer", MIXERS)
def test_counts(mixer):
    """The embedding, the mixers and norms of all layers, their MLPs, the last norm, the head."""
    tied, untied = (make_model(design(mixer, tied=tied), seed=0) for tied in (True, False))
    assert num_parameters(untied) - num_parameters(tied) == 11 * 16
    per_layer = num_parameters(tied.layers[0].mixer) + 16
    per_layer += 3 * 16 * 24 + 16 if mixer in WITH_MLP else 0
    assert num_parameters(tied) == 11 * 16 + 2 * per_layer + 16
    grown = make_model(design(mixer, num_layers=3), seed=0)
    assert num_parameters(grown) - num_parameters(tied) == per_layer


@pytest.mark.parametrize("mixer", MIXERS)
def test_overfits_one_batch(mixer):
    """Through the engine, with mixed precision: what was random at first is known by heart."""
    tokens = drawn((2, 25)).to(torch.uint8)
    model = make_model(design(mixer, hidden_size=32, head_dim=16), seed=0)
    plan = Optimisation(lr=1e-2, steps=120, batch_size=2, warmup=0.1, clip=1.0, bfloat16=True)
    order = torch.arange(2).expand(120, 2)
    training = Training(model, loss, tokens[:, :-1], tokens[:, 1:], order, plan)
    train_side_by_side([training])
    assert training.losses[0].item() == pytest.approx(math.log(11), abs=0.1)
    assert training.losses[-1].item() < 0.3
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_the_seed_decides_the_weights_alone():
    before = torch.random.get_rng_state()
    one, same, other = (make_model(design("frac"), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.embed_tokens.weight, same.embed_tokens.weight)
    assert not torch.equal(one.embed_tokens.weight, other.embed_tokens.weight)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        design("frac", vocab_size=0)
    with pytest.raises(ValueError, match="mlp_size must be at least 0, got -1; 0 is no MLP"):
        design("frac", mlp_size=-1)
    with pytest.raises(ValueError, match="dilation must be 1, or more for frac, got 2"):
        design("mamba2", dilation=2.0)
    model = make_model(design("frac"), seed=0)
    with pytest.raises(ValueError, match=r"T at least 2, got \(1, 1\)"):
        token_losses(model, drawn((1, 1)), 4)
    with pytest.raises(ValueError, match="piece must be at least 1, got 0"):
        token_losses(model, drawn((1, 5)), 0)
