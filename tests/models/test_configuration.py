"""FracConfig: defaults, round trip, the committed sizes, and errors that name their field."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.recipes import find_config, installed_sizes
from tests.tiny import tiny_config

PARAMETERS = {
    "frac-1.3b": 1_385_075_808,
    "frac-390m": 390_549_600,
    "frac-130m": 125_271_984,
    "frac-30m": 46_261_280,
    "frac-dna": 3_247_632,
    "frac-tiny": 103_396,
}


def test_published_defaults():
    config = FracConfig()
    expected = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "frac_head_dim": 128,
        "frac_num_modes": 8,
        "frac_dt_min": 1e-4,
        "frac_dt_max": 1.0,
        "frac_alpha_min": 0.2,
        "frac_alpha_max": 0.95,
        "frac_tau_min": 1.0,
        "frac_tau_max": 65536.0,
        "frac_lambda_min": 0.25,
        "frac_lambda_max": 4.0,
        "frac_residual_read_init": -2.0,
        "frac_write_scale_init": 0.25,
        "frac_chunk_size": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    assert {key: getattr(config, key) for key in expected} == expected


def test_round_trip(tmp_path):
    config = FracConfig(
        hidden_size=32,
        num_attention_heads=4,
        frac_num_modes=3,
        frac_bank=[0.5, 2.0, 9.0],
        frac_prior="exact",
        frac_alpha_fixed=0.7,
        frac_use_D=False,
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is FracConfig
    assert loaded.to_dict() | {"_name_or_path": ""} == config.to_dict()


def test_every_size_is_counted():
    assert set(installed_sizes()) == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_committed_sizes(name):
    config = AutoConfig.from_pretrained(find_config(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model) is FracForCausalLM
    assert model.num_parameters() == PARAMETERS[name]


def test_the_papers_390m_has_48_layers():
    """The paper's text says 36 layers, which make 301M parameters; 48 make the 390M it names."""
    config = AutoConfig.from_pretrained(find_config("frac-390m"))
    assert config.num_hidden_layers == 48
    config.num_hidden_layers = 36
    with torch.device("meta"):
        assert FracForCausalLM(config).num_parameters() == 301_104_456


def test_pure_multiscale_bank():
    """The ablation that removes every fractional bias, as its switches."""
    config = tiny_config(
        num_hidden_layers=1,
        frac_alpha_fixed=1.0,
        frac_read_prior=False,
        frac_write_prior=False,
        frac_learned_timescales=True,
    )
    model = FracForCausalLM(config)
    names = dict(model.named_parameters())
    assert "model.layers.0.mixer.base_log_tau" in names
    ids = torch.randint(3, 16, (1, 9))
    model(ids, labels=ids).loss.backward()
    assert names["model.layers.0.mixer.base_log_tau"].grad.abs().max() > 0


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_size": 10.5}, "hidden_size must be a positive integer, got 10.5"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive integer"),
        (
            {"num_attention_heads": 7},
            r"intermediate_size \(1536\) must be num_attention_heads \(7\)",
        ),
        ({"frac_head_dim": 100}, r"times frac_head_dim \(100\)"),
        ({"intermediate_size": 1000}, r"intermediate_size \(1000\) must be"),
        ({"frac_alpha_min": 0.0}, "alpha_min .* got 0.0"),
        ({"frac_alpha_max": 1.5}, "alpha_max .* 1.5"),
        ({"frac_tau_min": 10.0, "frac_tau_max": 10.0}, "0 < frac_tau_min < frac_tau_max, got 10.0"),
        ({"frac_lambda_min": -1.0}, "lambda_min"),
        ({"frac_dt_min": 2.0}, "dt_min"),
        ({"frac_time_dilation": 0.5}, "frac_time_dilation must be at least 1, got 0.5"),
        ({"frac_dt_init": 2.0}, r"frac_dt_init must be None or in \[frac_dt_min, frac_dt_max\]"),
        ({"frac_write_scale_init": 0.0}, r"frac_write_scale_init must be in \(0, 1\), got 0.0"),
        ({"frac_bank": "unknown"}, "unknown"),
        ({"frac_bank": [1.0, 2.0]}, "2"),
        ({"frac_prior": "flat"}, "prior must be one of"),
        ({"frac_prior": "exact", "frac_learned_timescales": True}, "frac_learned_timescales needs"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"frac_num_mode": 4}, "unknown arguments frac_num_mode"),
    ],
)
def test_wrong_values(wrong, match):
    with pytest.raises(ValueError, match=match):
        FracConfig(**wrong)
