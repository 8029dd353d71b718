"""The designs, the second text and small runs of experiments/mixed_models."""

import json
import math
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from transformers.utils import import_utils

from experiments.language_model import loss, token_losses
from experiments.long_documents import models as long_documents
from experiments.long_documents import study
from experiments.long_documents.measure import last_logits
from experiments.mixed_models import kernel, plot, run, speed, summary
from experiments.mixed_models.models import (
    DESIGNS,
    MAIN,
    PARAMETERS,
    count,
    describe,
    growing_window,
    make_config,
    make_model,
)
from experiments.training import Optimisation, Training, shuffled_order, train_side_by_side
from flash_frac.models import FracCache, FracForCausalLM

README = (run.HERE / "README.md").read_text()
VOCABULARY = 259


def tiny(name, seed=0):
    return make_model(make_config(DESIGNS[name], VOCABULARY, smoke=True), seed).eval()


def tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def test_sizes_are_alike():
    lines = describe()
    for line in lines:
        assert line in README
    counts = [int(line.split("|")[-2].replace(",", "")) for line in lines[2:]]
    assert len(counts) == len(DESIGNS)
    assert counts == pytest.approx([PARAMETERS] * len(counts), rel=0.01)


@pytest.mark.parametrize(
    ("name", "other"), [("frac", "frac"), ("delta", "gated_deltanet"), ("attention", "qwen3")]
)
def test_pure_models_are_those_of_long_documents(name, other):
    """As many parameters, which are the same layers in another class."""
    with torch.device("meta"):
        model = long_documents.LanguageModel(long_documents.DESIGNS[other])
    assert count(make_config(DESIGNS[name])) == long_documents.num_inner_parameters(model)


def test_layers_are_where_the_readme_says():
    at = {
        name: [n for n, kind in enumerate(design.layers) if kind != design.layers[3]]
        for name, design in DESIGNS.items()
    }
    assert {len(DESIGNS[name].layers) for name in MAIN} == {10}
    assert at["frac_attention"] == at["frac_attention_nope"] == at["delta_attention"] == [2, 5, 8]
    assert at["frac_delta"] == [1, 4, 7] and at["delta"] == at["frac_mlp"] == []
    assert at["frac_attention_2"] == [4, 9] and at["frac_attention_nope_1"] == [5]
    config = make_config(DESIGNS["frac_delta"])
    assert (config.delta_num_heads, config.delta_head_dim, config.delta_expand_v) == (6, 64, 2.0)
    assert make_config(DESIGNS["frac_attention_nope"]).attention_positions == "none"
    assert make_config(DESIGNS["frac_sliding_512"]).sliding_window == 512


@pytest.mark.parametrize("name", ["frac_attention", "frac_attention_nope", "frac_delta"])
def test_pieces_are_read_as_the_whole(name):
    model, rows = tiny(name), tokens(2, 61)
    whole, logits = token_losses(model, rows, 60), last_logits(model, rows, 5)
    torch.testing.assert_close(token_losses(model, rows, 17), whole)
    model.piece = 29
    torch.testing.assert_close(token_losses(model, rows, 60), whole)
    torch.testing.assert_close(last_logits(model, rows, 5), logits)


def test_a_sliding_window_is_read_in_pieces():
    model = tiny("frac_sliding_512")
    assert model.piece == 4096 and tiny("frac_attention").piece is None


def test_windows_grow_in_the_first_half():
    model, seen = tiny("frac_attention_nope_growing"), []
    schedule = growing_window(steps=2400, length=4096)
    for step in range(2400):
        if schedule(model, step):
            seen.append((step, model.model.config.sliding_window))
    assert seen == [(200 * n, 64 << n) for n in range(6)] + [(1200, None)]


def test_a_window_hides_what_is_further_back():
    model, rows = tiny("attention"), tokens(1, 40)
    other = torch.cat([(rows[:, :1] + 1) % VOCABULARY, rows[:, 1:]], 1)
    with torch.no_grad():
        whole = model(rows)
        assert not torch.equal(whole[:, 20:], model(other)[:, 20:])
        model.set_window(8)
        seen = model(rows)
        assert not torch.allclose(seen[:, 20:], whole[:, 20:])
        torch.testing.assert_close(seen[:, :8], whole[:, :8])
        torch.testing.assert_close(seen[:, 8:], model(other)[:, 8:])
        model.set_window(None)
        assert torch.equal(model(rows), whole)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_is_trained_while_its_window_grows(device):
    """On a GPU the step is recorded again for each window; the model ends with all tokens seen."""
    name, ids = "frac_attention_nope_growing", tokens(8, 129).to(device)
    model = tiny(name).train().to(device)
    plan = Optimisation(lr=1e-2, steps=24, batch_size=4)
    order = shuffled_order(8, 24, 4, seed=0)
    schedule = growing_window(steps=24, length=128)
    training = Training(model, loss, ids[:, :-1], ids[:, 1:], order, plan, schedule)
    train_side_by_side([training])
    assert model.model.config.mixer_types == make_config(DESIGNS[name], smoke=True).mixer_types
    assert training.losses[-4:].mean() < training.losses[:4].mean() - 0.2


