"""Recipes: everything is checked before a run starts."""

import tomllib
from pathlib import Path

import pytest

from flash_frac.recipes import find_config, find_recipe, installed_recipes, installed_sizes
from flash_frac.train import load_recipe
from flash_frac.train.arguments import FracTrainingArguments


def test_a_recipe_and_what_is_typed_beside_it(write_recipe):
    recipe = load_recipe(write_recipe(), ["--max-steps=9", "--learning_rate", "2e-4"])
    assert recipe.training.max_steps == 9 and recipe.training.learning_rate == 2e-4
    assert recipe.data.sequence_length == 64 and recipe.data.tokenizer == "bytes"


def test_a_number_that_yaml_takes_for_text(write_recipe):
    assert load_recipe(write_recipe()).training.learning_rate == 3e-3


def test_dictionaries_and_switches(write_recipe):
    path = write_recipe(
        config_overrides={"frac_num_modes": 8, "frac_tau_max": 2e3},
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs={"num_cycles": 2},
        bf16=False,
    )
    recipe = load_recipe(path, ["--gradient_checkpointing"])
    assert recipe.model.config_overrides == {"frac_num_modes": 8, "frac_tau_max": 2e3}
    assert recipe.training.lr_scheduler_kwargs == {"num_cycles": 2}
    assert recipe.training.gradient_checkpointing is True


@pytest.mark.parametrize(
    "text", ["{frac_num_modes: 8, frac_dt_max: 1e-1}", '{"frac_num_modes": 8}']
)
def test_mappings_on_the_command_line(write_recipe, text):
    """As a recipe has them, or as JSON; they add to those of the recipe."""
    path = write_recipe(config_overrides={"num_hidden_layers": 1, "frac_num_modes": 3})
    model = load_recipe(path, ["--config_overrides", text]).model
    assert (model.config().num_hidden_layers, model.config().frac_num_modes) == (1, 8)
    assert model.config().frac_dt_max == (0.1 if "dt" in text else 1.0)
    kwargs = ["--lr_scheduler_type=cosine", "--lr_scheduler_kwargs={num_cycles: 2}"]
    assert load_recipe(path, kwargs).training.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize("typed", [["--fsdp"], ["--fsdp", "true"], ["--fsdp=false"]])
def test_a_switch_with_a_value(write_recipe, monkeypatch, typed):
    """Sharding is left out in one process, so there must be two, or what looks like it."""
    monkeypatch.setattr(FracTrainingArguments, "__post_init__", lambda self: None)
    asked = load_recipe(write_recipe(fsdp=True), typed).training.fsdp
    assert asked is (typed != ["--fsdp=false"])
    assert load_recipe(write_recipe(fsdp=True)).training.fsdp is True


def test_a_source_on_the_command_line_replaces_the_other(write_recipe):
    stream = {"streaming": True, "shuffle_buffer": 9, "held_out_documents": 9, "held_out": None}
    path = write_recipe(dataset_name="someone/books", data_files=None, **stream)
    recipe = load_recipe(path, ["--data_files", "a", "b"])
    assert recipe.data.data_files == ["a", "b"] and recipe.data.dataset_name is None
    recipe = load_recipe(path, ["--held_out_files", "a"])
    assert recipe.data.held_out_documents is None and recipe.data.shuffle_buffer == 9
    recipe = load_recipe(path, ["--model-name-or-path=x"])
    assert recipe.model.model_name_or_path == "x" and recipe.model.config_name is None
    # Trainer would let the recipe's max_steps win.
    plain = write_recipe(max_steps=7)
    assert load_recipe(plain, ["--num_train_epochs", "2"]).training.max_steps == -1
    stream = {"streaming": True, "dataset_name": "someone/books", "data_files": None}
    shares = write_recipe(held_out=0.05, **stream)
    recipe = load_recipe(shares, ["--held_out_documents", "9"])
    assert (recipe.data.held_out, recipe.data.held_out_documents) == (0, 9)


