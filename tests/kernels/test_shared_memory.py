"""The largest launches fit into shared memory of GPUs other than Hopper, by compilation.

GPUs without their own tuning use `DEFAULT` (or `FLOAT32`) of the scan and of the delta rule; all
other launchers have one set of parameters. On CPU tensors the launchers choose the same.
"""

import pytest
import torch

from flash_frac.ops.arithmetic import INTERPRETED
from flash_frac.ops.backends import MOST_KEYS, MOST_VALUES, MOST_WIDTH
from flash_frac.ops.delta import plan as delta_plan
from flash_frac.ops.scan import tuning
from tests.kernels import test_compile as calls
from tests.kernels.launches import record

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves no compiler")

LOW, FULL = torch.bfloat16, torch.float32
KIB = 1024
# Compute capability, and bytes of shared memory that a program may ask for. L4 and RTX 4090 are of
# one kind, and share their compilations.
CARDS = {"A100": (80, 163 * KIB), "L4": (89, 99 * KIB), "RTX 4090": (89, 99 * KIB)}
CARDS |= {"B200": (100, 227 * KIB)}
# With the most modes, keys, values and widths that models have or kernels take.
WALKS = {
    "scan": lambda dtype: calls.scan(dtype, modes=32, channels=256),
    "delta": lambda dtype: calls.delta(dtype, keys=MOST_KEYS, channels=MOST_VALUES),
}
REST = {
    "step": calls.step,
    "delta decode": lambda dtype: calls.delta_decode(dtype, keys=MOST_KEYS, channels=MOST_VALUES),
    "controls": lambda dtype: calls.controls(dtype, modes=32),
    "conv": calls.conv,
    "norms": lambda dtype: calls.norms(dtype, size=MOST_WIDTH, skip=True),
    "swiglu": lambda dtype: calls.swiglu(dtype, size=MOST_WIDTH),
    "decode": lambda dtype: calls.decode(dtype, modes=32),
    "fused": calls.fused,
    "fused, few vectors": lambda dtype: calls.fused(dtype, num=8),
    "attend": lambda dtype: calls.attend(dtype, channels=256),
    "sample": lambda dtype: calls.sample(dtype, vocabulary=151_936),
    "loss": lambda dtype: calls.loss(dtype, vocabulary=151_936),
}


def assert_fits(monkeypatch, function, dtype, card):
    arch, memory = CARDS[card]
    launches = calls.distinct(monkeypatch, lambda: function(dtype), arch)
    assert launches
    for launch in launches:
        used = launch.compile().metadata.shared
        assert used <= memory, f"{launch.name} needs {used} bytes, {card} has {memory}"


# Its compiler takes longest, and an L4 has less than half of its memory.
LARGEST = pytest.param("B200", marks=pytest.mark.slow)


@pytest.mark.parametrize("card", ["A100", "L4", "RTX 4090", LARGEST])
def test_the_delta_rule_fits(monkeypatch, card):
    """Which needs most of all."""
    assert_fits(monkeypatch, WALKS["delta"], LOW, card)


@pytest.mark.parametrize("card", ["L4", "RTX 4090", LARGEST])
def test_the_scan_fits(monkeypatch, card):
    """An A100 runs the code of an L4, and has more memory."""
    assert_fits(monkeypatch, WALKS["scan"], LOW, card)


@pytest.mark.parametrize("card", ["L4", "RTX 4090"])
@pytest.mark.parametrize("case", REST)
def test_the_rest_fits(monkeypatch, case, card):
    """The others have more memory; `test_compile.py` compiles these for them, at usual sizes."""
    assert_fits(monkeypatch, REST[case], LOW, card)


def test_float32_fits(monkeypatch):
    """What needs most, on the card with the least memory."""
    assert_fits(monkeypatch, WALKS["delta"], FULL, "L4")


@pytest.mark.parametrize("channels", [128, 192])
def test_narrower_heads_launch_the_same_walks(monkeypatch, channels):
    """Blocks of channels are as wide, so that what fits for 256 channels fits for these."""

    def walks(channels):
        launches = record(monkeypatch, lambda: calls.scan(LOW, modes=32, channels=channels), 89)
        return {x.key for x in launches if x.name in ("states_kernel", "output_kernel")}

    assert walks(channels) == walks(256) != walks(16)


def test_too_much_is_seen(monkeypatch):
    monkeypatch.setitem(CARDS, "L4", (89, KIB))
    with pytest.raises(AssertionError, match=r"norm.* needs \d+ bytes, L4 has 1024"):
        assert_fits(monkeypatch, REST["norms"], LOW, "L4")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_only_hopper_has_parameters_of_its_own(monkeypatch, capability):
    """What is compiled here is what these cards launch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 7)
    for module in (tuning, delta_plan):
        chosen = getattr(module.tuning_for, "__wrapped__", module.tuning_for)(LOW, device)
        assert chosen == module.DEFAULT
        tuning._capability.cache_clear()
