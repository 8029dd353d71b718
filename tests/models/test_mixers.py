"""The list of layer types: what it accepts, what it refuses by name, and older checkpoints."""

import json

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from flash_frac.models import FracConfig, FracForCausalLM
from tests.models.conftest import SIZES
from tests.models.hybrids import close, make_hybrid, make_kind

# Fields that checkpoints had not before there was a list of layers.
NEW = (
    *("mixer_types", "mlp_intermediate_size", "attention_positions", "sliding_window"),
    *("attention_temperature_length", "attention_temperature_slope"),
    *("delta_num_heads", "delta_head_dim", "delta_expand_v", "delta_conv_kernel"),
)
SLIDING = {"mixer_types": ["frac", "sliding_attention"]}
ATTENTION = {"mixer_types": ["frac", "attention"]}
DELTA = {"mixer_types": ["frac", "delta"]}


def config_of(**changes):
    return FracConfig(**{**SIZES, "num_hidden_layers": 4, **changes})


def test_a_pattern_is_stored_expanded(tmp_path):
    config = config_of(num_hidden_layers=5, mixer_types=("frac", "frac", "attention"))
    assert config.mixer_types == ["frac", "frac", "attention", "frac", "frac"]
    assert config.attention_layers == [2]
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["mixer_types"] == config.mixer_types
    assert "attention_layers" not in stored and "layer_types" not in stored
    assert FracConfig.from_pretrained(tmp_path).mixer_types == config.mixer_types


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mixer_types": ["attn"]}, "unknown type 'attn'; did you mean attention"),
        ({"mixer_types": ["mamba"]}, "unknown type 'mamba'; the types are frac, delta, att"),
        ({"mixer_types": []}, r"mixer_types must have from 1 to .* \(4\) entries, got 0; pass"),
        ({"mixer_types": ["frac", "attention"] * 3}, r"\(4\) entries, got 6; pass one for each"),
        ({"mixer_types": "frac"}, "mixer_types must be a list of names or None, got 'frac'"),
        ({"mixer_types": [1]}, r"mixer_types must be a list of names or None, got \[1\]"),
        ({**ATTENTION, "attention_layers": [0]}, r"\(\[0\]\) must agree .* leave attention_layers"),
        ({"layer_types": ["full_attention"]}, "no field layer_types; did you mean mixer_types"),
        (SLIDING, "sliding_window must be the number of tokens .* got None"),
        ({**SLIDING, "sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({**SLIDING, "sliding_window": 2.5}, "sliding_window must be a whole number or None"),
        ({**ATTENTION, "sliding_window": 8}, r"sliding_window \(8\) needs .* leave it out"),
        ({"sliding_window": 8}, r"sliding_window \(8\) needs .* leave it out"),
        ({**ATTENTION, "attention_positions": "alibi"}, "must be 'rope' or 'none', got 'alibi'"),
        (
            {
                **ATTENTION,
                "attention_positions": "none",
                "attention_rope_parameters": {"rope_theta": 1.0},
            },
            "attention_rope_parameters must be None with attention_positions='none'",
        ),
        (
            {**ATTENTION, "attention_rope_parameters": {"rope_type": "lineal"}},
            "attention_rope_parameters has an unknown rope_type 'lineal'; use one of default, lin",
        ),
        ({**ATTENTION, "attention_temperature_length": 1}, "must be at least 2, got 1"),
        ({**ATTENTION, "attention_temperature_length": 8.0}, "must be a whole number or None"),
        (
            {**ATTENTION, "attention_temperature_slope": 0.5},
            r"attention_temperature_slope \(0.5\) needs attention_temperature_length",
        ),
        (
            {
                **ATTENTION,
                "attention_temperature_length": 8,
                "attention_temperature_slope": -0.5,
            },
            "attention_temperature_slope must be at least 0, got -0.5",
        ),
        (
            {**SLIDING, "sliding_window": 8, "attention_temperature_length": 8},
            r"attention_temperature_length \(8\) needs a layer of type attention .* leave it out",
        ),
        ({**DELTA, "delta_num_heads": 0}, "delta_num_heads must be at least 1, got 0"),
        ({**DELTA, "delta_num_heads": 5}, r"delta_head_dim must be given, because 3/4 .* \(5\)"),
        ({**DELTA, "delta_head_dim": -1}, "delta_head_dim must be at least 1, got -1"),
        ({**DELTA, "delta_expand_v": 0.3}, r"delta_expand_v times delta_head_dim \(6\) must be"),
        ({**DELTA, "delta_conv_kernel": 0}, "delta_conv_kernel must be at least 1, got 0"),
        ({"mlp_intermediate_size": 0}, "mlp_intermediate_size must be at least 1"),
        ({"mlp_intermediate_size": 2.0}, "mlp_intermediate_size must be a whole number or None"),
    ],
)
def test_wrong_settings_name_field_and_remedy(changes, match):
    with pytest.raises(ValueError, match=match):
        config_of(**changes)


def test_another_number_of_layers(tmp_path):
    """A checkpoint whose layers differ needs a new list, one whose layers are alike does not."""
    mixed = make_kind("no positions", torch.float32)
    mixed.save_pretrained(tmp_path / "mixed")
    for count in (2, 6):
        with pytest.raises(
            ValueError, match=rf"num_hidden_layers \({count}\) needs mixer_types too, .* pass"
        ):
            FracForCausalLM.from_pretrained(tmp_path / "mixed", num_hidden_layers=count)
    shorter = FracForCausalLM.from_pretrained(
        tmp_path / "mixed", num_hidden_layers=2, mixer_types=["frac", "attention"]
    )
    weights = mixed.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in shorter.state_dict().items())
    config_of(mixer_types=["attention"]).save_pretrained(tmp_path / "alike")
    longer = FracConfig.from_pretrained(tmp_path / "alike", num_hidden_layers=6)
    assert longer.mixer_types == ["attention"] * 6


@torch.no_grad()
def test_a_checkpoint_of_version_0(ids, tmp_path):
    """`attention_layers` alone: the rest is Frac, without MLP; attention blocks are Qwen3's."""
    model = make_hybrid(torch.float32)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    old = {name: value for name, value in fields.items() if name not in NEW}
    old |= {"attention_layers": [1, 3], "attention_intermediate_size": None}
    (tmp_path / "config.json").write_text(json.dumps(old))
    loaded, info = FracForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.mixer_types == ["frac", "attention"] * 2
    assert loaded.state_dict()["model.layers.3.mlp.up_proj.weight"].shape == (48, 16)
    assert not any("layers.2.mlp" in name for name in loaded.state_dict())
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    # Each attention block is the class that version 0 had there.
    seen = loaded(ids, output_hidden_states=True).hidden_states
    settings = loaded.config.attention_config()
    settings.intermediate_size, settings._attn_implementation = 48, "sdpa"
    position = torch.arange(40)[None]
    for n in (1, 3):
        block = Qwen3DecoderLayer(settings, n).eval()
        block.load_state_dict(loaded.model.layers[n].state_dict(), strict=True)
        angles = loaded.model.rotary_emb(seen[n], position)
        inputs = {"position_ids": position, "position_embeddings": angles}
        close(loaded.model.layers[n](seen[n], **inputs), block(seen[n], **inputs))
