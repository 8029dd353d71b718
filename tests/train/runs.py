"""Training runs in separate processes, and the contents of their folders."""

import json
import random
import socket
import time
from functools import partial
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from flash_frac.train import run
from flash_frac.train.monitor import LOG_NAME, read_lines
from tests import commands

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


def no_curves(output_dir):
    """Draw nothing: the figure takes half of the time of a small run."""


def make_text(folder):
    """Forty documents of words that repeat, so that something can be learned."""
    draw = random.Random(0)
    words = ["memory", "fades", "as", "a", "power", "law", "of", "time", "and", "not", "faster"]
    lines = []
    for _ in range(40):
        length = draw.randint(20, 400)
        lines.append({"text": " ".join(draw.choice(words) for _ in range(length))})
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_recipe(folder, text, cache, **changes):
    """A recipe of a few quick steps, with changes, in a folder with its model; gives its path."""
    (folder / "config.json").write_text(json.dumps(TINY))
    values = {
        "config_name": str(folder / "config.json"),
        "data_files": [str(text)],
        "held_out": 0.1,
        "sequence_length": 64,
        "cache_dir": str(cache),
        "output_dir": str(folder / "run"),
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
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**values, **changes}))
    return path


def start(*arguments, before=None, **options):
    """Begin `frac train ARGUMENTS`, as `commands.start` does."""
    return commands.start("train", *arguments, before=partial(_prepare, before), **options)


def start_together(count, *arguments, only=None, before=None):
    """Begin `frac train` in several processes, as torchrun would; or in one of them alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    numbers = range(count) if only is None else [only]
    ranks = ({"RANK": rank, "LOCAL_RANK": rank} for rank in numbers)
    return [start(*arguments, environment={**world, **rank}, before=before) for rank in ranks]


def finish(process, timeout=300):
    """Wait for the end of a process, which must be a good one."""
    process.join(timeout)
    text, status = process.output.read_text(), process.exitcode
    process.kill()
    assert status == 0, text


def _prepare(before):
    run.draw_curves = no_curves
    if before is not None:
        before()


def await_checkpoint(folder, step):
    """Wait until a checkpoint is complete, which is written while the next steps are made."""
    deadline = time.time() + 120
    while not (Path(folder) / f"checkpoint-{step}").exists():
        assert time.time() < deadline, f"no checkpoint-{step} in {folder}"
        time.sleep(0.01)


def losses(folder):
    return [
        (line["step"], line["loss"]) for line in read_lines(folder / LOG_NAME) if "loss" in line
    ]


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
