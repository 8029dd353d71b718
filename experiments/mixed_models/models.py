"""The models to compare: configurations of one class, each with about 30M parameters without
embeddings.

Each is a `FracForCausalLM` of width 512, with ten layers unless noted and an MLP in every block.
`mlp_size` chooses the MLP width that matches the parameter count of frac-30m. Attention layers have
8 heads of 64 channels, delta layers 6 heads of 64 x 128. Rotary positions have a theta of 1e4.

    python -m experiments.mixed_models.models          prints the designs and their sizes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from experiments.language_model import CausalModel
from experiments.long_documents.models import RECIPE, num_inner_parameters
from experiments.training import Schedule
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models.attention import Attention

PARAMETERS = 29_877_280
"""Parameters of frac-30m without embeddings, the target for all other designs."""
WIDTH_STEP = 16
"""MLP widths are multiples of this."""
SLIDING_PIECE = 4096
"""Most tokens of a row that models with sliding windows read at once."""
FIRST_WINDOW = 64
"""Attention window at the start of training, in designs with a growing window."""
SCALED_FROM = 16
"""Queries that see n > SCALED_FROM tokens are multiplied by log(n) / log(SCALED_FROM), in training
too, in designs of scaled attention."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """A configuration, and how it is trained.

    Attributes:
        label: name in tables.
        layers: kind of each layer, as in `FracConfig.mixer_types`.
        mlp: whether every block has an MLP.
        options: further fields of FracConfig.
        grows: whether the attention window starts at FIRST_WINDOW, doubles in equal intervals in
            the first half of training, and covers all tokens in the second half.
    """

    label: str
    layers: tuple[str, ...]
    mlp: bool = True
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    grows: bool = False


def _layers(most: str, others: str = "", at: Sequence[int] = (), num: int = 10) -> tuple[str, ...]:
    """`num` layers of the kind `most`, except that those at the indices `at` are `others`."""
    return tuple(others if n in at else most for n in range(num))


def _nope(label: str, at: Sequence[int], *, grows: bool = False, **options: Any) -> Design:
    """Frac with attention without positions at these layers."""
    options = {"attention_positions": "none", **options}
    label = f"Frac + {label}, no positions"
    return Design(
        label=label, layers=_layers("frac", "attention", at), options=options, grows=grows
    )


def _sliding(window: int) -> Design:
    return Design(
        label=f"Frac + 3 sliding windows of {window:,}",
        layers=_layers("frac", "sliding_attention", (2, 5, 8)),
        options={"sliding_window": window},
    )


MAIN = {
    "frac_attention": Design(
        label="Frac + 3 attention, RoPE", layers=_layers("frac", "attention", (2, 5, 8))
    ),
    "frac_attention_nope": _nope("3 attention", (2, 5, 8)),
    "delta_attention": Design(
        label="Gated DeltaNet + 3 attention, RoPE", layers=_layers("delta", "attention", (2, 5, 8))
    ),
    "frac_delta": Design(label="Frac + 3 delta", layers=_layers("frac", "delta", (1, 4, 7))),
    "delta": Design(label="Gated DeltaNet", layers=_layers("delta")),
}
"""The five designs that the claims are about."""
DESIGNS = MAIN | {
    "frac": Design(label="Frac (paper)", layers=_layers("frac", num=16), mlp=False),
    "frac_mlp": Design(label="Frac with MLP", layers=_layers("frac", num=9)),
    "attention": Design(label="attention (Qwen3)", layers=_layers("attention", num=9)),
    "frac_attention_2": Design(
        label="Frac + 2 attention, RoPE", layers=_layers("frac", "attention", (4, 9))
    ),
    "frac_attention_nope_2": _nope("2 attention", (4, 9)),
    "frac_attention_nope_1": _nope("1 attention", (5,)),
    "frac_attention_nope_first": _nope("3 attention at 0, 1, 2", (0, 1, 2)),
    "frac_attention_nope_last": _nope("3 attention at 7, 8, 9", (7, 8, 9)),
    "frac_attention_nope_growing": _nope("3 attention of growing window", (2, 5, 8), grows=True),
    "frac_attention_nope_1_growing": _nope("1 attention of growing window", (5,), grows=True),
    "frac_attention_nope_scaled": _nope(
        "3 attention scaled by log length", (2, 5, 8), attention_temperature_length=SCALED_FROM
    ),
    "frac_sliding_512": _sliding(512),
    "frac_sliding_2048": _sliding(2048),
}


class LibraryModel(CausalModel):
    """A `FracForCausalLM` with the interface of the experiments' own models.

    Example:
        >>> model = LibraryModel(FracForCausalLM(config))
        >>> hidden, cache = model.eval().encode(tokens)
        >>> more, cache = model.encode(next_tokens, cache)
    """

    def __init__(self, model: FracForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.embed_tokens, self.lm_head = model.model.embed_tokens, model.lm_head
        if "sliding_attention" in (model.config.mixer_types or ()):
            # Only a sliding window needs a mask, with a row for each token of a piece.
            self.piece = SLIDING_PIECE

    def encode(self, tokens: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        """Hidden states after the last norm, and the cache after them; no cache in training."""
        output = self.model.model(tokens.long(), past_key_values=states)
        return output.last_hidden_state, output.past_key_values

    def set_window(self, window: int | None) -> None:
        """Set the window of all attention layers; None for all tokens."""
        inner, kind = self.model.model, "attention" if window is None else "sliding_attention"
        inner.mixer_types = inner.config.mixer_types = [
            kind if name.endswith("attention") else name for name in inner.mixer_types
        ]
        inner.config.sliding_window = inner.attention_config.sliding_window = window
        for module in inner.modules():
            if isinstance(module, Attention):
                module.sliding_window = window


def make_config(
    design: Design, vocab_size: int = 32000, *, smoke: bool = False, mlp: int | None = None
) -> FracConfig:
    """The configuration of a design; with `smoke`, one that runs in seconds on a CPU.

    Args:
        mlp: MLP width, if the design has an MLP; from `mlp_size` if None.
    """
    sizes = {"delta_num_heads": 6, "delta_head_dim": 64}
    layers = list(design.layers)
    if smoke:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        # One layer of each kind.
        layers, mlp = list(dict.fromkeys(layers)), 32
    fields = dict(design.options)
    if fields.get("attention_positions") != "none":
        fields["attention_rope_parameters"] = {"rope_theta": 1e4}
    return FracConfig.from_pretrained(
        RECIPE,
        vocab_size=vocab_size,
        num_hidden_layers=len(layers),
        mixer_types=layers,
        mlp_intermediate_size=(mlp or mlp_size(design)) if design.mlp else None,
        **sizes,
        **fields,
    )


def mlp_size(design: Design) -> int:
    """The MLP width that brings a design closest to PARAMETERS."""
    # Windows have no parameters.
    kinds = (name.removeprefix("sliding_") for name in design.layers)
    return _mlp_size(tuple(sorted(kinds)))


@lru_cache
def _mlp_size(layers: tuple[str, ...]) -> int:
    design = Design(label="", layers=layers)
    one, two = (count(make_config(design, mlp=n * WIDTH_STEP)) for n in (1, 2))
    return WIDTH_STEP * (1 + round((PARAMETERS - one) / (two - one)))


def count(config: FracConfig) -> int:
    """Number of parameters of a configuration, without embeddings."""
    with torch.device("meta"):
        return num_inner_parameters(LibraryModel(FracForCausalLM(config)))


def make_model(config: FracConfig, seed: int) -> LibraryModel:
    """A model with weights drawn from the seed; global random generators are left unchanged.

    Example: `make_model(make_config(DESIGNS["frac_delta"]), seed=0)`
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LibraryModel(FracForCausalLM(config))


def growing_window(steps: int, length: int) -> Schedule:
    """Schedule of attention windows for a training of this many steps and row length."""
    windows: list[int | None] = []
    while (window := FIRST_WINDOW << len(windows)) < length:
        windows.append(window)
    windows.append(None)
    current: list[int | None] = []

    def schedule(model: nn.Module, step: int) -> bool:
        part = min(2 * (len(windows) - 1) * step // steps, len(windows) - 1)
        if current == [windows[part]]:
            return False
        assert isinstance(model, LibraryModel)
        current[:] = [windows[part]]
        model.set_window(windows[part])
        return True

    return schedule


def describe(names: Sequence[str] = tuple(DESIGNS)) -> list[str]:
    """Rows of a Markdown table: the designs and their sizes."""
    lines = [
        "| `--models` | model | layers | MLP | parameters without embeddings |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        design = DESIGNS[name]
        config = make_config(design)
        width = config.mlp_intermediate_size or "none"
        lines.append(
            f"| `{name}` | {design.label} | {len(design.layers)} | {width} | {count(config):,} |"
        )
    return lines


if __name__ == "__main__":
    print(*describe(), sep="\n")
