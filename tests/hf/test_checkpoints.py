"""Checkpoints in processes that import only transformers."""

import subprocess
import sys

import pytest
import torch

from flash_frac.models.export import export
from tests.models.conftest import make_model

pytestmark = pytest.mark.hf
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
print(f"{model(torch.arange(3, 30)[None]).logits.double().sum().item():.6f}")
"""


def assert_loads_in_new_processes(model, folder):
    """Without an import of flash_frac; saved again there, and loaded from that."""
    expected = model.eval()(torch.arange(3, 30)[None]).logits.double().sum().item()
    for _ in range(2):
        again = folder.with_name(f"{folder.name}-again")
        command = [sys.executable, "-c", LOAD, str(folder), str(again)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == f"{expected:.6f}"
        folder = again


def test_an_exported_checkpoint_loads_saves_and_loads(tmp_path):
    model = make_model(torch.float32)
    model.save_pretrained(tmp_path / "saved")
    assert_loads_in_new_processes(model, export(tmp_path / "saved", tmp_path / "exported"))
