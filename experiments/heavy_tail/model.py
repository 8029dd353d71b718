"""Models of the heavy-tail probe: one mixing layer of about 0.2M parameters, and a binary answer.

    h = embed(tokens);  h = h + mixer(norm(h));  [h = h + ffn(norm(h))];  logits = head(norm(h))

Only the query's output counts, so the tokens before it are absorbed: they update the layer's state,
and their outputs are not computed. This is the same function at a fraction of the cost, in training
too. A mixed model has two layers; only the last absorbs.
Letters: B batch, T time, E width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from experiments.baselines import PAPER_CLOCK, absorb, mixer_of
from experiments.heavy_tail.data import NUM_TOKENS
from flash_frac.models.inputs import random_elapsed
from flash_frac.ops import ControlSettings


class Design(NamedTuple):
    """A mixer of `experiments.baselines.make_mixer` and its size.

    first: a layer before this one, of the same width. ffn: width of an MLP, or 0. dilation: largest
    factor by which time runs faster in training, drawn log-uniformly for each sequence
    (`FracConfig.frac_time_dilation`). It multiplies Δ of Frac, the step of Mamba2 and the log decay
    of Gated DeltaNet; other mixers do not support it.
    """

    mixer: str
    hidden_size: int
    num_heads: int
    head_dim: int
    options: Mapping[str, Any] = MappingProxyType({})
    ffn: int = 0
    dilation: float = 1.0
    first: Design | None = None


# Time in units of 2^20 tokens, so that all lags lie in the early regime of fractional relaxation,
# t << 1, where the kernel is the power law t^(alpha - 1).
LONGEST = 2.0**20
EARLY = {
    "tau_min": 1 / LONGEST,
    "tau_max": 1.0,
    "dt_init": 0.5 / LONGEST,
    # States of slow modes are a millionth of their input before the norm.
    "norm_eps": 1e-20,
}
EARLY_SETTINGS = {
    "dt_min": 2.0**-45,
    "dt_max": 1 / LONGEST,
    "lambda_min": 1.0,
    "lambda_max": 1.0,
    "rho_eps": 0.0,
    "prior": "exact",
    "write_prior": False,
}
_EARLY = {"num_modes": 16, **EARLY, "settings": ControlSettings(**EARLY_SETTINGS)}
_PUBLISHED = {"num_modes": 16, "tau_max": 2.0**17}
_CLOCK = {**_PUBLISHED, "settings": ControlSettings(**PAPER_CLOCK)}
DESIGNS = {
    "frac": Design("frac", 136, 8, 34, _PUBLISHED),
    "frac_paper_clock": Design("frac", 136, 8, 34, _CLOCK),
    "frac_ours": Design("frac", 136, 8, 34, _EARLY, dilation=1024.0),
    "frac_dilated": Design("frac", 136, 8, 34, _PUBLISHED, dilation=1024.0),
    "frac_early": Design("frac", 136, 8, 34, _EARLY),
    "attention": Design("attention", 128, 8, 16, {"bias": True}, ffn=512),
    "attention_nope": Design("attention", 128, 8, 16, {"bias": True, "rope": False}, ffn=512),
    "mamba2": Design("mamba2", 160, 8, 40),
    "mamba2_dilated": Design("mamba2", 160, 8, 40, dilation=1024.0),
    "mamba3": Design("mamba3", 160, 8, 40, {"state_size": 112}),
    "gated_deltanet": Design("gated_deltanet", 96, 8, 32),
    "gated_deltanet_dilated": Design("gated_deltanet", 96, 8, 32, dilation=1024.0),
    "frac_delta": Design("gated_deltanet", 80, 8, 20, first=Design("frac", 80, 8, 20, _PUBLISHED)),
}


class Probe(nn.Module):
    """Logits (B, 2) at the query that ends each row of tokens (B, T)."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        width = design.hidden_size
        self.embed = nn.Embedding(NUM_TOKENS, width)
        self.first_norm = self.first = None
        if design.first is not None:
            self.first_norm, self.first = nn.LayerNorm(width), mixer_of(design.first, width)
        self.norm = nn.LayerNorm(width)
        self.mixer = mixer_of(design, width)
        self.ffn = None
        if design.ffn:
            self.ffn = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, design.ffn),
                nn.GELU(),
                nn.Linear(design.ffn, width),
            )
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.dilation = design.dilation

    def forward(self, tokens: Tensor, piece: int | None = None) -> Tensor:
        """Logits, absorbing `piece` tokens at a time: memory does not grow with T."""
        if self.training and self.dilation > 1:
            elapsed = random_elapsed(tokens[..., None], None, self.dilation)
            times, query_time = {"elapsed": elapsed[:, :-1]}, {"elapsed": elapsed[:, -1:]}
        else:
            times = query_time = {}
        state = first_state = None
        for part in tokens[:, :-1].split(piece or tokens.shape[1], dim=1):
            hidden, first_state = self._enter(part, first_state, times)
            state = absorb(self.mixer, self.norm(hidden), state, **times)
        query, _ = self._enter(tokens[:, -1:], first_state, query_time)
        mixed, _ = self.mixer(self.norm(query), state=state, **query_time)
        hidden = (query + mixed)[:, 0]
        if self.ffn is not None:
            hidden = hidden + self.ffn(hidden)
        return self.head(self.final_norm(hidden))

    def _enter(self, tokens: Tensor, state: Any, times: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        """Input (B, T, E) of the last layer, and the state of the layer before it, if any."""
        hidden = self.embed(tokens.int())
        if self.first is None or self.first_norm is None:
            return hidden, None
        mixed, state = self.first(self.first_norm(hidden), state=state, **times)
        return hidden + mixed, state
