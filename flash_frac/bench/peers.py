"""Models to compare with, each only where it can be imported and run.

They are made of the layers their authors publish, as many as bring the backbone to the size of the
FRAC model given: the paper's choice. Letters: H heads, M modes (a peer's state size), D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from flash_frac.bench.timing import attempt
from flash_frac.provenance import version_of


class ModelPeer(NamedTuple):
    """A causal language model: its configuration, `note` on what runs in it, and H, M, D."""

    name: str
    config: Any
    note: str
    shape: Mapping[str, int | None]


def model_peers(names: Iterable[str], frac: Any, failures: list[str]) -> list[ModelPeer]:
    """Those of `names` that can be imported, in the size of the FracConfig `frac`."""
    made = (attempt(name, partial(MODEL_PEERS[name], frac), failures) for name in names)
    return [peer for found in made for peer in found]


def build(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A causal language model with random weights, made on the device and never elsewhere."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # generate is to run to the end, whatever the random weights come up with.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def qwen3(frac: Any) -> ModelPeer:
    """Layers of Qwen3-1.7B, 26 for 48 of ours."""
    from transformers import Qwen3Config

    heads = frac.num_attention_heads
    channels = frac.hidden_size // heads
    config = Qwen3Config(
        vocab_size=frac.vocab_size,
        hidden_size=frac.hidden_size,
        intermediate_size=3 * frac.hidden_size,
        num_hidden_layers=max(1, frac.num_hidden_layers * 26 // 48),
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=channels,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
    )
    name = f"transformers {version_of('transformers')} Qwen3"
    return ModelPeer(name, config, "sdpa", {"H": heads, "M": None, "D": channels})


def transformers_mamba2(frac: Any) -> ModelPeer:
    """Mamba2 as transformers has it, which runs anywhere; as many layers as ours."""
    from transformers import Mamba2Config

    channels = 64
    heads = 2 * frac.hidden_size // channels
    config = Mamba2Config(
        vocab_size=frac.vocab_size,
        hidden_size=frac.hidden_size,
        num_hidden_layers=frac.num_hidden_layers,
        head_dim=channels,
        num_heads=heads,
        state_size=128,
        n_groups=1,
        tie_word_embeddings=True,
    )
    name = f"transformers {version_of('transformers')} Mamba2"
    return ModelPeer(name, config, "", {"H": heads, "M": 128, "D": channels})


def gated_deltanet(frac: Any) -> ModelPeer:
    """fla's layers, 22 for 48 of ours, with keys of 3/4 of the width and values of twice that."""
    import fla  # pyright: ignore[reportMissingImports]
    from fla.models import GatedDeltaNetConfig  # pyright: ignore[reportMissingImports]

    heads = frac.num_attention_heads
    keys = frac.hidden_size * 3 // 4 // heads
    config = GatedDeltaNetConfig(
        vocab_size=frac.vocab_size,
        hidden_size=frac.hidden_size,
        num_hidden_layers=max(1, frac.num_hidden_layers * 22 // 48),
        num_heads=heads,
        head_dim=keys,
        expand_v=2,
    )
    shape = {"H": heads, "M": keys, "D": 2 * keys}
    return ModelPeer(f"fla {fla.__version__} GatedDeltaNet", config, "", shape)


def mamba2(frac: Any) -> ModelPeer:
    """fla's layers, as many as ours; their kernels are mamba_ssm's where that is installed."""
    import fla  # pyright: ignore[reportMissingImports]
    from fla.models import Mamba2Config  # pyright: ignore[reportMissingImports]

    heads = frac.num_attention_heads
    channels = 2 * frac.hidden_size // heads
    config = Mamba2Config(
        vocab_size=frac.vocab_size,
        hidden_size=frac.hidden_size,
        num_hidden_layers=frac.num_hidden_layers,
        head_dim=channels,
        state_size=128,
    )
    shape = {"H": heads, "M": 128, "D": channels}
    return ModelPeer(f"fla {fla.__version__} Mamba2", config, mamba_kernels(), shape)


def mamba_version() -> str:
    """mamba_ssm may also lie on the path as sources, which say nothing of their version."""
    return f"mamba_ssm {version_of('mamba_ssm') or 'from sources'}"


def mamba_kernels() -> str:
    """What fla's Mamba2 runs on: it takes another path, and says nothing, if this import fails."""
    try:
        from mamba_ssm.ops.triton import ssd_combined  # noqa: F401 # pyright: ignore
    except ImportError:
        return "without mamba_ssm"
    return mamba_version()


MODEL_PEERS: dict[str, Callable[[Any], ModelPeer]] = {
    "qwen3": qwen3,
    "transformers_mamba2": transformers_mamba2,
    "gated_deltanet": gated_deltanet,
    "mamba2": mamba2,
}
