"""Smoke tests of an installed flash-frac: python -I tests/smoke.py, in any folder but the clone.

They need only the package and its dependencies: no clone, no pytest, no extras.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch

import flash_frac

FRAC = Path(sys.executable).parent / "frac"
# One of each kind of file that is no Python.
CONTENTS = (
    "py.typed",
    "inspect/page/page.html",
    "quickstart/recipe.yaml",
    "quickstart/sotu.jsonl.xz",
    "recipes/frac-1.3b.yaml",
    "recipes/models/frac-1.3b/config.json",
    "theory/banks.json",
)


def frac(*words, expected=0):
    done = subprocess.run([FRAC, *words], capture_output=True, text=True)
    assert done.returncode == expected, (words, done.stdout, done.stderr)
    return done.stdout + done.stderr


def check_package():
    home = Path(flash_frac.__file__).parent
    assert home.is_relative_to(sys.prefix), f"{home} is not the installed package"
    assert version("flash-frac") == flash_frac.__version__
    assert frac("--version") == f"flash-frac {flash_frac.__version__}\n"
    missing = [name for name in CONTENTS if not files("flash_frac").joinpath(name).is_file()]
    assert not missing, missing


def check_layers():
    x = torch.randn(2, 30, 64)
    layer = flash_frac.FracMixer(64, num_heads=2, head_dim=64)
    first, state = layer(x[:, :20])
    rest, _ = layer(x[:, 20:], state=state)
    torch.testing.assert_close(torch.cat([first, rest], 1), layer(x)[0])


def check_model():
    from transformers import AutoModelForCausalLM

    from flash_frac.data import byte_tokenizer

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = flash_frac.FracForCausalLM(flash_frac.FracConfig(vocab_size=259, **sizes))
    ids = torch.randint(3, 259, (1, 20))
    model(ids, labels=ids).loss.backward()
    tokens = model.eval().generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 25)
    model.save_pretrained("my-frac")
    byte_tokenizer().save_pretrained("my-frac")
    again = AutoModelForCausalLM.from_pretrained("my-frac", trust_remote_code=True)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def check_commands():
    assert frac("generate", "my-frac", "--prompt", "To be", "--max-new-tokens", "5")
    assert "No problems found" in frac("doctor", "my-frac")
    frac("doctor", "--quick")
    frac("inspect", "my-frac", "--tokens", "64", "--out", "law")
    assert Path("law/index.html").exists()
    # This environment has no extras: the error names the one that is needed.
    assert "pip install 'flash-frac[train]'" in frac("train", "small", expected=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for check in (check_package, check_layers, check_model, check_commands):
            check()
            print(f"  {check.__name__} passed", flush=True)
