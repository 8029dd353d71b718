"""Python code in a checkpoint runs only if the user allows it, and not because of a piped y."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flash_frac.data import byte_tokenizer
from tests.commands import frac, make_checkpoint
from tests.test_cli import COMMANDS, SAMPLES

# A model of one embedding, which leaves a file behind when its code is imported.
CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import GPT2Config, GPT2LMHeadModel

class OtherConfig(GPT2Config):
    model_type = "other"

class OtherModel(GPT2LMHeadModel):
    config_class = OtherConfig
"""


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "the code has run"


@pytest.fixture
def checkpoint(tmp_path, mark, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 259, "n_positions": 512, "n_embd": 8, "n_layer": 1, "n_head": 1}
    folder = tmp_path / "other"
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "other"}
    config["auto_map"] = {"AutoConfig": "code.OtherConfig"}
    config["auto_map"]["AutoModelForCausalLM"] = "code.OtherModel"
    config["architectures"] = ["OtherModel"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    return folder


OTHERS = {
    "doctor": (),
    "bench": ("--parts", "prefill", "--peers", "none", "--lengths", "16"),
    "export": ("copy",),
    "serve --sequential": ("--port", "0"),
}


@pytest.mark.parametrize("tokenizer", [(), ("--tokenizer", "bytes")], ids=["own", "bytes"])
@pytest.mark.parametrize("command", [*COMMANDS, *OTHERS])
def test_no_command_runs_it_for_a_piped_yes(command, tokenizer, checkpoint, mark, tmp_path):
    arguments = [checkpoint, *(COMMANDS | OTHERS)[command]]
    if command == "train":
        (tmp_path / "text.txt").write_text("some words " * 100)
        recipe = {"model_name_or_path": str(checkpoint), "data_files": ["text.txt"]}
        recipe |= {"output_dir": "run", "max_steps": 1, "use_cpu": True}
        recipe["tokenizer"] = "bytes" if tokenizer else str(checkpoint)
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        arguments = ["recipe.yaml"]
    elif command not in ("doctor", "bench", "export"):
        arguments += tokenizer
    done = frac(*command.split()[:1], *arguments, *command.split()[1:], stdin=b"y\n" * 9)
    assert done.returncode == 1 and not mark.exists()
    assert "Traceback" not in done.stderr
    if command not in ("doctor", "bench", "export"):
        assert "its own Python code, which is not run unless you trust it" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("frac: ")


def test_eval_runs_it_if_asked(checkpoint, mark):
    options = ("--suite", "lm", "--tasks", "piqa", "--data-dir", SAMPLES, "--limit", 1)
    done = frac("eval", checkpoint, *options, "--trust-remote-code")
    assert done.returncode == 0, done.stderr
    assert mark.exists()


class Code:
    """Pickled, it makes a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_code_in_pickled_weights(tmp_path, mark):
    folder = make_checkpoint(tmp_path / "model")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    command = ("generate", folder, "--prompt", "a", "--max-new-tokens", 1)
    assert frac(*command).returncode == 0
    torch.save({**tensors, "code": Code(mark)}, folder / "pytorch_model.bin")
    done = frac(*command)
    assert done.returncode == 1 and "Traceback" not in done.stderr and not mark.exists()
    assert f"checkpoint {folder} is refused: its pickled weights" in done.stderr