def test_a_recipe_replaces_what_its_base_has(write_recipe, tmp_path):
    base = write_recipe(max_steps=7)
    (tmp_path / "own.yaml").write_text(f"base: {base.name}\nnum_train_epochs: 2\n")
    training = load_recipe(tmp_path / "own.yaml").training
    assert training.max_steps == -1 and training.num_train_epochs == 2


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"learning_rte": 1}, [], r"unknown key learning_rte; did you mean learning_rate\?"),
        ({}, ["--max_step=3"], r"unknown key max_step; did you mean max_steps\?"),
        (
            {"gradient_checkpointing_kwargs": {"polcy": "cheap"}},
            [],
            r"gradient_checkpointing_kwargs has no key polcy; did you mean policy\?",
        ),
        ({"learning_rate": "much"}, [], "learning_rate.*: invalid float value: 'much'"),
        ({"max_steps": 1.5}, [], "max_steps.*: invalid int value: '1.5'"),
        ({"eval_strategy": "often"}, [], "--eval_strategy"),
        ({"model_name_or_path": "x"}, [], "exactly one of config_name .* got both"),
        ({"config_name": None}, [], "exactly one of config_name .* got neither"),
        ({"data_files": None}, [], "exactly one of data_files, prepared_data and dataset_name"),
        ({"stateful": True}, [], "stateful needs separate documents"),
        ({"context_parallel_size": 2}, [], "context_parallel_size must divide the number of proc"),
        ({"memory_law_steps": -1}, [], "memory_law_steps must be 0 or more"),
        ({}, ["--max_steps", "-5"], "max_steps must be above 0, or -1 to train for num_train_ep"),
        ({"max_steps": 0}, [], "max_steps must be above 0"),
        ({"max_steps": -1, "num_train_epochs": 0}, [], "num_train_epochs must be above 0, got 0"),
        ({"gradient_accumulation_steps": 0}, [], "gradient_accumulation_steps must be above 0"),
        ({"save_steps": -3}, [], "save_steps must be above 0, got -3"),
        ({"weight_decay": -0.1}, [], "weight_decay must be 0 or more, got -0.1"),
        ({"learning_rate": "nan"}, [], "learning_rate must be 0 or more, got nan"),
        ({"max_grad_norm": None}, [], "max_grad_norm is null: leave it out for its default, 1.0"),
        (
            {"lr_scheduler_kwargs": {"num_cycle": 2}},
            [],
            r"lr_scheduler_kwargs \{'num_cycle': 2\}: .* argument 'num_cycle'",
        ),
        (
            {"fsdp_config": {"state_dict_typ": "x"}},
            [],
            r"fsdp_config has no key state_dict_typ; did you mean state_dict_type\?",
        ),
        ({"fsdp_config": {"version": 1}}, [], "fsdp_config: version must be 2, got 1: FSDP1"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"policy": "cheep"}},
            [],
            "policy of gradient_checkpointing_kwargs must be one of all, cheap, got 'cheep'",
        ),
        (
            {"gradient_checkpointing_kwargs": {"policy": "cheap"}},
            [],
            "has a policy, but gradient_checkpointing is off: set it to true",
        ),
        ({}, ["--fsdp", "full_shard"], "argument --fsdp: Truthy value expected: got full_shard"),
        (
            {"config_overrides": {"frac_nummodes": 8}},
            [],
            r"config_overrides: .* no field frac_nummodes; did you mean frac_num_modes\?",
        ),
        (
            {},
            ["--config_overrides", '{"frac_nummodes": 8}'],
            r"no field frac_nummodes; did you mean frac_num_modes\?",
        ),
        (
            {"config_overrides": {"frac_num_modes": "8"}},
            [],
            "frac_num_modes must be a positive integer, got '8'",
        ),
        ({}, ["--config_overrides", "frac_num_modes=8"], "config_overrides must be a mapping such"),
        ({}, ["--config_overrides={8: 1}"], "no field 8"),
        ({}, ["--config_overrides={a: [}"], "config_overrides.*: {a: .} is not a mapping"),
        (
            {"stateful": True, "separate_documents": True, "gradient_checkpointing": True},
            [],
            "stateful carries states .* set one of the two to false",
        ),
        (
            {"streaming": True, "dataset_name": "x", "data_files": None, "max_steps": -1},
            ["--held_out=0", "--held_out_documents=9"],
            "set max_steps",
        ),
        (
            {"streaming": True, "dataset_name": "x", "data_files": None, "held_out": 0.0},
            [],
            "eval_strategy is set, but no text is held out: set held_out_documents or held_out_f",
        ),
        ({"held_out": 0.0}, [], "no text is held out: set held_out or held_out_files"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_made(
    write_recipe, tmp_path, changes, overrides, message
):
    path = write_recipe(**changes)
    with pytest.raises(ValueError, match=message):
        load_recipe(path, overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["much", "-1"])
def test_the_recipe_is_not_blamed_for_what_is_typed(write_recipe, value):
    path = write_recipe()
    with pytest.raises(ValueError, match=r"^(argument --)?learning_rate"):
        load_recipe(path, ["--learning_rate", value])
    with pytest.raises(ValueError, match=f"^{path}: .*learning_rate"):
        load_recipe(write_recipe(learning_rate=value), ["--max_steps", "3"])


def test_a_configuration_of_another_model(write_recipe, tmp_path):
    path = write_recipe(config_name="other")
    (tmp_path / "other").mkdir()
    for text, message in (
        ('{"model_type": "qwen3", "head_dims": 8}', "config_name .*: Qwen3Config has no field"),
        ('{"model_type": "bert"}', "'bert' sees the tokens that it should predict: set is_decoder"),
        ('{"model_type": "xlm"}', "'xlm' sees the tokens that it should predict: set causal to"),
        ('{"model_type": "xlnet"}', "'xlnet' sees the tokens .* predict: choose a causal family"),
        ('{"model_type": "mixtral", "output_router_logits": true}', "output_router_logits must be"),
        ('{"n_layer": 3}', r"no field n_layer; did you mean num_hidden_layers\?"),
        ('{"tool_version": 3}', r"no field tool_version; see help\(FracConfig\)"),
        ("{", r"config_name: .*config\.json is not JSON: Expecting property name"),
        ("[1]", r"config_name: .*config\.json .*\[1\]"),
    ):
        (tmp_path / "other" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_recipe(path)


def test_no_recipe(tmp_path):
    with pytest.raises(ValueError, match="there is no recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold 'key: value' lines, got list"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match="is not YAML"):
        load_recipe(tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("max_steps: 1\nmax_steps: 2\n")
    with pytest.raises(ValueError, match="the key max_steps occurs twice"):
        load_recipe(tmp_path / "twice.yaml")


ROOT = Path(__file__).parents[2]
CPU = ["--use_cpu", "--bf16=false"]


@pytest.mark.parametrize(
    "recipe", [*installed_recipes(), *sorted(ROOT.glob("experiments/*/*.yaml"))], ids=str
)
def test_committed_recipes_are_valid(recipe, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe(recipe, CPU)
    assert loaded.model.config_name in installed_sizes()
    assert loaded.training.max_steps > 0


def test_a_recipe_by_name_or_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = find_recipe("small").read_text().replace("max_steps: 1000", "max_steps: 7")
    for name in ("small", "small.yaml", "mine"):
        Path(name).write_text(text.replace("models/frac-tiny", "frac-tiny"))
    assert load_recipe("small", CPU).training.max_steps == 1000
    for path in ("small.yaml", "./small", Path("small"), tmp_path / "small"):
        assert load_recipe(path, CPU).training.max_steps == 7
    with pytest.raises(ValueError, match=r"no recipe mine \(for the file .* write ./mine\)"):
        load_recipe("mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smal", r"no recipe smal; .*: frac-1.3b, frac-1.3b-40gb, frac-390m, .*small, stateful"),
        ("recipes/small.yaml", r"no recipe recipes/small.yaml \(.*: frac train small\)"),
        ("other.yaml", "no recipe other.yaml; .*small, stateful"),
        (".", r"no recipe \.; give the path of a YAML file"),
    ],
)
def test_a_recipe_that_is_not_there(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_recipe(name)


def test_paths_of_configurations(write_recipe, tmp_path, monkeypatch):
    """In a recipe they start from its folder, on the command line from the working directory."""
    work = tmp_path / "work"
    for folder in (tmp_path / "models" / "mine", work / "models" / "mine", work / "frac-30m"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.chdir(work)
    path = write_recipe(config_name="models/mine")
    assert load_recipe(path).model.config_name == str(tmp_path / "models" / "mine")
    typed = load_recipe(path, ["--config_name", "models/mine/config.json"]).model.config_name
    assert typed == str(work / "models" / "mine" / "config.json")
    assert load_recipe(path, ["--config_name=frac-30m"]).model.config_name == "frac-30m"
    assert load_recipe(path, ["--config_name=./frac-30m"]).model.config_name.startswith(str(work))
    assert load_recipe(write_recipe(config_name="frac-30m")).model.config_name == "frac-30m"


def test_a_recipe_that_changes_another(tmp_path, monkeypatch):
    """By name, or by a path from its own folder; paths in the other start from the other's."""
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "models"):
        (tmp_path / folder).mkdir()
    config = (find_config("frac-tiny") / "config.json").read_text()
    (tmp_path / "models" / "config.json").write_text(config)
    text = find_recipe("small").read_text().replace("models/frac-tiny", "models")
    (tmp_path / "other.yaml").write_text(text)
    recipe = tmp_path / "mine" / "recipe.yaml"
    recipe.write_text("base: small\nmax_steps: 7\n")
    loaded = load_recipe(recipe, ["--seed=3"])
    assert (loaded.training.max_steps, loaded.training.seed) == (7, 3)
    assert loaded.model.config_name == "frac-tiny" and loaded.training.learning_rate == 4e-3
    recipe.write_text("base: ../other.yaml\nmax_steps: 8\n")
    loaded = load_recipe(recipe)
    assert loaded.training.max_steps == 8
    assert loaded.model.config_name == str(tmp_path / "models")
    for text, message in (
        ("base: smal\n", r"recipe.yaml: base: there is no recipe smal; .* small, stateful"),
        ("base: none.yaml\n", r"recipe.yaml: base: there is no recipe .*mine/none.yaml"),
        ("base: frac-390m-40gb\n", "base .* has a base itself; name that one instead"),
        ("base: small\nmax_step: 1\n", r"unknown key max_step; did you mean max_steps\?"),
    ):
        recipe.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_recipe(recipe)


def test_a_configuration_that_is_not_there(write_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "empty").mkdir(parents=True)
    for name in ("models/none", "models/empty"):
        message = rf"config_name {name} was not found: {tmp_path}/{name} is .*frac-130m, frac-30m"
        with pytest.raises(ValueError, match=message):
            load_recipe(write_recipe(config_name=name))
    path = write_recipe(config_name="models/none")
    assert load_recipe(path, ["--config_name", "frac-tiny"]).model.config_name == "frac-tiny"
    with pytest.raises(ValueError, match=f"{tmp_path}/frac-30 is neither a file nor a folder"):
        load_recipe(path, ["--config_name", "frac-30"])


@pytest.mark.parametrize("suffix", ["", "-40gb"])
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("frac-1.3b", 100e9),
        ("frac-mixed-1.3b", 100e9),
        ("frac-delta-1.3b", 100e9),
        ("frac-390m", 30e9),
    ],
)
def test_the_papers_runs(name, tokens, suffix):
    """A million tokens a step, on 16 and on 8 GPUs, learning rate and decay as in the paper."""
    recipe = load_recipe(name + suffix, CPU)
    args = recipe.training
    gpus = 16 if name.endswith("1.3b") else 8
    sequences = gpus * args.per_device_train_batch_size * args.gradient_accumulation_steps
    step = sequences * recipe.data.sequence_length
    assert step == 2**20
    assert args.max_steps * step == pytest.approx(tokens, rel=1e-4)
    assert (args.learning_rate, args.weight_decay, args.warmup_steps) == (6e-4, 0.1, 0.1)


def test_recipes_are_packed_into_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "flash_frac"
    packed = {path for p in settings["package-data"]["flash_frac"] for path in package.glob(p)}
    recipes = [find_recipe(name) for name in installed_recipes()]
    sizes = [find_config(name) / "config.json" for name in installed_sizes()]
    assert recipes and sizes and {*recipes, *sizes} <= packed
