"""Runs from recipe to checkpoint: what they write, what they learn, how they end."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import flash_frac.models  # noqa: F401  (registers the model)
from flash_frac.train import FracTrainer, decayed_parameters, load_recipe, train
from flash_frac.train.flops import training_flops
from flash_frac.train.monitor import LOG_NAME, read_lines
from flash_frac.train.nonfinite import NotFiniteError
from tests.commands import frac
from tests.tiny import tiny_config
from tests.train.runs import losses


def test_what_a_run_says_at_its_start(write_recipe, tmp_path, capsys):
    resuming = "Resuming from .*/checkpoint-2 at step 3, skipping the 256 tokens before it"
    for steps, last in ((2, f"New run in {tmp_path}/run"), (3, resuming)):
        result = train(load_recipe(write_recipe(max_steps=steps, eval_strategy="no")))
        model, text, held_out, beginning = capsys.readouterr().out.splitlines()[:4]
        assert model == f"Model: {result.model.num_parameters():,} parameters, layers: 2 frac"
        store = result.splits.train
        counts = f"{store.num_tokens:,} tokens in {store.num_documents} documents"
        assert text == f"Training text: {counts}" and held_out.startswith("Held out: ")
        assert re.fullmatch(last, beginning)


def test_what_a_run_leaves(write_recipe, tmp_path):
    changes = {"eval_steps": 3, "report_to": "tensorboard"}
    result = train(load_recipe(write_recipe(memory_law_steps=3, **changes)))
    run = tmp_path / "run"
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    ids = model.generate(**tokenizer("memory", return_tensors="pt"), max_new_tokens=5)
    assert tokenizer.decode(ids[0]).startswith("memory")
    assert model.config.eos_token_id == tokenizer.eos_token_id

    lines = read_lines(run / LOG_NAME)
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert all(line["tokens_per_second"] > 0 for line in trained)
    assert trained[-1]["loss"] < trained[0]["loss"]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluated] == [3, 6]
    law = [line for line in lines if "memory/horizon" in line]
    assert [line["step"] for line in law] == [3, 6]
    for name in ("delta_mean", "alpha_std", "lambda_mean", "clamped_share", "horizon"):
        assert f"memory/layer_1/{name}" in law[0]
    assert not any("memory/horizon" in line for line in result.history)
    assert list((run / "runs").rglob("events.out.*"))

    written = json.loads((run / "run.json").read_text())
    assert written["recipe"]["training"]["learning_rate"] == 3e-3
    assert written["made_with"]["torch"] == torch.__version__
    assert written["model"]["hidden_size"] == 16


def test_the_held_out_loss_is_that_of_all_tokens(write_recipe):
    recipe = load_recipe(write_recipe(max_steps=1, held_out=0.3))
    result = train(recipe)
    store = result.splits.held_out
    ids = torch.tensor(store.tokens(0, store.num_tokens))
    total, count, model = 0.0, 0, result.model.double().eval()
    for start in range(0, store.num_tokens, 64):
        window = ids[start : start + 65][None]
        logits = model(window[:, :-1] if window.shape[1] == 65 else window).logits[0]
        targets = window[0, 1:]
        nll = torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum")
        total, count = total + nll.item(), count + len(targets)
    evaluated = next(log for log in result.history if "eval_loss" in log)
    assert evaluated["eval_tokens"] == count == store.num_tokens - 1
    assert evaluated["eval_loss"] == pytest.approx(total / count, rel=1e-5)


class Poison(TrainerCallback):
    """Spoils a model before step 2."""

    def __init__(self, spoil):
        self.spoil = spoil

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            with torch.no_grad():
                self.spoil(model)


def not_a_number(model):
    model.model.layers[1].mixer.out_proj.weight[0, 0] = torch.nan


def too_large(model):
    model.model.layers[0].mixer.in_proj.weight.fill_(1e38)


def infinite_gradient(model):
    model.model.layers[1].norm.weight.register_hook(lambda grad: grad + torch.inf)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (not_a_number, "parameter model.layers.1.mixer.out_proj.weight"),
        (too_large, "output of model.layers.0.mixer.in_proj"),
        (infinite_gradient, "gradient of model.layers.1.norm.weight"),
    ],
)
def test_a_number_that_is_none_ends_the_run(write_recipe, monkeypatch, tmp_path, spoil, name):
    plain = FracTrainer.__init__

    def with_poison(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.add_callback(Poison(spoil))

    monkeypatch.setattr(FracTrainer, "__init__", with_poison)
    with pytest.raises(NotFiniteError, match=rf"step 2: .* first non-finite tensor: {name}\."):
        train(load_recipe(write_recipe(save_steps=1)))
    saved = load_file(tmp_path / "run" / "checkpoint-1" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_weight_decay_spares_what_carries_time():
    from flash_frac.models import FracForCausalLM

    config = tiny_config(
        num_hidden_layers=1, frac_learned_timescales=True, tie_word_embeddings=False
    )
    model = FracForCausalLM(config)
    decayed = set(decayed_parameters(model))
    mixer = "model.layers.0.mixer."
    projections = ("in_proj", "conv1d", "dyn_proj", "rw_proj", "out_proj")
    assert decayed == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        *(f"{mixer}{name}.weight" for name in projections),
    }
    spared = {name for name, _ in model.named_parameters()} - decayed
    assert spared == {
        "model.norm.weight",
        "model.layers.0.norm.weight",
        *(f"{mixer}{name}" for name in ("dt_bias", "D", "base_log_tau", "out_norm.weight")),
        *(f"{mixer}{name}" for name in ("read_residual_logit", "write_residual_scale")),
        *(f"{mixer}{name}.bias" for name in ("conv1d", "dyn_proj")),
    }


def test_weight_decay_of_delta_layers():
    from flash_frac.models import FracForCausalLM

    changes = {"mixer_types": ["delta"], "mlp_intermediate_size": 8, "num_hidden_layers": 1}
    model = FracForCausalLM(tiny_config(**changes))
    spared = {name for name, _ in model.named_parameters()} - set(decayed_parameters(model))
    block, mixer = "model.layers.0.", "model.layers.0.mixer."
    assert spared == {
        "model.norm.weight",
        *(f"{block}{name}.weight" for name in ("norm", "mlp_norm")),
        *(f"{mixer}{name}" for name in ("A_log", "dt_bias", "o_norm.weight")),
    }


def test_the_optimizer_has_these_groups(write_recipe):
    recipe = load_recipe(write_recipe(max_steps=1))
    seen = []
    plain = FracTrainer.create_optimizer

    def spy(self, *args, **kwargs):
        optimizer = plain(self, *args, **kwargs)
        names = {id(p): n for n, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            seen.extend((names[id(p)], group["weight_decay"]) for p in group["params"])
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FracTrainer, "create_optimizer", spy)
        model = train(recipe).model
    decayed = set(decayed_parameters(model))
    assert dict(seen) == {n: 0.1 if n in decayed else 0.0 for n, _ in model.named_parameters()}


def test_states_are_carried_through_a_document(write_recipe):
    """With a learning rate of 0, the losses of all segments are that of documents read whole."""
    changes = {"separate_documents": True, "stateful": True, "learning_rate": 0.0}
    result = train(load_recipe(write_recipe(sequence_length=48, max_steps=8, **changes)))
    from flash_frac.data import LaneDataset

    lanes = LaneDataset(result.splits.train, 48, 2, seed=42)
    model = result.model.double().eval()
    total, count = [0.0] * 8, [0] * 8
    for lane in range(2):
        items = [lanes[2 * step + lane] for step in range(8)]
        ids = torch.cat([torch.as_tensor(item["input_ids"]) for item in items])
        starts = [48 * n + int(j) for n, item in enumerate(items) for j in item["document_starts"]]
        for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            logits = model(ids[None, begin:end]).logits[0]
            nll = torch.nn.functional.cross_entropy(
                logits[:-1], ids[begin + 1 : end], reduction="none"
            )
            for position, value in enumerate(nll.tolist(), begin):
                total[position // 48] += value
                count[position // 48] += 1
    # A lane's last token has its target in the next segment, past the eight read here.
    logged = [log["loss"] for log in result.history if "loss" in log]
    for step in range(7):
        assert logged[step] == pytest.approx(total[step] / count[step], rel=2e-5)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"gradient_checkpointing": True}, 1e-6),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, 1e-5),
        ({"config_overrides": {"fuse_linear_cross_entropy": False}}, 1e-5),
        ({"bf16": True}, 2e-2),
    ],
    ids=["checkpointing", "compiled", "plain loss", "bfloat16"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["flowing", "documents apart"])
def test_switches_do_not_change_what_is_learned(write_recipe, tmp_path, apart, changes, tolerance):
    options = {"separate_documents": apart, "eval_strategy": "no", "save_strategy": "no"}
    if "torch_compile" in changes:
        # Layers are compiled one by one, and alike.
        options["config_overrides"] = {"num_hidden_layers": 1}
    outputs = [tmp_path / "plain", tmp_path / "changed"]
    train(load_recipe(write_recipe(**options), ["--output_dir", str(outputs[0])]))
    path = write_recipe(**options, **changes)
    result = train(load_recipe(path, ["--output_dir", str(outputs[1])]))
    plain, changed = ([loss for _, loss in losses(folder)] for folder in outputs)
    assert changed == pytest.approx(plain, rel=tolerance)
    assert all(p.dtype == torch.float32 for p in result.model.parameters())


def test_label_smoothing_shifts_nothing_twice(write_recipe, monkeypatch):
    plain, seen = FracTrainer.compute_loss, []

    def spy(self, model, inputs, *args, **kwargs):
        ids, labels = inputs["input_ids"], inputs["shift_labels"].flatten()
        with torch.no_grad():
            logits = model(ids).logits.flatten(0, 1)
        seen.append(torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))
        seen.append(plain(self, model, inputs, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(FracTrainer, "compute_loss", spy)
    train(load_recipe(write_recipe(label_smoothing_factor=0.1, max_steps=1, eval_strategy="no")))
    expected, got = seen
    torch.testing.assert_close(got.detach(), expected)


def test_the_gradient_is_clipped(write_recipe, tmp_path):
    """By plain descent, which does not undo the scale as AdamW would."""
    ends = []
    for norm in ("1e9", "1e-3"):
        folder = tmp_path / norm
        arguments = ["--optim", "sgd", "--max_grad_norm", norm, "--output_dir", str(folder)]
        train(load_recipe(write_recipe(learning_rate=0.1), arguments))
        ends.append(losses(folder)[-1][1])
    assert ends[0] < ends[1] - 1e-3


def test_a_vocabulary_that_does_not_fit(write_recipe):
    with pytest.raises(ValueError, match="259"):
        train(load_recipe(write_recipe(config_overrides={"vocab_size": 100})))


def test_too_little_text_for_a_batch(write_recipe):
    with pytest.raises(ValueError, match="fewer than one batch of 2"):
        train(load_recipe(write_recipe(sequence_length=20_000)))


MIXED = {"mixer_types": ["frac", "delta", "attention", "sliding_attention"], "sliding_window": 9}
MIXED |= {"num_hidden_layers": 4, "mlp_intermediate_size": 24}


def test_hybrid_models(write_recipe, tmp_path, capsys):
    """Attention layers train on packed documents; states of lanes cannot be carried for them."""
    recipe = write_recipe(separate_documents=True, memory_law_steps=3, config_overrides=MIXED)
    train(load_recipe(recipe))
    seen = losses(tmp_path / "run")
    assert seen[-1][1] < seen[0][1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert model.config.mixer_types == MIXED["mixer_types"]
    assert "layers: 1 frac, 1 delta, 1 attention, 1 sliding_attention\n" in capsys.readouterr().out
    names = decayed_parameters(model)
    assert "model.layers.2.self_attn.q_proj.weight" in names
    assert "model.layers.2.self_attn.q_norm.weight" not in names
    laws = [line for line in read_lines(tmp_path / "run" / LOG_NAME) if "memory/horizon" in line]
    assert len(laws) == 2 and not any("layer_1/" in name for name in laws[0])
    stateful = load_recipe(recipe, ["--stateful", "true", "--output_dir", str(tmp_path / "other")])
    with pytest.raises(ValueError, match="stateful must be false for a model with full attention"):
        train(stateful)


SHRUNK = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
SHRUNK |= {"mlp_intermediate_size": 24, "frac_num_modes": 4, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("name", "more", "layers"),
    [
        ("frac-mixed-30m", {}, "3 frac, 1 attention"),
        ("frac-mixed-1.3b", {"mixer_types": ["attention"]}, "4 attention"),
        ("frac-delta-30m", {"delta_num_heads": 2, "delta_head_dim": 4}, "3 frac, 1 delta"),
        ("frac-delta-1.3b", {"delta_num_heads": 2, "delta_head_dim": 4}, "3 frac, 1 delta"),
    ],
)
def test_recipes_of_mixed_models(name, more, layers, text_folder, cache_folder, tmp_path):
    """As they are installed, with a small model, text and batch."""
    values = {"config_overrides": json.dumps({**SHRUNK, **more}), "output_dir": tmp_path / "run"}
    values |= {"data_files": text_folder, "cache_dir": cache_folder, "tokenizer": "bytes"}
    values |= {"sequence_length": 64, "max_steps": 3, "per_device_train_batch_size": 2}
    values |= {"logging_steps": 1, "held_out": 0.1, "bf16": "false", "report_to": "none"}
    values |= {
        "warmup_steps": 0,
        "memory_law_steps": 3,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_torch",
        "dataloader_num_workers": 0,
    }
    done = frac("train", name, "--use_cpu", *(f"--{key}={value}" for key, value in values.items()))
    assert done.returncode == 0, done.stderr
    assert f"layers: {layers}\n" in done.stdout
    seen = losses(tmp_path / "run")
    assert len(seen) == 3 and seen[-1][1] < seen[0][1]


def test_mfu_counts_what_attention_sees(write_recipe, monkeypatch):
    """By the documents of all batches since the last log; and so does the total in checkpoints."""
    plain, costs = FracTrainer.compute_loss, []

    def spy(self, model, inputs, *args, **kwargs):
        lengths = inputs["cu_seqlens"].diff().tolist()
        seen = [n for length in lengths for n in range(1, length + 1)]
        means = sum(seen) / len(seen), sum(min(n, 9) for n in seen) / len(seen)
        costs.append(training_flops(model.config, *means))
        return plain(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(FracTrainer, "compute_loss", spy)
    changes = {"separate_documents": True, "peak_tflops": 1.0, "eval_strategy": "no"}
    changes |= {"logging_steps": 3, "max_steps": 3, "config_overrides": MIXED}
    history = train(load_recipe(write_recipe(**changes))).history
    log = next(log for log in history if "mfu" in log)
    # All batches have as many tokens.
    assert len(set(costs)) > 1
    cost = log["mfu"] * 1e12 / log["tokens_per_second"]
    # Both are three times a whole number.
    assert cost == pytest.approx(sum(costs) / 3, abs=3)
    assert history[-1]["total_flos"] == 128 * sum(costs)
