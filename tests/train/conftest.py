"""A small text and a small model, to train in a second."""

import json
import random

import pytest
import yaml

TINY = {
    "model_type": "frac",
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "frac_num_modes": 4,
    "frac_tau_max": 1024.0,
    "fuse_linear_cross_entropy": True,
}


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """Forty documents of words that repeat, so that something can be learned."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["memory", "fades", "as", "a", "power", "law", "of", "time", "and", "not", "faster"]
    lines = []
    for _ in range(40):
        length = draw.randint(20, 400)
        lines.append({"text": " ".join(draw.choice(words) for _ in range(length))})
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def write_recipe(tmp_path, text_folder, cache_folder):
    """A function that writes a recipe of a few quick steps, with changes, and gives its path."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        values = {
            "config_name": str(tmp_path / "config.json"),
            "data_files": [str(text_folder)],
            "held_out": 0.1,
            "sequence_length": 64,
            "cache_dir": str(cache_folder),
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "learning_rate": "3e-3",
            "weight_decay": 0.1,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 1000,
            "memory_law_steps": 0,
            "disable_tqdm": True,
            "use_cpu": True,
            "report_to": "none",
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**values, **changes}))
        return path

    return write
