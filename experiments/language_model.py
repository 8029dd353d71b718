"""A small decoder-only language model around any mixer of `experiments.baselines`.

    h = embed(tokens);  h = h + mixer(norm(h));  [h = h + mlp(norm(h))];  logits = head(norm(h))

With Frac and without an MLP it equals FracForCausalLM, parameter by parameter. Published attention
and Gated DeltaNet models have an MLP in every block, Frac and Mamba models none: see `mlp_size`.
Letters: B batch, T time, E width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.baselines import mixer_of
from flash_frac.layers import RMSNorm
from flash_frac.models.evaluating import evaluating
from flash_frac.models.inputs import random_elapsed
from flash_frac.ops.loss.api import linear_cross_entropy

NORM_EPS = 1e-6
INIT_STD = 0.02
IGNORE = -100
# Logits per chunk of tokens in training: 0.5 GB in bfloat16.
_LOGITS_AT_ONCE = 2**28


@dataclass(frozen=True, kw_only=True)
class LanguageModelDesign:
    """Design of a `LanguageModel`.

    Attributes:
        mixer, num_heads, head_dim, options: as in `experiments.baselines.make_mixer`.
        vocab_size, hidden_size, num_layers: sizes.
        mlp_size: inner width of the SwiGLU after every mixer; 0 for none.
        tied: whether the head shares the embedding.
        dilation: largest speed-up of time in a training row, the same in all layers, as in
            `FracConfig.frac_time_dilation`; only for the mixer "frac".
        others: designs of single layers that differ, by index from 0; of the same hidden_size.

    Example:
        >>> LanguageModelDesign(
        ...     mixer="frac", vocab_size=16, hidden_size=256, num_layers=8, num_heads=8, head_dim=48
        ... )
    """

    mixer: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    mlp_size: int = 0
    tied: bool = True
    dilation: float = 1.0
    others: Mapping[int, LanguageModelDesign] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mlp_size < 0:
            raise ValueError(f"mlp_size must be at least 0, got {self.mlp_size}; 0 is no MLP")
        if self.dilation != 1 and (self.mixer != "frac" or self.dilation < 1):
            raise ValueError(f"dilation must be 1, or more for frac, got {self.dilation}")
        for number, other in self.others.items():
            if not 0 <= number < self.num_layers or other.hidden_size != self.hidden_size:
                raise ValueError(
                    f"others must have numbers below num_layers ({self.num_layers}) and designs of "
                    f"hidden_size {self.hidden_size}, got {number} and {other.hidden_size}"
                )
        if self.others and self.dilation != 1:
            raise ValueError(
                f"dilation must be 1 where others differ from frac, got {self.dilation}"
            )


class SwiGLU(nn.Module):
    """down(silu(gate x) up x), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + mixer(norm(x)), and then x + mlp(norm(x)) if there is an MLP."""

    def __init__(self, design: LanguageModelDesign) -> None:
        super().__init__()
        width = design.hidden_size
        self.norm = RMSNorm(width, NORM_EPS)
        self.mixer = mixer_of(design, width)
        self.mlp_norm = RMSNorm(width, NORM_EPS) if design.mlp_size else None
        self.mlp = SwiGLU(width, design.mlp_size) if design.mlp_size else None

    def forward(self, x: Tensor, state: Any = None, **times: Tensor) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.norm(x), state=state, **times)
        x = x + mixed
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, state


class CausalModel(nn.Module):
    """Interface that `loss` and `token_losses` need: token embeddings, a head without a bias, and
    the hidden states between them.

    Attributes:
        piece: most tokens of a row read at once in evaluation; None for no limit.
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    piece: int | None = None

    def encode(self, tokens: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        """Hidden states (B, T, E) after the last norm, and the states of all layers after them.

        Args:
            tokens: (B, T), of any integer dtype.
            states: returned by an earlier call, to continue its rows; None to start new rows.
        """
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of the next token."""
        return self.lm_head(self.encode(tokens)[0])


class LanguageModel(CausalModel):
    """Logits (B, T, V) of the next token at each of the tokens (B, T).

    Weights of Linear layers and embeddings start at N(0, 0.02) and biases of Linear layers at 0, as
    in FracForCausalLM. All other parameters, such as timescales, are initialised by their own
    class. Parameters have the same names as in FracForCausalLM, without the prefix "model.".

    Example:
        >>> model = LanguageModel(design)
        >>> hidden, states = model.encode(tokens)
        >>> more, states = model.encode(next_tokens, states)
    """

    def __init__(self, design: LanguageModelDesign) -> None:
        super().__init__()
        self.design = design
        self.embed_tokens = nn.Embedding(design.vocab_size, design.hidden_size)
        self.layers = nn.ModuleList(
            Block(design.others.get(number, design)) for number in range(design.num_layers)
        )
        self.norm = RMSNorm(design.hidden_size, NORM_EPS)
        self.lm_head = nn.Linear(design.hidden_size, design.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if design.tied:
            self.lm_head.weight = self.embed_tokens.weight

    def encode(
        self, tokens: Tensor, states: Sequence[Any] | None = None
    ) -> tuple[Tensor, list[Any]]:
        hidden = self.embed_tokens(tokens.long())
        after, times = [], {}
        if self.training and self.design.dilation > 1:
            times = {"elapsed": random_elapsed(hidden, None, self.design.dilation)}
        for layer, state in zip(self.layers, states or [None] * len(self.layers), strict=True):
            hidden, state = layer(hidden, state, **times)
            after.append(state)
        return self.norm(hidden), after


def make_model(design: LanguageModelDesign, seed: int) -> LanguageModel:
    """A model with weights drawn from the seed; global random generators are left unchanged.

    Example: `make_model(design, seed=0)`
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LanguageModel(design)


def num_parameters(model: nn.Module) -> int:
    """Number of parameters; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the targets; an `experiments.training.Loss`.

    Logits are computed in chunks, and nothing syncs with the host, so a CUDA graph can capture it.

    Args:
        model: a `CausalModel`.
        inputs, targets: (B, T), of any integer dtype; targets are the next tokens, or -100 to
            ignore a position.
    """
    assert isinstance(model, CausalModel)
    chunk = max(1, _LOGITS_AT_ONCE // model.lm_head.out_features)
    hidden, _ = model.encode(inputs)
    return linear_cross_entropy(
        hidden, model.lm_head.weight, targets.long(), ignore_index=IGNORE, chunk_tokens=chunk
    )


def read_pieces(model: CausalModel, tokens: Tensor, piece: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield hidden states (B, t, E) of long rows (B, T) and the next token (B, t) of each.

    Rows are read in pieces with carried states, so only one piece has activations in memory. The
    last token of a row is not read.

    Args:
        model: in eval mode.
        piece: most tokens of a row read at once; the model may lower it.
    """
    states, device = None, model.lm_head.weight.device
    piece = min(piece, model.piece or piece)
    for start in range(0, tokens.shape[1] - 1, piece):
        part = tokens[:, start : start + piece + 1].to(device).long()
        hidden, states = model.encode(part[:, :-1], states)
        yield hidden, part[:, 1:]


def token_losses(model: CausalModel, tokens: Tensor, piece: int) -> Tensor:
    """The loss of every token of long rows but the first, (B, T - 1), on the model's device.

    Rows are read in pieces, so only one piece has activations and logits in memory. Products follow
    the caller's autocast, except for the head, which is float32.

    Args:
        model: its training mode is restored afterwards.
        tokens: (B, T), of any integer dtype, on any device.
        piece: tokens of a row read at once.

    Example:
        >>> perplexity = token_losses(model, tokens, 4096).mean().exp()
    """
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens must have shape (B, T) with T at least 2, got {tuple(tokens.shape)}; the "
            "first token of a row is only read"
        )
    if piece < 1:
        raise ValueError(f"piece must be at least 1, got {piece}")
    weight = model.lm_head.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    losses = []
    with evaluating(model):
        for hidden, following in read_pieces(model, tokens, piece):
            with torch.autocast(weight.device.type, enabled=False):
                logits = F.linear(hidden.to(wide), weight.to(wide))
            flat = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
            losses.append(flat.view(logits.shape[:2]))
    return torch.cat(losses, 1)
