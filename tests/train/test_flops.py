"""FLOPs of a model: equal to torch's count, with the context that attention sees."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_frac.data import Collator
from flash_frac.models import FracConfig
from flash_frac.train.context import CountingCollator, Seen
from flash_frac.train.flops import forward_flops, training_flops
from tests.models.conftest import SIZES, make_model

T = 40


def counted(model):
    """What torch counts in a forward pass over T tokens, a token, by operator."""
    ids = torch.randint(3, 61, (1, T), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, use_cache=False)
    return {name: count / T for name, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"mixer_types": ["attention"], "mlp_intermediate_size": 24},
        {"mixer_types": ["attention"], "attention_key_value_heads": 1, "attention_head_dim": 6},
        # Whose mask hides products that eager attention computes all the same.
        {"mixer_types": ["sliding_attention"], "sliding_window": 7},
    ],
)
def test_attention_and_mlp(changes):
    model = make_model(torch.float32, num_hidden_layers=2, **changes)
    assert sum(counted(model).values()) == forward_flops(model.config, T, T)
    assert training_flops(model.config, T, T) == 3 * forward_flops(model.config, T, T)


def test_frac_and_delta():
    """All but the scans, whose kernels count for themselves (tests/kernels), and convolutions.

    The counter has hooks on all modules, so that projections are not joined.
    """
    frac = make_model(torch.float32, mlp_intermediate_size=24)
    inner, modes = 32, 8
    others = 3 * (2 * inner * 4 + inner * (2 * 32 + 6 * modes))
    assert counted(frac)[torch.ops.aten.mm] == forward_flops(frac.config) - others
    delta = make_model(torch.float32, mixer_types=["delta"], delta_num_heads=3)
    heads, keys, channels = 3, 4, 8
    rule = 64 * (6 * keys + 4 * channels) + 6 * keys * channels
    others = 3 * heads * (2 * 4 * (2 * keys + channels) + rule)
    assert counted(delta)[torch.ops.aten.mm] == forward_flops(delta.config) - others


def test_contexts_of_layers():
    """Full attention sees the context, sliding attention its own, and nothing else any."""
    layers = {"num_hidden_layers": 4, "mixer_types": ["attention", "sliding_attention", "frac"]}
    config = FracConfig(**SIZES | layers, sliding_window=7)
    base = forward_flops(config)
    score = 4 * 16
    assert forward_flops(config, 100, 5) - base == score * (2 * 100 + 5)
    assert forward_flops(config, 100) - base == score * (2 * 100 + 7)
    assert forward_flops(config, 3) - base == score * (2 * 3 + 3)


def brute_force(lengths, window):
    """Tokens, and those that they see, of sequences (tokens before, tokens)."""
    seen = [n + 1 for before, length in lengths for n in range(before, before + length)]
    return Seen(len(seen), sum(seen), sum(min(n, window) for n in seen))


def item(starts, length=20, **more):
    return {
        "input_ids": torch.zeros(length, dtype=torch.long),
        "shift_labels": torch.zeros(length, dtype=torch.long),
        "document_starts": torch.tensor(starts, dtype=torch.long),
        "ends_document": False,
        **more,
    }


def test_what_tokens_of_a_batch_see():
    items = [item([0, 3, 15]), item([7])]
    apart = brute_force([(0, 3), (0, 12), (0, 5), (0, 7), (0, 13)], 4)
    assert CountingCollator(Collator(True), 4)(items)["seen"] == apart
    flowing = CountingCollator(Collator(False), 4)(items)
    assert flowing["seen"] == brute_force([(0, 20), (0, 20)], 4)
    assert flowing["input_ids"].shape == (2, 20)
    # Of a slice that one rank holds, the whole row counts.
    sharded = CountingCollator(Collator(False, shard=(0, 2)), 4)(items[:1])
    assert sharded["seen"] == brute_force([(0, 20)], 4) and sharded["input_ids"].shape == (1, 10)
    lanes = [item([3], tokens_before=9), item([0, 6], tokens_before=0)]
    carried = brute_force([(9, 3), (0, 17), (0, 6), (0, 14)], 4)
    assert CountingCollator(Collator(True, lanes=True), 4)(lanes)["seen"] == carried
    assert CountingCollator(Collator(True, lanes=True), None)(lanes)["seen"].full == carried.full
    assert apart.contexts == (apart.full / 40, apart.sliding / 40)
