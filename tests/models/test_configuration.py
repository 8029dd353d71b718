"""FracConfig: defaults, round trip, the committed sizes, and errors that name their field."""

import json
import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mamba2ForCausalLM

from flash_frac import quickstart
from flash_frac.layers import DeltaMixer, FracMixer
from flash_frac.models import FracConfig, FracForCausalLM, configuration
from flash_frac.models.block import mixer_from_config
from flash_frac.models.loading import load_model
from flash_frac.recipes import find_config, installed_sizes
from tests.tiny import tiny_config

PARAMETERS = {
    "frac-1.3b": 1_385_075_808,
    "frac-390m": 390_549_600,
    "frac-130m": 125_271_984,
    "frac-30m": 46_261_280,
    "frac-mixed-1.3b": 1_378_316_964,
    "frac-mixed-130m": 126_050_370,
    "frac-mixed-30m": 46_205_900,
    "frac-delta-1.3b": 1_386_845_408,
    "frac-delta-30m": 46_014_610,
    "frac-mini": 7_946_494,
    "transformer-1.3b": 1_374_274_048,
    "gated-deltanet-1.3b": 1_382_529_856,
    "mamba2-1.3b": 1_301_577_984,
    "frac-dna": 3_247_632,
    "frac-tiny": 103_396,
}


def test_defaults():
    config = FracConfig()
    expected = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "frac_head_dim": 128,
        "frac_num_modes": 16,
        "frac_dt_min": 1e-4,
        "frac_dt_max": 1.0,
        "frac_alpha_min": 0.2,
        "frac_alpha_max": 0.95,
        "frac_tau_min": 1.0,
        "frac_tau_max": 131072.0,
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


def test_defaults_are_those_of_the_layer():
    """The mixer of a default model is a default mixer of its width."""
    ours = mixer_from_config(FracConfig())
    alone = FracMixer(768)
    assert repr(ours) == repr(alone) and ours.settings == alone.settings
    for name, value in ours.initial_time_values().items():
        assert torch.equal(value, alone.initial_time_values()[name]), name
    delta = mixer_from_config(FracConfig(mixer_types=["delta"]), "delta")
    assert repr(delta) == repr(DeltaMixer(768, norm_eps=1e-6))


def test_files_name_their_bank(tmp_path):
    """So that no default decides how a checkpoint loads: all committed sizes, and what we save."""
    files = [find_config(size) / "config.json" for size in installed_sizes()]
    for file in [*files, Path(quickstart.__file__).parent / "config.json"]:
        stored = json.loads(file.read_text())
        if stored["model_type"] == "frac" and "frac" in stored.get("mixer_types", ["frac"]):
            assert {"frac_num_modes", "frac_tau_max"} <= set(stored), file
    FracConfig().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["frac_num_modes"], stored["frac_tau_max"]) == (16, 131072.0)
    older = tiny_config(frac_num_modes=8, frac_tau_max=65536.0)
    older.save_pretrained(tmp_path)
    loaded = FracConfig.from_pretrained(tmp_path)
    assert (loaded.frac_num_modes, loaded.frac_tau_max) == (8, 65536.0)