def test_full_attention_has_no_mask_while_a_graph_is_recorded(monkeypatch):
    """In 64K tokens a mask of all pairs would be 4 GB."""
    found = []

    def attend(*args, attn_mask=None, is_causal=False, **options):
        found.append((attn_mask, is_causal))
        return args[2]

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    model = tiny("frac_attention")
    model(tokens(2, 12))
    model.train()(tokens(2, 12))
    assert found == [(None, True)] * 2


def test_kernel_directories_are_documents(tmp_path):
    for name, content in {
        "net/b.c": b"int b;\n\n",
        "net/a.c": b"int a; // \xe9\n",
        "net/a.h": b"int h;\n",
        "net/core/c.c": b"int c;\n",
        "fs/d.c": b"int d;\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    kernel.main([str(tmp_path), str(tmp_path / "out.jsonl")])
    documents = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {each["name"]: each["text"] for each in documents} == {
        "net": "int a; // é\n\nint b;\n",
        "net/core": "int c;\n",
        "fs": "int d;\n",
    }
    names = [f"drivers/{n}" for n in range(300)]
    part = kernel.chosen(names, 3)
    assert 70 < len(part) < 130 and part == kernel.chosen(names[::-1], 3) != sorted(part)
    with pytest.raises(SystemExit):
        kernel.main([str(tmp_path / "fs" / "none"), str(tmp_path / "out.jsonl")])


FEW = ["frac_attention_nope", "frac_delta", "frac_sliding_512"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed_models")
    arguments = ["--out", str(folder), "--at-once", "2", "--save", str(folder / "saved")]
    run.main(["--smoke", *arguments, "--models", *FEW])
    return folder


def test_smoke_leaves_rows_a_figure_and_tables(smoke, capsys):
    rows = list(study.results(smoke).rows.values())
    assert [row["model"] for row in rows[:: len(rows) // 3]] == FEW
    for row in rows:
        assert math.isfinite(float(row["loss"])) and row["train_loss"]
    plot.main(["--out", str(smoke)])
    assert "Frac + 3 delta (1)" in (smoke / "figure.svg").read_text()
    summary.main(["--out", str(smoke)])
    assert capsys.readouterr().out.count("| Frac + 3 delta |") == 3


def test_a_second_run_trains_nothing(smoke, monkeypatch):
    monkeypatch.setattr(study, "train_rows", lambda *_: pytest.fail("a run was repeated"))
    again = ["--smoke", "--out", str(smoke), "--models", *FEW]
    run.main(again)
    run.main([*again, "--save", str(smoke / "saved")])
    trained = []
    monkeypatch.setattr(study, "train_rows", lambda jobs, *_: trained.extend(jobs) or ())
    run.main([*again, "--save", str(smoke / "other")])
    assert [job.model for job in trained] == FEW


def test_checkpoints_are_measured_with_temperatures(smoke, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "train_rows", lambda *_: pytest.fail("a model was trained"))
    folder = smoke / "saved" / "frac_attention_nope-lr0.002-seed0-steps3"
    assert FracForCausalLM.from_pretrained(folder).config.attention_positions == "none"
    arguments = ["--smoke", "--out", str(tmp_path), "--measure-only", str(folder)]
    run.main([*arguments, "--slopes"])
    run.main([*arguments, "--slopes", "0.5", "0"])
    rows, known = study.results(tmp_path).rows, study.results(smoke).rows
    job = ("0.002", "0", "3")
    for length in ("64", "128"):
        kind = (*job, "perplexity", length)
        loss = known["frac_attention_nope", *kind]["loss"]
        assert rows["frac_attention_nope", *kind]["loss"] == loss
        assert rows["frac_attention_nope_temperature_0", *kind]["loss"] == loss
        # Beyond the length of training, 64, queries are longer.
        warmer = rows["frac_attention_nope_temperature_0.5", *kind]
        assert (warmer["loss"] == loss) == (length == "64")
        assert warmer["train_loss"] == known["frac_attention_nope", *kind]["train_loss"]
    assert summary.label("frac_delta_temperature_0.5") == "Frac + 3 delta, temperature 0.5"


def test_checkpoints_are_checked_before_any_is_measured(smoke, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "measured_rows", lambda *_: pytest.fail("a model was measured"))
    good, bad = (
        str(smoke / "saved" / f"{name}-lr0.002-seed0-steps3")
        for name in ("frac_attention_nope", "frac_delta")
    )
    start = ["--smoke", "--out", str(tmp_path), "--measure-only", good]
    with pytest.raises(SystemExit, match=r"frac_delta-lr0.002-seed0-steps3 .*no full attention"):
        run.main([*start, bad])
    with pytest.raises(SystemExit, match=r"--measure-only must name checkpoints of --save"):
        run.main([*start, str(smoke)])
    scaled = tmp_path / "scaled"
    tiny("frac_attention_nope_scaled").model.save_pretrained(scaled)
    study.write_facts(scaled, {})
    with pytest.raises(SystemExit, match=r"trained with a temperature, which --slopes would"):
        run.main([*start, str(scaled)])


def test_speed_and_bytes(tmp_path, monkeypatch):
    run_once = ["--smoke", "--out", str(tmp_path), "--models", "frac_attention", "frac_delta"]
    speed.main(run_once)
    rows = speed.results(tmp_path).rows
    assert all(float(row["value"]) > 0 for row in rows.values()) and len(rows) == 2 * 7
    state = {key[0]: [] for key in rows}
    for (name, measurement, length, _), row in rows.items():
        if measurement == "state":
            state[name].append((int(length), int(row["value"])))
    # One attention layer of two heads of 16: keys and values in bfloat16.
    (short, few), (long, many) = state["frac_attention"]
    assert many - few == (long - short) * 2 * 2 * 16 * 2
    assert len({size for _, size in state["frac_delta"]}) == 1
    with monkeypatch.context() as patch:
        patch.setattr(speed, "measure", lambda *_: pytest.fail("a model was measured again"))
        speed.main(run_once)
    (line,) = [line for line in summary.speeds(tmp_path) if "Frac + 3 delta" in line]
    assert line == f"| Frac + 3 delta |{'  |' * 7}"


def test_bytes_of_states_are_measured_alone(tmp_path, monkeypatch):
    """Other measurements are added later; designs of the same sizes are left out."""
    monkeypatch.setattr(speed, "training_speed", lambda *_: pytest.fail("a model was trained"))
    monkeypatch.setattr(speed, "Generator", lambda *_: pytest.fail("a model generated"))
    arguments = ["--smoke", "--out", str(tmp_path)]
    speed.main([*arguments, "--state-only"])
    states = speed.results(tmp_path).rows
    assert {key[0] for key in states} == {*DESIGNS} - speed.ALIKE and len(states) == 2 * 13
    monkeypatch.undo()
    monkeypatch.setattr(speed, "state_bytes", lambda *_: pytest.fail("a size was measured again"))
    speed.main([*arguments, "--models", "frac_delta"])
    assert len(speed.results(tmp_path).rows) == 2 * 13 + 5


@pytest.mark.parametrize("name", ["frac_attention", "frac_sliding_512", "frac_delta"])
def test_bytes_of_states_are_those_of_a_text(name):
    """Sliding layers keep less than they read."""
    model, cache = tiny(name).model, FracCache(tiny(name).model.config)
    with torch.no_grad():
        model.model(tokens(1, 900), past_key_values=cache, use_cache=True)
    layers = [cache.layers[n] for n in cache.attention_layers]
    read = [*cache.tensors(), *chain(*((layer.keys, layer.values) for layer in layers))]
    assert speed.state_bytes(model, 900) == sum(x.nbytes for x in read)


def test_differences_have_two_standard_errors():
    # Standard errors are 1 and 0.75.
    assert summary.difference([9.0, 11.0], [6.25, 7.75]) == "+3.000 ± 2.500"
    assert summary.difference([9.0], [6.0, 8.0]) == "+2.000"


def test_the_readme_has_the_numbers_of_the_rows():
    lines = {"speed": summary.speeds(run.HERE)}
    for folder in (run.HERE, run.HERE / "second_text"):
        lines[folder] = []
        if study.results(folder).rows:
            _, by_steps = summary.asked_runs("", [], folder)
            lines[folder] = [*chain(*summary.tables(by_steps[run.STEPS]).values())]
    assert README.count("Not yet measured.") == sum(not each for each in lines.values())
    for each in lines.values():
        for line in each:
            assert line in README


def test_folders_without_rows_are_named(tmp_path):
    for module in (plot, summary):
        with pytest.raises(SystemExit, match=r"has no rows.*mixed_models"):
            module.main(["--out", str(tmp_path)])
