"""The memory of a layer, against the tensors that autograd keeps."""

import pytest

from flash_frac.models import FracConfig
from flash_frac.ops.scan.tuning import DEFAULT, FLOAT32
from flash_frac.recipes import find_config
from flash_frac.train.activations import Batch, Precision, layer_memory
from flash_frac.train.memory import Setup, memory_of
from tests.train.kept import kept_bytes, peak_bytes

AUTOCAST = Precision(compute=2, residual=4, casts=True)
PLAIN = Precision(compute=4, residual=4, casts=False)
LAYERS = {
    "1.3B": ("frac-1.3b", "frac", {}),
    "390M": ("frac-390m", "frac", {}),
    "8 modes": ("frac-30m", "frac", {"frac_num_modes": 8}),
    "fixed alpha": ("frac-30m", "frac", {"frac_alpha_fixed": 0.5}),
    "logit norms": ("frac-30m", "frac", {"frac_rw_norm": True}),
    "exact prior": ("frac-30m", "frac", {"frac_prior": "exact"}),
    "own banks": ("frac-30m", "frac", {"frac_bank": "per_head", "frac_beta": "equal_variance"}),
    "exact prior, fixed alpha": (
        "frac-30m",
        "frac",
        {"frac_prior": "exact", "frac_alpha_fixed": 0.5},
    ),
    "dilation": ("frac-1.3b", "frac", {"frac_time_dilation": 16.0}),
    "dilation of equal variance": (
        "frac-30m",
        "frac",
        {"frac_time_dilation": 16.0, "frac_beta": "equal_variance"},
    ),
    "frac, MLP": ("frac-mixed-1.3b", "frac", {}),
    "delta": ("frac-delta-1.3b", "delta", {}),
    "small delta": ("frac-delta-30m", "delta", {}),
    "attention": ("frac-mixed-1.3b", "attention", {}),
    "rotary": ("frac-mixed-1.3b", "attention", {"attention_positions": "rope"}),
    "key heads": ("frac-mixed-1.3b", "attention", {"attention_key_value_heads": 4}),
    "sliding": ("frac-mixed-1.3b", "sliding_attention", {"sliding_window": 256}),
    "wide window": ("frac-mixed-1.3b", "sliding_attention", {"sliding_window": 768}),
}


def config_of(name, count, fields):
    size, mixer, changes = LAYERS[name]
    return FracConfig.from_pretrained(
        find_config(size), mixer_types=[mixer] * count, num_hidden_layers=count, **changes, **fields
    )


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_forward_pass_keeps_what_is_counted(monkeypatch, name, autocast):
    """True widths, and the difference of two layers and one: what one layer keeps."""
    batch, length = 2, 1024
    one, two = (
        kept_bytes(monkeypatch, config_of(name, n, {}), batch, length, autocast=autocast)
        for n in (1, 2)
    )
    precision, tuning = (AUTOCAST, DEFAULT) if autocast else (PLAIN, FLOAT32)
    shape = Batch(tokens=batch * length, length=length)
    layer = layer_memory(config_of(name, 1, {}), 0, precision, shape, tuning=tuning)
    copies = precision.compute * ((layer.cast if precision.casts else 0) + layer.joined)
    counted = batch * length * layer.bytes_per_token + layer.states + copies
    assert counted == pytest.approx(two - one, rel=0.002)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("frac-mixed-30m", None),
        ("frac-delta-30m", "all"),
        ("frac-mixed-30m", "cheap"),
        ("frac-delta-30m", "cheap"),
    ],
)
def test_a_step_needs_what_is_counted(monkeypatch, name, policy):
    """At its highest moment, which here is outside of the kernels: in the backward of an MLP."""
    config = FracConfig.from_pretrained(find_config(name))
    setup = Setup(
        config=config,
        gpus=1,
        batch=16,
        accumulation=1,
        length=4096,
        half=True,
        sharded=False,
        recompute=policy is not None,
        policy=policy or "all",
        moments=0,
    )
    counted = memory_of(setup)
    assert counted.moment == "backward"
    peak = peak_bytes(monkeypatch, config, 16, 4096, policy=policy)
    assert counted.peak == pytest.approx(peak, rel=0.01)
