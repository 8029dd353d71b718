"""The models to compare: about 30M parameters without embeddings, all of width 512.

Attention and Gated DeltaNet have a SwiGLU after every mixer, as published; Frac and the Mambas have
none, and more layers instead. Other sizes are chosen to match the parameter count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.baselines import PAPER_CLOCK, published_frac
from experiments.language_model import LanguageModel, LanguageModelDesign, num_parameters
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.recipes import find_config

RECIPE = find_config("frac-30m")


def frac_design(
    options: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
) -> LanguageModelDesign:
    """`frac-30m`, with the given options of FracMixer and ControlSettings."""
    return _design("frac", 16, 8, 128, options=published_frac(options, settings))


def _design(
    mixer: str, num_layers: int, num_heads: int, head_dim: int, **rest: Any
) -> LanguageModelDesign:
    return LanguageModelDesign(
        mixer=mixer,
        vocab_size=32000,
        hidden_size=512,
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        **rest,
    )


DESIGNS = {
    "frac": frac_design(),
    "frac_paper_clock": frac_design(settings=PAPER_CLOCK),
    "attention": _design("attention", 9, 8, 64, mlp_size=1472),
    "qwen3": _design("attention", 9, 8, 64, options={"qk_norm": True}, mlp_size=1472),
    "mamba2": _design("mamba2", 17, 16, 64, options={"state_size": 128}),
    "gated_deltanet": _design("gated_deltanet", 10, 6, 64, options={"expand_v": 2.0}, mlp_size=912),
    "mamba3": _design("mamba3", 17, 16, 64, options={"state_size": 128}),
}


def fitted(design: LanguageModelDesign, vocab_size: int, *, smoke: bool) -> LanguageModelDesign:
    """The design for a vocabulary; with `smoke`, one that runs in seconds on a CPU."""
    if not smoke:
        return dataclasses.replace(design, vocab_size=vocab_size)
    return dataclasses.replace(
        design,
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        head_dim=16,
        mlp_size=min(design.mlp_size, 32),
    )


def num_inner_parameters(model: Any) -> int:
    """Number of parameters without embeddings."""
    return num_parameters(model) - model.embed_tokens.weight.numel()


def save_frac(model: LanguageModel, folder: Path) -> None:
    """Save a Frac model of DESIGNS as a checkpoint of the library, without a tokenizer.

    Example: `save_frac(model, Path("runs/frac"))`, then `FracForCausalLM.from_pretrained(...)`
    """
    design = model.design
    settings = design.options["settings"]
    config = FracConfig.from_pretrained(
        RECIPE,
        vocab_size=design.vocab_size,
        hidden_size=design.hidden_size,
        intermediate_size=design.num_heads * design.head_dim,
        num_hidden_layers=design.num_layers,
        num_attention_heads=design.num_heads,
        frac_head_dim=design.head_dim,
        **{f"frac_{name}": getattr(settings, name) for name in PAPER_CLOCK},
    )
    whole = FracForCausalLM(config)
    names = {name.removeprefix("model."): name for name in whole.state_dict()}
    whole.load_state_dict({names[name]: w for name, w in model.state_dict().items()})
    whole.save_pretrained(folder)
