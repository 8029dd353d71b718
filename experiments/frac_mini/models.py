"""The two models, and dropout for their training.

`frac_mini` is the model size frac-mini: 7 Frac and 3 attention layers with rotary positions, as in
experiments/mixed_models, in 16 MB of bfloat16. `gated_deltanet` has the same width, depth and
tokenizer, and the MLP width that matches the number of parameters best.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.mixed_models.models import LibraryModel
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.recipes import find_config

SIZE = "frac-mini"
DELTA = {
    "mixer_types": ["delta"],
    "delta_num_heads": 3,
    "delta_head_dim": 64,
    "mlp_intermediate_size": 384,
}
FIELDS: dict[str, dict[str, Any]] = {"frac_mini": {}, "gated_deltanet": DELTA}
"""Fields of each model that differ from the size frac-mini."""
# Runs in seconds on a CPU.
SMOKE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "mlp_intermediate_size": 32,
}
SMOKE_DELTA = {"delta_num_heads": 2, "delta_head_dim": 16}
# The parts of a block whose output is added to the residual stream.
BRANCHES = ("mixer", "self_attn", "mlp")


def make_config(name: str, vocab_size: int, *, smoke: bool = False) -> FracConfig:
    """The configuration of a model; with `smoke`, one layer of each kind for each attention.

    Example: `make_config("gated_deltanet", 4096)`
    """
    fields = FIELDS[name]
    if smoke:
        fields = fields | SMOKE | (SMOKE_DELTA if fields else {})
    return FracConfig.from_pretrained(find_config(SIZE), vocab_size=vocab_size, **fields)


def make_model(config: FracConfig, seed: int) -> LibraryModel:
    """A model with weights drawn from the seed; global random generators are left unchanged.

    Example: `make_model(make_config("frac_mini", 4096), seed=0)`
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LibraryModel(FracForCausalLM(config))


@contextmanager
def dropping_out(model: nn.Module, rate: float) -> Iterator[None]:
    """Apply dropout to embeddings and to the output of each mixer and MLP, in training mode only.

    The library's models have no dropout, because training on large corpora does not need it. The
    hooks here leave no trace in the saved model.
    """

    def drop(module: nn.Module, _: Any, output: Any) -> Any:
        if not module.training:
            return output
        if isinstance(output, tuple):
            return (F.dropout(output[0], rate), *output[1:])
        return F.dropout(output, rate)

    if not 0 <= rate < 1:
        raise ValueError(f"rate must be in [0, 1), got {rate}")
    parts = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] in BRANCHES
    ]
    handles = [part.register_forward_hook(drop) for part in parts] if rate else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