def test_round_trip(tmp_path):
    config = FracConfig(
        hidden_size=32,
        num_attention_heads=4,
        frac_num_modes=3,
        frac_bank=[0.5, 2.0, 9.0],
        frac_prior="exact",
        frac_alpha_fixed=0.7,
        frac_use_D=False,
        frac_rw_norm=True,
        frac_beta="equal_variance",
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
    assert type(model) is (Mamba2ForCausalLM if name == "mamba2-1.3b" else FracForCausalLM)
    assert model.num_parameters() == PARAMETERS[name]


def test_mixed_sizes_are_near_their_names():
    """As near as those of Frac alone: 30m without embeddings, 1.3b with them."""
    for kind in ("mixed", "delta"):
        for size in ("30m", "1.3b"):
            same = PARAMETERS[f"frac-{kind}-{size}"] / PARAMETERS[f"frac-{size}"]
            assert 0.99 < same < 1.01
    types = FracConfig.from_pretrained(find_config("frac-mixed-1.3b")).mixer_types
    assert types == ["frac", "frac", "frac", "attention"] * 6


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
        ({"hidden_size": 256}, r"intermediate_size \(512\) .* \(42\); num_attention_heads=4 fits"),
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
        ({"frac_beta": "variance"}, "beta must be one of .*'equal_variance'.* got 'variance'"),
        ({"frac_rw_norm": 1}, "frac_rw_norm must be true or false, got 1"),
        ({"frac_bank": [1.0, 2.0]}, "2"),
        ({"frac_prior": "flat"}, "prior must be one of"),
        ({"frac_prior": "exact", "frac_learned_timescales": True}, "frac_learned_timescales needs"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"frac_num_mode": 4}, r"no field frac_num_mode; did you mean frac_num_modes\?"),
        ({"d_model": 64}, r"no field d_model; did you mean hidden_size\?"),
        ({"num_hiden_layers": 2}, r"no field num_hiden_layers; did you mean num_hidden_layers\?"),
        ({"trap_door": 2}, r"no field trap_door; see help\(FracConfig\)"),
        ({"per_layer_config": {0: {"frac_num_modes": 4}}}, "no field per_layer_config"),
        ({"model_type": "qwen3"}, "model_type must be 'frac', got 'qwen3'"),
        ({"frac_num_modes": "8"}, "frac_num_modes must be a positive integer, got '8'"),
        ({"frac_tau_max": "1e5"}, "frac_tau_max must be a finite number, got '1e5'"),
        ({"frac_use_D": "no"}, "frac_use_D must be true or false, got 'no'"),
        ({"frac_bank": 3}, "frac_bank must be text or a list of finite numbers, got 3"),
        ({"frac_dt_init": [1.0]}, "frac_dt_init must be a finite number or None"),
        ({"intermediate_size": 96.0}, "intermediate_size must be a whole number or None, got 96.0"),
    ],
)
def test_wrong_values(wrong, match):
    with pytest.raises(ValueError, match=match):
        FracConfig(**wrong)


# Any number will do: constants that are added to logits.
FREE = {"frac_residual_read_init", "frac_gate_bias_init"}


def numeric_fields():
    for name, kind in FracConfig.__annotations__.items():
        if ("int" in str(kind) or "float" in str(kind)) and "dict" not in str(kind):
            yield name


@pytest.mark.parametrize("name", [*numeric_fields()])
def test_every_number_has_a_range(name):
    """Below it, and without any meaning; a field that is added is tried as well."""
    mixed = {"mixer_types": ["frac", "attention", "sliding_attention", "delta"]}
    fitting = {"num_hidden_layers": 4, "sliding_window": 4, "attention_temperature_length": 8}
    values = [-1, math.nan, math.inf, -math.inf, -1e-30, 1 - 1e9]
    for value in values:
        if name in FREE and math.isfinite(value):
            continue
        for others in ({}, mixed | fitting):
            with pytest.raises(ValueError, match=name.removeprefix("frac_")):
                FracConfig(**others | {name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": 0},
        {"rms_norm_eps": 1.5},
        {"attention_dropout": 1.0},
        {"eos_token_id": [2, -1]},
        {"vocab_size": 259, "pad_token_id": 259},
        {"vocab_size": 259, "bos_token_id": 10**6},
        {"vocab_size": 259, "eos_token_id": [2, 259]},
        {"frac_bank": [1.0, math.nan] * 4},
        {"mixer_types": ["attention"], "attention_rope_parameters": {"rope_theta": -1.0}},
        {"mixer_types": ["attention"], "attention_rope_parameters": {"rope_theta": math.nan}},
    ],
)
def test_values_at_the_ends(wrong):
    with pytest.raises(ValueError, match=[*wrong][-1]):
        FracConfig(**wrong)


def test_an_epsilon_of_one_is_accepted():
    """transformers' own tests set it, so that all of a norm's output depends on it."""
    assert FracConfig(rms_norm_eps=1.0).rms_norm_eps == 1


