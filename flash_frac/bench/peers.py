"""Models and operators to compare with, if they can be imported and run.

Models consist of the layers that their authors publish, as many as match the backbone size of the
given FRAC model, as in the paper. Operators have 16 heads.
Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_frac.bench.mamba3 import Mamba3Config, import_mamba_ssm
from flash_frac.bench.timing import attempt
from flash_frac.ops.testing import ScanInputs
from flash_frac.provenance import version_of

Given = TypeVar("Given")
Peer = TypeVar("Peer")


class ModelPeer(NamedTuple):
    """A causal language model: its configuration, a `note` on its kernels, and H, M, D.

    For CUDA graphs: `prefill_options` of its backbone, and a function that builds an empty
    fixed-size cache for a configuration and a number of tokens, if its own cache grows.
    """

    name: str
    config: Any
    note: str
    shape: Mapping[str, int | None]
    prefill_options: Mapping[str, Any] = MappingProxyType({})
    make_cache: Callable[[Any, int], Any] | None = None


class Operation(NamedTuple):
    """A function of tensors that returns y. `shape`: H, M, D; `is_scan`: whether y equals ours."""

    name: str
    shape: Mapping[str, int | None]
    function: Callable[..., Tensor]
    arguments: tuple[Tensor, ...]
    is_scan: bool = False

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.function(*self.arguments)

    def backward(self) -> list[Tensor]:
        """y and the gradients of its sum, including the forward pass."""
        leaves = [x.detach().requires_grad_() for x in self.arguments]
        y = self.function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def available(
    peers: Mapping[str, Callable[[Given], Peer]],
    names: Iterable[str],
    given: Given,
    failures: list[str],
) -> list[Peer]:
    """Build the peers in `names` that can be imported.

    Args:
        peers: MODEL_PEERS, built in the size of a FracConfig; or OP_PEERS, built with inputs of the
            batch and time of ScanInputs.
        failures: receives the reasons for the others.
    """
    made = (attempt(name, partial(peers[name], given), failures) for name in names)
    return [peer for found in made for peer in found]


def _sizes(frac: Any, layers: int = 48) -> dict[str, Any]:
    """Our vocabulary and width, and `layers` per 48 of our layers."""
    depth = max(1, frac.num_hidden_layers * layers // 48)
    return {
        "vocab_size": frac.vocab_size,
        "hidden_size": frac.hidden_size,
        "num_hidden_layers": depth,
    }


def qwen3(frac: Any) -> ModelPeer:
    """Layers of Qwen3-1.7B, 26 per 48 of ours."""
    from transformers import Qwen3Config, StaticCache

    heads = frac.num_attention_heads
    channels = frac.hidden_size // heads
    config = Qwen3Config(
        **_sizes(frac, 26),
        intermediate_size=3 * frac.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=channels,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    name = f"transformers {version_of('transformers')} Qwen3"
    # Otherwise a recorded forward would build a mask and not use sdpa's causal kernel.
    unmasked = {"attention_mask": {"full_attention": None}}
    shape = {"H": heads, "M": None, "D": channels}
    return ModelPeer(
        name, config, "sdpa", shape, unmasked, lambda config, size: StaticCache(config, size)
    )


def transformers_mamba2(frac: Any) -> ModelPeer:
    """transformers' Mamba2, which runs anywhere; as many layers as ours."""
    from transformers import Mamba2Config

    channels = 64
    heads = 2 * frac.hidden_size // channels
    config = Mamba2Config(
        **_sizes(frac),
        head_dim=channels,
        num_heads=heads,
        state_size=128,
        n_groups=1,
        tie_word_embeddings=True,
    )
    name = f"transformers {version_of('transformers')} Mamba2"
    return ModelPeer(name, config, "", {"H": heads, "M": 128, "D": channels})


def gated_deltanet(frac: Any) -> ModelPeer:
    """fla's layers, 22 per 48 of ours, with keys of 3/4 of the width and values of twice that."""
    fla = import_fla()
    from fla.models import GatedDeltaNetConfig  # pyright: ignore[reportMissingImports]

    heads = frac.num_attention_heads
    keys = frac.hidden_size * 3 // 4 // heads
    config = GatedDeltaNetConfig(
        **_sizes(frac, 22),
        num_heads=heads,
        head_dim=keys,
        expand_v=2,
    )
    shape = {"H": heads, "M": keys, "D": 2 * keys}
    return ModelPeer(f"fla {fla.__version__} GatedDeltaNet", config, "", shape)


def mamba2(frac: Any) -> ModelPeer:
    """fla's layers, as many as ours; they use mamba_ssm's kernels if it is installed."""
    fla = import_fla()
    from fla.layers.mamba2 import is_fast_path_available  # pyright: ignore[reportMissingImports]
    from fla.models import Mamba2Config  # pyright: ignore[reportMissingImports]

    heads = frac.num_attention_heads
    channels = 2 * frac.hidden_size // heads
    config = Mamba2Config(
        **_sizes(frac),
        head_dim=channels,
        state_size=128,
    )
    shape = {"H": heads, "M": 128, "D": channels}
    note = mamba_version() if is_fast_path_available else "without mamba_ssm"
    return ModelPeer(f"fla {fla.__version__} Mamba2", config, note, shape)


