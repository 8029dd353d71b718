"""Loss by length against whole forward passes."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flash_frac.data import StoreWriter, TokenStore
from flash_frac.evals import bits_per_byte, loss_by_length, scored_tokens
from flash_frac.models import FracConfig, FracForCausalLM
from tests.tiny import tiny_config

LENGTHS = [1, 4, 16, 64]


@pytest.fixture
def store(tmp_path):
    writer = StoreWriter(tmp_path / "store", np.dtype("<u2"))
    for length in (90, 60):
        writer.write(np.random.default_rng(length).integers(0, 32, length), ends=True)
    writer.close({})
    return TokenStore(tmp_path / "store")


@pytest.fixture
def model():
    model = FracForCausalLM(tiny_config(vocab_size=32)).double()
    # Away from the start, where nothing depends on the context.
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def whole(model, tokens, length):
    """Each window in one forward pass, and a loss of all its next tokens."""
    losses = []
    for start in range(0, len(tokens) - 1, length):
        window = torch.from_numpy(tokens[start : start + length + 1])
        logits = model(window[None, :-1], use_cache=False).logits[0]
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    return np.mean(losses)


@pytest.mark.parametrize("batch_tokens", [1, 7, 16, 4096])
def test_pieces_and_batches_equal_the_whole(model, store, batch_tokens):
    # Two windows of 64 fit into 150 tokens.
    tokens = store.tokens(0, 129)
    losses = loss_by_length(model, store, LENGTHS, batch_tokens=batch_tokens)
    assert list(losses) == LENGTHS
    model.eval()
    for length, loss in losses.items():
        # Logits are float32, whatever the model.
        assert loss == pytest.approx(whole(model, tokens, length), rel=1e-6)
    assert len({round(loss, 6) for loss in losses.values()}) == len(LENGTHS)


def test_longer_contexts_can_only_help_a_model_that_looks_back(store):
    """Every length scores the same tokens: a model blind to its context has one loss."""
    config = FracConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = FracForCausalLM(config)
    torch.nn.init.zeros_(model.model.layers[0].mixer.out_proj.weight)
    losses = list(loss_by_length(model, store, LENGTHS).values())
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)


def test_the_stretch_is_bounded(model, store):
    assert scored_tokens(store, LENGTHS) == 128
    assert scored_tokens(store, LENGTHS, max_tokens=100) == 64
    assert scored_tokens(store, [149]) == 149
    loss = loss_by_length(model, store, [64], max_tokens=64)[64]
    model.eval()
    assert loss == pytest.approx(whole(model, store.tokens(0, 65), 64), rel=1e-6)


def test_the_model_is_left_as_it_was(model, store):
    model.train()
    loss_by_length(model, store, [16])
    assert model.training and all(p.grad is None for p in model.parameters())


def test_bits_per_byte():
    assert bits_per_byte(3 * math.log(2), 1.5) == pytest.approx(2)
    with pytest.raises(ValueError, match="bytes_per_token must be positive"):
        bits_per_byte(1.0, 0)


def test_errors_name_the_remedy(model, store):
    with pytest.raises(ValueError, match="lengths must divide the largest of them, 16"):
        loss_by_length(model, store, [3, 16])
    with pytest.raises(ValueError, match=r"only 149 tokens to score .* use shorter lengths"):
        loss_by_length(model, store, [150])
    with pytest.raises(ValueError, match="lengths must hold numbers"):
        loss_by_length(model, store, [])
    with pytest.raises(ValueError, match="batch_tokens must be at least 1"):
        loss_by_length(model, store, [4], batch_tokens=0)
