"""Hybrid models for tests.

Qwen3 computes its norms in float32 whatever the model's dtype, so two computations of the same
logits differ by float32 rounding: `close` uses assert_close's tolerances for that dtype.
"""

from functools import partial

import torch

from flash_frac.models import FracForCausalLM
from tests.models.conftest import make_model

close = partial(torch.testing.assert_close, rtol=1.3e-6, atol=1e-5, check_dtype=False)
LAYERS = {"attention_layers": [1, 3], "attention_key_value_heads": 1, "num_hidden_layers": 4}
# Mixed models by name, each of four layers.
KINDS = {
    "attention": LAYERS,
    "no positions": {
        "mixer_types": ["frac", "attention"],
        "attention_positions": "none",
        "mlp_intermediate_size": 24,
        "attention_temperature_length": 16,
    },
    "sliding": {"mixer_types": ["frac", "sliding_attention"], "sliding_window": 7},
    "full and sliding": {
        "mixer_types": ["attention", "frac", "sliding_attention", "frac"],
        "sliding_window": 7,
        "mlp_intermediate_size": 24,
    },
    "delta": {"mixer_types": ["frac", "delta"], "delta_head_dim": 4, "mlp_intermediate_size": 24},
    "delta net": {"mixer_types": ["delta"], "delta_num_heads": 3},
    "all": {
        "mixer_types": ["frac", "delta", "sliding_attention", "attention"],
        "sliding_window": 7,
        "attention_positions": "none",
        "mlp_intermediate_size": 24,
    },
    "transformer": {"mixer_types": ["attention"], "mlp_intermediate_size": 24},
    "mlp": {"mixer_types": ["frac"], "mlp_intermediate_size": 24},
}
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
# For transformers' own loop, which a `Generator` is to be compared with, on any device.
OWN_LOOP = {"cache_implementation": "dynamic"}


def make_hybrid(dtype=torch.float64, model_class=FracForCausalLM, **changes):
    return make_model(dtype, model_class, **{**LAYERS, **changes})


def make_kind(kind, dtype=torch.float64, model_class=FracForCausalLM, **changes):
    """A mixed model by its name in KINDS."""
    return make_model(dtype, model_class, **{"num_hidden_layers": 4, **KINDS[kind], **changes})


def padded(ids):
    """A mask with padding on the left, on the right, and inside."""
    mask = torch.ones_like(ids)
    mask[0, :13], mask[1, 31:], mask[2, 9:17] = 0, 0, 0
    return mask


def greedy_by_hand(model, ids, num):
    """Without any cache: the whole sequence again for every token."""
    for _ in range(num):
        token = model(ids, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, token[:, None]], 1)
    return ids
