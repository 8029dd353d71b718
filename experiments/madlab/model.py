"""MADLab's models: two mixers, each followed by a SwiGLU, about 0.5M parameters in all.

    h = embed(tokens);  h = h + mixer(norm(h));  h = h + swiglu(norm(h));  twice
    language model:  logits_t = head(norm(h_t))
    autoencoder:     logits_i = head(norm(decoder(h_last + p_i))),  p_i a fixed table

The autoencoder is for compression: it must recover every token from the last hidden state.
Letters: B batch, T time, E width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.baselines import mixer_of, published_frac
from experiments.language_model import SwiGLU
from experiments.madlab.tasks import TaskSettings
from flash_frac.layers import RMSNorm

WIDTH = 128
NORM_EPS = 1e-5
INIT_STD = 0.02


class Design(NamedTuple):
    """A mixer of `experiments.baselines.make_mixer`; its heads span `num_heads * head_dim`.

    second: mixer of the second block; the same in both if None.
    """

    mixer: str
    num_heads: int
    head_dim: int
    options: Mapping[str, Any] = MappingProxyType({})
    second: Design | None = None


def _frac(**settings: Any) -> Design:
    """As published: the paper takes the settings of language modelling."""
    return Design("frac", 6, 32, published_frac(settings=settings))


_DELTA = Design("gated_deltanet", 8, 16, {"expand_v": 1.5})
# The paper gives width 128, four taps, expansion 1.5 (Mamba2: 2) and eight heads (Frac: six), and
# matches parameters at about 0.5M. State sizes that it does not give are chosen to match that.
DESIGNS = {
    "frac": _frac(),
    # The prior pulls all writes to the fast modes, where they do not last.
    "frac_no_write_prior": _frac(write_prior=False),
    "mamba2": Design("mamba2", 8, 32, {"state_size": 64}),
    "mamba3": Design("mamba3", 8, 24, {"state_size": 128}),
    "gated_deltanet": _DELTA,
    "frac_delta": _frac()._replace(second=_DELTA),
    "attention": Design("attention", 8, 24),
}


class Block(nn.Module):
    """h + mixer(norm(h)), then h + swiglu(norm(h))."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(WIDTH, NORM_EPS)
        self.mixer = mixer_of(design, WIDTH)
        self.swiglu_norm = RMSNorm(WIDTH, NORM_EPS)
        self.swiglu = SwiGLU(WIDTH, swiglu_size(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mixer(self.mixer_norm(hidden))[0]
        return hidden + self.swiglu(self.swiglu_norm(hidden))


class LanguageModel(nn.Module):
    """Logits (B, T, V) of the target at each of the tokens (B, T).

    Embeddings start at N(0, 0.02) and biases of Linear layers at 0; all other parameters are
    initialised by their own class.
    """

    def __init__(self, design: Design, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList([Block(design), Block(design.second or design)])
        self.out_norm = RMSNorm(WIDTH, NORM_EPS)
        self.head = nn.Linear(WIDTH, vocab_size)
        nn.init.normal_(self.embed.weight, std=INIT_STD)
        for linear in linears(self):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def encode(self, tokens: Tensor) -> Tensor:
        """Hidden states (B, T, E) after the blocks."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.out_norm(self.encode(tokens)))


class AutoEncoder(LanguageModel):
    """Logits (B, T, V) of every token, from the last hidden state alone.

    Weights of all Linear layers, including the mixers', start at N(0, 0.02), and their biases at 0.
    Time parameters of a mixer are not in Linear layers: dt_bias, A_log or D keep their own
    initialisation. The bias of Frac's dyn_proj, the logits of delta, alpha and lambda, starts at 0
    in any case.

    Args:
        seq_len: T of every input.
    """

    positions: Tensor

    def __init__(self, design: Design, vocab_size: int, seq_len: int) -> None:
        super().__init__(design, vocab_size)
        self.decoder = nn.Sequential(
            RMSNorm(WIDTH, NORM_EPS),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            RMSNorm(WIDTH, NORM_EPS),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
        )
        self.register_buffer("positions", position_table(seq_len, WIDTH), persistent=False)
        for linear in linears(self):
            nn.init.normal_(linear.weight, std=INIT_STD)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] != len(self.positions):
            raise ValueError(
                f"tokens must have shape (B, {len(self.positions)}), got {tuple(tokens.shape)}; "
                "the autoencoder is built for one seq_len"
            )
        last = self.encode(tokens)[:, -1:]
        return self.head(self.out_norm(self.decoder(last + self.positions)))


def linears(model: nn.Module) -> list[nn.Linear]:
    """All Linear layers of a model."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def swiglu_size(width: int) -> int:
    """Two thirds of four times the width, rounded up to a multiple of 16: 352 at 128."""
    return math.ceil(int(2 * 4 * width / 3) / 16) * 16


def position_table(seq_len: int, width: int) -> Tensor:
    """(T, E): sin(i f_j), then cos(i f_j), with f_j = 10^(-4 j / (E/2 - 1))."""
    half = width // 2
    frequency = torch.exp(torch.arange(half) * (-math.log(1e4) / (half - 1)))
    angle = torch.arange(seq_len)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


def make_model(name: str, task: TaskSettings, seed: int) -> LanguageModel:
    """The model of a design in `DESIGNS` for a task, with weights drawn from the seed.

    Example:
        >>> model = make_model("frac", TASKS["compression"], seed=0)
        >>> logits = model(torch.zeros(2, 32, dtype=torch.long))
    """
    if name not in DESIGNS:
        raise ValueError(f"name must be one of {', '.join(DESIGNS)}, got {name!r}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if task.kind == "compression":
            return AutoEncoder(DESIGNS[name], task.vocab_size, task.seq_len)
        return LanguageModel(DESIGNS[name], task.vocab_size)