def test_a_checkpoint_with_settings_that_make_no_sense(tmp_path):
    FracForCausalLM(tiny_config()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": -1}))
    with pytest.raises(ValueError, match=r"rms_norm_eps must be in \(0, 1\], got -1"):
        FracForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be loaded: rms_norm_eps must be"):
        load_model(tmp_path)


GENERIC = {
    "architectures": ["FracForCausalLM"],
    "attn_implementation": "eager",
    "auto_map": {"AutoConfig": "modeling_frac.FracConfig"},
    "_commit_hash": "0123",
    "_name_or_path": "somewhere",
    "is_decoder": True,
    "num_labels": 5,
    "output_attentions": False,
    "quantization_config": {"quant_method": "torchao"},
    "temperature": 0.5,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
}


def test_names_of_transformers_are_accepted(tmp_path):
    """What transformers itself passes, writes or once wrote."""
    config = FracConfig(**GENERIC)
    assert config.dtype == torch.bfloat16 and config.num_labels == 5
    assert FracConfig(**config.to_dict()).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert loaded.quantization_config == GENERIC["quantization_config"]


def test_fields_that_are_changed_on_loading(tmp_path):
    """They are checked, and what follows from them is computed from them."""
    (tmp_path / "config.json").write_text('{"model_type": "frac", "hidden_size": 32}')
    config, unused = FracConfig.from_pretrained(
        tmp_path,
        hidden_size=48,
        num_attention_heads=4,
        return_unused_kwargs=True,
        device_map="cpu",
        trust_remote_code=False,
    )
    assert (config.intermediate_size, config.frac_head_dim) == (96, 24)
    assert unused == {"device_map": "cpu"}
    for load in (FracConfig, AutoConfig):
        for name, right in (("frac_nummodes", "frac_num_modes"), ("hiden_size", "hidden_size")):
            with pytest.raises(ValueError, match=rf"no field {name}; did you mean {right}\?"):
                load.from_pretrained(tmp_path, **{name: 8})
    with pytest.raises(ValueError, match="frac_num_modes must be a positive integer, got '8'"):
        FracConfig.from_pretrained(tmp_path, frac_num_modes="8")
    assert FracConfig.from_pretrained(tmp_path, frac_expand=3.0).intermediate_size == 96
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="frac_expand has no effect if intermediate_size is"):
        FracConfig.from_pretrained(tmp_path, frac_expand=3.0)


def test_files_of_others(tmp_path):
    """A misspelt name and another model's type are refused; a tool's note is kept, and named."""
    path = tmp_path / "config.json"
    for name in ("d_model", "vocabsize", "frac_dt"):
        path.write_text(f'{{"model_type": "frac", "{name}": 64}}')
        with pytest.raises(ValueError, match=f"no field {name}"):
            AutoConfig.from_pretrained(tmp_path)
    path.write_text('{"model_type": "qwen3", "hidden_size": 64}')
    with pytest.raises(ValueError, match="model_type must be 'frac', got 'qwen3'"):
        FracConfig.from_pretrained(tmp_path)
    path.write_text('{"model_type": "frac", "tool_version": "1.0"}')
    with mock.patch.object(configuration.logger, "warning") as warning:
        config = AutoConfig.from_pretrained(tmp_path)
    assert config.tool_version == "1.0" and "no field tool_version" in warning.call_args[0][0]
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).tool_version == "1.0"


def test_a_near_name_beside_the_right_one_is_kept():
    """transformers' own tools write names of other families next to ours; alone it is refused."""
    whole = FracConfig().to_dict()
    assert FracConfig.from_dict(whole | {"norm_eps": 1.0}).rms_norm_eps == FracConfig().rms_norm_eps
    del whole["rms_norm_eps"]
    with pytest.raises(ValueError, match="no field norm_eps; did you mean rms_norm_eps"):
        FracConfig.from_dict(whole | {"norm_eps": 1.0})


def test_another_number_of_layers():
    """Types that all agree follow it; a list of different ones does not say what to repeat."""
    config = FracConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=61)
    config.num_hidden_layers = 3
    model = FracForCausalLM(config).eval()
    assert config.layer_types == ["linear_attention"] * 3 and len(model.model.layers) == 3
    assert len(model(torch.tensor([[3, 4]])).past_key_values.layers) == 3
    config.mixer_types, config.num_hidden_layers = ["frac", "delta", "frac"], 4
    with pytest.raises(ValueError, match=r"num_hidden_layers \(4\) needs mixer_types too"):
        FracForCausalLM(config)


def test_stored_layer_types(tmp_path):
    stored = FracConfig(num_hidden_layers=2, mixer_types=["frac", "attention"]).to_dict()
    types = ["linear_attention", "full_attention"]
    assert FracConfig.from_dict(stored | {"layer_types": types}).layer_types == types
    with pytest.raises(ValueError, match=r"layer_types must be .* set mixer_types instead"):
        FracConfig.from_dict(stored | {"layer_types": types[::-1]})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear", "factor": 2.0}, "must name its kind rope_type"),
        ({"partial_rotary_factor": 0.5}, "have no partial_rotary_factor but 1"),
        ({"rope_type": "linear"}, "must have a factor for rope_type 'linear'"),
    ],
)
def test_rotary_settings_that_do_nothing(rope, message):
    with pytest.raises(ValueError, match=message):
        FracConfig(mixer_types=["attention"], attention_rope_parameters=rope)
