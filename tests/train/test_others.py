"""Other model families with the same recipes: config.json selects the family."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2ForCausalLM, Qwen3ForCausalLM

from flash_frac.bench.memory import memory_row
from flash_frac.train import load_recipe, train
from flash_frac.train.dry_run import dry_run
from flash_frac.train.memory import GIB, count_parameters
from flash_frac.train.monitor import LOG_NAME, read_lines
from flash_frac.train.others import config_class_of, make_config, next_token_loss
from flash_frac.train.plan import plan_run
from tests.train.runs import assert_same_weights, finish, losses, start_together, weights

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
MAMBA2 = {
    "model_type": "mamba2",
    "vocab_size": 259,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 259,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture
def write_other(write_recipe, tmp_path):
    """A function that writes a recipe for a tiny model of another family, and gives its path."""

    def write(config, **changes):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "config.json").write_text(json.dumps(config))
        return write_recipe(config_name="other", **changes)

    return write


@pytest.mark.parametrize(
    ("config", "kind"),
    [(MAMBA2, Mamba2ForCausalLM), (QWEN3, Qwen3ForCausalLM)],
    ids=["mamba2", "qwen3"],
)
def test_the_family_that_is_named_is_trained(write_other, capsys, config, kind):
    path = write_other(config, max_steps=8, memory_law_steps=2, peak_tflops=1.0)
    result = train(load_recipe(path))
    assert type(result.model) is kind
    printed = capsys.readouterr().out
    assert f"parameters, {config['model_type']} of transformers" in printed
    assert "Not logged, because only Frac models have them: mfu, the memory law" in printed
    logs = read_lines(result.output_dir / LOG_NAME)
    assert not any("mfu" in log or "memory/horizon" in log for log in logs)
    first, *_, last = [log["loss"] for log in logs if "loss" in log]
    assert first == pytest.approx(math.log(259), abs=0.1) and last < first - 0.2
    loaded = AutoModelForCausalLM.from_pretrained(result.final)
    assert type(loaded) is kind and AutoTokenizer.from_pretrained(result.final).eos_token_id == 2
    # The held-out loss is that of the whole text.
    (evaluated,) = [log for log in logs if "eval_loss" in log]
    assert evaluated["eval_loss"] == pytest.approx(held_out_loss(loaded, result), rel=1e-5)


def held_out_loss(model, result):
    """Of windows of 64 tokens and the token after each, one by one."""
    store = result.splits.held_out
    tokens = torch.tensor(store.tokens(0, store.num_tokens).astype("int64"))
    total, count = 0.0, 0
    for start in range(0, len(tokens) - 1, 64):
        window = tokens[start : start + 65]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += F.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return total / count


def test_labels_are_not_shifted_twice():
    """The loss of logits that know the next token is nearly none."""
    labels = torch.tensor([[3, 1, 4, -100, 1, 5]])
    logits = 20.0 * F.one_hot(labels.clamp_min(0), 8).float()
    assert next_token_loss({"logits": logits}, labels) < 1e-6
    whole = next_token_loss({"logits": logits / 20}, labels)
    parts = [
        next_token_loss({"logits": logits[:, part] / 20}, labels[:, part], 5).item()
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert sum(parts) == pytest.approx(whole.item())


def test_resuming_is_exact(write_other, tmp_path):
    changes = {"lr_scheduler_type": "constant", "gradient_accumulation_steps": 2}
    path, cut = write_other(MAMBA2, max_steps=4, **changes), tmp_path / "cut"
    whole = train(load_recipe(path)).output_dir
    train(load_recipe(path, ["--output_dir", str(cut), "--max_steps=2"]))
    train(load_recipe(path, ["--output_dir", str(cut)]))
    assert losses(cut) == losses(whole) and len(losses(cut)) == 4
    assert_same_weights(weights(cut), weights(whole))
    with pytest.raises(ValueError, match=r"holds a run with other settings \(state_size 8 -> 4\)"):
        train(load_recipe(path, ["--config_overrides={state_size: 4}"]))


def test_two_ranks_give_the_losses_of_one(write_other, tmp_path):
    path = write_other(MAMBA2, max_steps=3)
    one = train(load_recipe(path, ["--per_device_train_batch_size=4"]))
    for process in start_together(2, path, "--fsdp=true", f"--output_dir={tmp_path / 'two'}"):
        finish(process)
    found = dict(losses(tmp_path / "two"))
    assert found == pytest.approx(dict(losses(one.output_dir)), rel=1e-5) and len(found) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"separate_documents": True}, "separate_documents needs a Frac model, but config_name has "
         "model_type 'mamba2': set separate_documents to false"),
        ({"stateful": True, "separate_documents": True}, "separate_documents needs a Frac model"),
        ({"compile_blocks": True}, "compile_blocks needs a Frac model"),
        ({"config_overrides": {"state_siz": 4}}, "no field state_siz; did you mean state_size"),
        ({"config_overrides": {"frac_num_modes": 4}}, "Mamba2Config has no field frac_num_modes"),
        ({"config_overrides": {"num_heads": 3}}, r"config_name .*num_heads \* head_dim"),
    ],
)  # fmt: skip
def test_what_only_frac_models_can_do_is_refused(write_other, changes, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(write_other(MAMBA2, **changes))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba3", "model_type 'mamba3' is not known; did you mean mamba"),
        ("vit", "model_type 'vit' has no causal language model"),
        (3, "model_type 3 is not known"),
    ],
)
def test_families_that_cannot_be_trained(write_other, model_type, message):
    with pytest.raises(ValueError, match=f"config_name .*: {message}"):
        load_recipe(write_other({"model_type": model_type}))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "bart"},
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "xlm", "causal": True},
    ],
)
def test_families_that_are_causal_when_asked(values):
    """The causal head of an encoder-decoder is on its decoder, which is causal anyway."""
    made = make_config(config_class_of(values), values, {})
    assert made.model_type == values["model_type"]


def test_context_parallel_is_refused(write_other):
    with pytest.raises(ValueError, match="context_parallel_size needs a Frac model"):
        load_recipe(write_other(MAMBA2), ["--context_parallel_size=2"], planned=2)


def test_a_plan_and_a_dry_run_say_what_they_know(write_other):
    path = write_other(MAMBA2)
    found = plan_run(load_recipe(path, ["--bf16=false"], planned=2))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_recipe(path).model.config())
    size = model.num_parameters()
    # Data parallel: gradients and their buckets.
    assert found.memory.kinds == {
        "weights": 4 * size, "optimizer": 8 * size, "gradients": 8 * size, "working memory": 0,
    }  # fmt: skip
    assert found.checkpoint_bytes == 12 * size and found.days is None
    text = "\n".join(found.lines())
    assert f"{size:,} parameters, mamba2 of transformers" in text
    assert "may fit in 140 GiB (95% usable); activations not counted" in text
    assert f"unknown for {found.steps} steps, {found.tokens:,} tokens" in text
    assert "note      activations and speed are planned for Frac models only: --max_steps" in text
    lines = dry_run(load_recipe(path))
    assert "parameters, mamba2 of transformers" in lines[0]
    assert any("activations not counted" in line for line in lines)
    assert any(line.startswith("batch     2 x 64 tokens") for line in lines)


def test_a_plan_of_the_mamba2_baseline():
    """Without FSDP2 its weights, gradients and optimizer alone do not fit 16 GB."""
    small = {"gpu_memory": 16}
    found = plan_run(load_recipe("mamba2-1.3b", planned=16), **small)
    assert found.setup.tokens_per_step == 2**20 and found.fits
    assert len(count_parameters(found.setup.config).layers) == 48
    alone = plan_run(load_recipe("mamba2-1.3b", ["--fsdp=false"], planned=16), **small)
    assert not alone.fits and alone.advice.startswith("set fsdp to true: ")
    one = plan_run(load_recipe("mamba2-1.3b", planned=1), **small)
    assert one.advice.startswith("weights and optimizer alone do not fit")


def test_what_mamba2_keeps_without_its_kernels():
    """Per token and layer at the true width, as docs/training.md says."""
    assert "mamba_ssm" not in sys.modules, "its kernels keep less"

    def kept(layers, length):
        fields = f"{{num_hidden_layers: {layers}, vocab_size: 259}}"
        recipe = load_recipe("mamba2-1.3b", [f"--config_overrides={fields}"], planned=1)
        model = AutoModelForCausalLM.from_config(recipe.model.config(), dtype=torch.float32)
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        ids = torch.zeros(1, length, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(keep, lambda x: x):
            model.backbone(input_ids=ids, use_cache=False)
        own = {x.untyped_storage()._cdata for x in model.parameters()}
        return sum(x.nbytes() for pointer, x in storages.items() if pointer not in own)

    with FakeTensorMode():
        one, two = (kept(n, 4096) - kept(n, 2048) for n in (1, 2))
    per_token = (two - one) / 2048
    assert per_token == pytest.approx(251e3, rel=0.01)
    assert "251 kB per token and layer" in PAGE and "at 4 x 4096 that is 184 GiB" in PAGE
    assert per_token * 48 * 4 * 4096 / GIB == pytest.approx(184, rel=0.01)


@pytest.mark.parametrize("config", [MAMBA2, QWEN3], ids=["mamba2", "qwen3"])
def test_the_memory_of_other_families_is_measured(write_other, tmp_path, text_folder, config):
    (tmp_path / "text").symlink_to(text_folder)
    row = memory_row(f"{write_other(config)} --use_cpu", tmp_path)
    assert row["planned_gib"] is None and row["tokens_per_s"] > 0
    assert row["parameters"] > 0
