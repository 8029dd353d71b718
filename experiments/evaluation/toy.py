"""A tiny model and a little data, for smoke tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from flash_frac.data import byte_tokenizer
from flash_frac.files import write_text
from flash_frac.models import FracConfig, FracForCausalLM

_SENTENCE = "A river keeps its course for years, and then leaves it in a night. "
_CHOICES = [
    {"goal": "To cross a river", "sol1": "Use a bridge.", "sol2": "Drink it.", "label": 0},
    {"goal": "To dry a towel", "sol1": "Wet it.", "sol2": "Hang it up.", "label": 1},
]


def toy_checkpoint(folder: Path) -> Path:
    """A folder with an untrained byte-level Frac model."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = FracConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        frac_num_modes=4,
    )
    FracForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def toy_data(folder: Path) -> Path:
    """Write local files for each suite."""
    text = _SENTENCE * 200
    write_text(folder / "niah" / "river.txt", text)
    write_text(folder / "longppl" / "river.jsonl", json.dumps({"text": text}) + "\n")
    lines = (json.dumps(choice) + "\n" for choice in _CHOICES)
    write_text(folder / "lm" / "piqa.jsonl", "".join(lines))
    return folder
