"""What a run left in its folder."""

import torch
from safetensors.torch import load_file

from flash_frac.train.monitor import LOG_NAME, read_lines


def losses(folder):
    return [
        (line["step"], line["loss"]) for line in read_lines(folder / LOG_NAME) if "loss" in line
    ]


def weights(folder):
    return load_file(folder / "final" / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