def mamba3(
    frac: Any, *, layers: int = 48, mimo_rank: int = 1, head_dim: int | None = None
) -> ModelPeer:
    """mamba_ssm's layers with as many heads as ours; `layers` per 48 of ours.

    Args:
        mimo_rank: inputs and outputs per head; 1 is the SISO variant.
        head_dim: channels per head; by default those for as many heads as ours.
    """
    import_mamba_ssm()
    channels = head_dim or 2 * frac.hidden_size // frac.num_attention_heads
    config = Mamba3Config(**_sizes(frac, layers), head_dim=channels, mimo_rank=mimo_rank)
    kind = "SISO" if mimo_rank == 1 else f"MIMO rank {mimo_rank}"
    shape = {"H": 2 * frac.hidden_size // channels, "M": config.state_size, "D": channels}
    return ModelPeer(f"{mamba_version()} Mamba3", config, f"{kind}, D {channels}", shape)


def mamba_version() -> str:
    """Name and version of mamba_ssm; sources on the path do not state a version."""
    return f"mamba_ssm {version_of('mamba_ssm') or 'from sources'}"


def import_fla() -> Any:
    """Import fla, after mamba_ssm: fla looks for it once on import and is silent on failure."""
    with suppress(ImportError):
        import_mamba_ssm()
    import fla  # pyright: ignore[reportMissingImports]

    return fla


MODEL_PEERS: dict[str, Callable[[Any], ModelPeer]] = {
    "qwen3": qwen3,
    "transformers_mamba2": transformers_mamba2,
    "gated_deltanet": gated_deltanet,
    "mamba2": mamba2,
    "mamba3": mamba3,
    # Use the head sizes that its kernels are designed for.
    "mamba3_d64": partial(mamba3, head_dim=64),
    "mamba3_mimo": partial(mamba3, layers=44, mimo_rank=4),
}


def gated_linear_attention(inputs: ScanInputs) -> Operation:
    """The same scan on the same inputs; its kernels need read and write in bfloat16."""
    fla = import_fla()
    from fla.ops.gla import chunk_gla  # pyright: ignore

    def scan(u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor) -> Tensor:
        options: Any = {"scale": 1.0, "output_final_state": True}
        return chunk_gla(q=read, k=write, v=u, g=log_decay, **options)[0]

    inputs = inputs.to(torch.bfloat16)
    heads, channels = inputs.u.shape[2:]
    modes = inputs.read.shape[-1]
    name = f"fla {fla.__version__} chunk_gla K{modes} V{channels}"
    return Operation(name, {"H": heads, "M": modes, "D": channels}, scan, inputs, True)


def gated_delta_rule(inputs: ScanInputs) -> Operation:
    fla = import_fla()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        options: Any = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta, **options)[0]

    heads, keys, values = 16, 96, 192
    q, k, v = (normal(inputs, heads, size) for size in (keys, keys, values))
    g = F.logsigmoid(normal(inputs, heads).float())
    arguments = (q, k, v, g, normal(inputs, heads).sigmoid())
    name = f"fla {fla.__version__} gated_delta_rule K{keys} V{values}"
    return Operation(name, {"H": heads, "M": keys, "D": values}, rule, arguments)


def state_space_dual(inputs: ScanInputs) -> Operation:
    import_mamba_ssm()
    from mamba_ssm.ops.triton import ssd_combined  # pyright: ignore[reportMissingImports]

    def scan(x: Tensor, dt: Tensor, rate: Tensor, write: Tensor, read: Tensor) -> Tensor:
        options: Any = {"chunk_size": 256, "return_final_states": True}
        return ssd_combined.mamba_chunk_scan_combined(x, dt, rate, write, read, **options)[0]

    heads, channels, size = 16, 256, 128
    x, dt = normal(inputs, heads, channels), F.softplus(normal(inputs, heads) - 4)
    rate = -torch.linspace(1, 16, heads, device=x.device)
    arguments = (x, dt, rate, normal(inputs, 1, size), normal(inputs, 1, size))
    name = f"{mamba_version()} SSD D{channels} N{size}"
    return Operation(name, {"H": heads, "M": size, "D": channels}, scan, arguments)


def attention(inputs: ScanInputs) -> Operation:
    heads, channels = 16, 128

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = (normal(inputs, heads, channels).transpose(1, 2).contiguous() for _ in range(3))
    name = f"torch {torch.__version__} causal SDPA D{channels}"
    return Operation(name, {"H": heads, "M": None, "D": channels}, attend, (q, k, v))


def normal(inputs: ScanInputs, *sizes: int) -> Tensor:
    """Random bfloat16 (B, T, *sizes), with batch, time and device of these inputs."""
    batch_time = inputs.u.shape[:2]
    return torch.randn(*batch_time, *sizes, device=inputs.u.device, dtype=torch.bfloat16)


OP_PEERS: dict[str, Callable[[ScanInputs], Operation]] = {
    "chunk_gla": gated_linear_attention,
    "gated_delta_rule": gated_delta_rule,
    "ssd": state_space_dual,
    "sdpa": attention,
}
