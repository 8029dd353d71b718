"""The table of docs/serving.md: bytes per conversation, and conversations per GiB."""

from pathlib import Path

import pytest
import torch

from flash_frac.bench.peers import qwen3
from flash_frac.inference.state import empty_cache
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.recipes import find_config

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
LENGTHS = (1024, 4096, 65536)


def held(config, num_tokens):
    """Bytes of the states, keys and values of one sequence."""
    with torch.device("meta"):
        model = FracForCausalLM(config).to(torch.bfloat16)
    cache = empty_cache(model, 1)
    cache.reserve(num_tokens)
    cache.took([num_tokens])
    return cache.nbytes


def held_by_qwen3(config, num_tokens):
    peer = qwen3(config).config
    numbers = 2 * peer.num_hidden_layers * peer.num_key_value_heads * peer.head_dim
    return numbers * torch.bfloat16.itemsize * num_tokens


@pytest.mark.parametrize("name", ["frac-1.3b", "frac-delta-1.3b", "frac-mixed-1.3b", "Qwen3"])
def test_table(name):
    lines = (x for x in PAGE.read_text().splitlines() if x.startswith("| "))
    (line,) = (x for x in lines if name in x.split("|")[1])
    peer = name == "Qwen3"
    config = FracConfig.from_pretrained(find_config("frac-1.3b" if peer else name))
    sizes = [(held_by_qwen3 if peer else held)(config, n) for n in LENGTHS]
    _, _, megabytes, conversations, _ = line.split("|")
    assert megabytes.strip() == ", ".join(f"{size / 1e6:.1f}" for size in sizes)
    assert conversations.strip() == ", ".join(str(2**30 // size) for size in sizes)
