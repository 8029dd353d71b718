"""mamba_ssm's Mamba3 in a language model with transformers' interface.

mamba_ssm's own language model supports only Mamba1 and Mamba2. Its blocks, norms and kernels are
used unchanged, with one exception: a SISO step of one token uses mamba_ssm's Triton kernel, because
the kernel that its layer calls needs packages for one kind of GPU.
Letters: B batch, T time, E width, H heads, D head channels, N state size, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(kw_only=True)
class Mamba3Config:
    """Sizes; `mimo_rank` is the number of inputs and outputs per head, 1 for SISO."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    head_dim: int
    state_size: int = 128
    mimo_rank: int = 1
    model_type: str = field(default="mamba3", init=False)


class Output(NamedTuple):
    """Hidden states or logits first, as in transformers, then other requested outputs."""

    logits: Tensor
    past_key_values: Any = None
    loss: Tensor | None = None


def import_mamba_ssm() -> None:
    """Import mamba_ssm, even from sources without its extension for Mamba1, which is not used."""
    missing = "selective_scan_cuda"
    if importlib.util.find_spec("mamba_ssm") and not importlib.util.find_spec(missing):
        sys.modules[missing] = ModuleType(missing)
        sys.modules[missing].__spec__ = ModuleSpec(missing, None)
    import mamba_ssm  # noqa: F401 # pyright: ignore[reportMissingImports]


@cache
def _mixer_class() -> Any:
    """mamba_ssm's layer, with steps that return a new state."""
    import_mamba_ssm()
    from mamba_ssm.modules.mamba3 import Mamba3  # pyright: ignore[reportMissingImports]
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_step import (  # pyright: ignore
        mamba3_siso_step,
    )

    class Mixer(Mamba3):
        def forward(self, u: Tensor, inference_params: Any = None) -> Tensor:
            if inference_params is None or inference_params.seqlen_offset == 0:
                return super().forward(u, inference_params=inference_params)
            states = inference_params.key_value_memory_dict
            before = states[self.layer_idx]
            if self.is_mimo:
                y, *after = self.step(u[:, 0], *before)
            else:
                y, after = self.advance(u[:, 0], before)
            states[self.layer_idx] = after
            return y[:, None]

        def advance(self, u: Tensor, states: Any) -> tuple[Tensor, Any]:
            """Decode one token (B, E), given the states of angles, scan, and previous k and v."""
            sizes = [self.d_inner] * 2 + [self.d_state * self.num_bc_heads] * 2
            sizes += [self.nheads] * 3 + [self.num_rope_angles]
            z, x, b, c, dt, rate, trap, angles = self.in_proj(u).split(sizes, -1)
            z, x = (v.unflatten(-1, (self.nheads, self.headdim)) for v in (z, x))
            b, c = (v.unflatten(-1, (self.num_bc_heads, self.d_state)) for v in (b, c))
            dt = F.softplus(dt + self.dt_bias)
            log_decay = dt * (-F.softplus(rate.float())).clamp(max=-self.A_floor)
            angle, scan, key, value = states
            y, after = mamba3_siso_step(
                self.C_norm(c), self.B_norm(b), x, log_decay, dt, trap,
                self.C_bias[:, 0], self.B_bias[:, 0],
                angles[:, None].expand(-1, self.nheads, -1), self.D, z,
                (angle, scan, key.flatten(1, -2), value),
            )  # fmt: skip
            return self.out_proj(y.flatten(1).to(u.dtype)), after

    return Mixer


class Backbone(nn.Module):
    """Embedding, blocks and final norm, as mamba_ssm arranges those of Mamba2."""

    def __init__(self, config: Mamba3Config, dtype: torch.dtype) -> None:
        super().__init__()
        mixer = _mixer_class()
        from mamba_ssm.modules.block import Block  # pyright: ignore[reportMissingImports]
        from mamba_ssm.ops.triton.layer_norm import RMSNorm  # pyright: ignore

        width, rank = config.hidden_size, config.mimo_rank
        # Pass the dtype instead of setting torch's default: mamba_ssm keeps some in float32.
        shape: dict[str, Any] = {"dtype": dtype}
        shape |= {"headdim": config.head_dim, "d_state": config.state_size}
        if rank > 1:
            shape |= {"is_mimo": True, "mimo_rank": rank, "chunk_size": 64 // rank}
        self.embedding = nn.Embedding(config.vocab_size, width, dtype=dtype)
        self.layers = nn.ModuleList(
            Block(
                width,
                partial(mixer, layer_idx=n, **shape),
                nn.Identity,
                norm_cls=partial(RMSNorm, dtype=dtype),
                fused_add_norm=True,
                residual_in_fp32=True,
            )
            for n in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(width, dtype=dtype)

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True
    ) -> Output:
        """Hidden states (B, T, E), and the states of all layers."""
        from mamba_ssm.ops.triton.layer_norm import layer_norm_fn  # pyright: ignore
        from mamba_ssm.utils.generation import InferenceParams  # pyright: ignore

        params = past_key_values
        if params is None and use_cache:
            params = InferenceParams(max_seqlen=0, max_batch_size=len(input_ids))
        hidden, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, inference_params=params)
        if params is not None:
            params.seqlen_offset += input_ids.shape[1]
        norm = self.norm_f
        fused: dict[str, Any] = {"residual": residual, "is_rms_norm": True}
        fused |= {"residual_in_fp32": True, "eps": norm.eps}
        return Output(layer_norm_fn(hidden, norm.weight, norm.bias, **fused), params)


class Mamba3ForCausalLM(nn.Module):
    """The backbone, and a head that shares the embedding."""

    def __init__(self, config: Mamba3Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.base_model = config, Backbone(config, dtype)
        nn.init.normal_(self.base_model.embedding.weight, std=0.02)

    @property
    def device(self) -> torch.device:
        return self.base_model.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base_model.embedding.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Output:
        """Logits of all or the last tokens, and the loss if labels are given."""
        hidden, state, _ = self.base_model(input_ids, past_key_values, use_cache)
        logits = F.linear(hidden[:, -logits_to_keep:], self.base_model.embedding.weight)
        if labels is None:
            return Output(logits, state)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return Output(logits, state, loss)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, *, max_new_tokens: int) -> Tensor:
        """Decode greedily, token by token; return the prompts (B, T) and their continuations."""
        tokens, new, state = [input_ids], input_ids, None
        for _ in range(max_new_tokens):
            logits, state, _ = self(new, state, logits_to_keep=1)
            new = logits.argmax(-1)
            tokens.append(new)
        return torch.cat(tokens, 1)
