"""Examples in the docstrings of layers, models and operators run, given the tensors they name."""

import doctest
import importlib

import pytest
import torch
from torch import nn

from flash_frac.inference.sampling import SlotSettings
from flash_frac.layers import FracMixer
from flash_frac.models import FracForCausalLM

MIXER = FracMixer(32, num_heads=4)
CONTROLS = torch.rand(3, 2, 1024, 4, 16)
# Whatever else the examples of a module name; those of several ranks, a GPU or a trained model
# cannot run here.
NAMES = {
    "layers.delta": {},
    "layers.layer": {"nn": nn},
    "layers.mixer": {},
    "layers.mlp": {},
    "layers.sizes": {},
    "models.configuration": {"FracForCausalLM": FracForCausalLM},
    "ops.control.api": {
        "dyn_proj": MIXER.dyn_proj,
        "rw_proj": MIXER.rw_proj,
        "x": torch.randn(2, 10, 64),
        "u": torch.randn(2, 10, 64),
        "dt_bias": MIXER.dt_bias,
        "p_read": MIXER.read_residual_logit,
        "p_write": MIXER.write_residual_scale,
        "log_tau": MIXER.base_log_tau,
        "settings": MIXER.settings,
    },
    "ops.control.reference": {
        **dict(zip(("delta", "alpha", "lam"), torch.randn(3, 2, 10, 4), strict=True)),
        **dict(zip(("r", "w"), torch.randn(2, 2, 10, 4, 16), strict=True)),
        "log_tau": MIXER.base_log_tau,
        "u": torch.randn(2, 10, 4, 16),
    },
    "ops.delta.api": {
        "q": torch.randn(2, 1024, 4, 64),
        "v": torch.randn(2, 1024, 4, 8),
        "beta": torch.rand(2, 1024, 4),
        "log_decay": -torch.rand(2, 1024, 4),
    },
    "ops.loss.api": {
        "hidden": torch.randn(2, 10, 32, requires_grad=True),
        "lm_head": nn.Linear(32, 50),
        "labels": torch.ones(2, 10, dtype=torch.long),
    },
    "ops.norm.api": {
        "in_proj": MIXER.in_proj,
        "hidden": torch.randn(2, 10, 32),
        "scanned": torch.randn(2, 10, 4, 16),
        "weight": torch.ones(64),
        "mixer": MIXER,
        "u": torch.randn(2, 10, 4, 16),
    },
    "ops.sample.api": {
        "logits": torch.randn(2, 50),
        "settings": SlotSettings.empty(2, torch.device("cpu")),
        "seen": torch.zeros(2, 50, dtype=torch.bool),
    },
    "ops.scan.api": {
        "u": torch.randn(2, 1024, 4, 16),
        "read": CONTROLS[0],
        "write": CONTROLS[1],
        "log_decay": -CONTROLS[2],
    },
    "ops.swiglu.api": {
        "x": torch.randn(2, 10, 32),
        "gate_proj": nn.Linear(32, 64),
        "up_proj": nn.Linear(32, 64),
        "down_proj": nn.Linear(64, 32),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    module = importlib.import_module(f"flash_frac.{name}")
    names = {"torch": torch, "frac_scan": importlib.import_module("flash_frac.ops").frac_scan}
    found = doctest.testmod(module, extraglobs=names | NAMES[name])
    assert found.attempted and not found.failed
