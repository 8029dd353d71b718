"""Every variant trains, and differs from Frac only as its name says."""

import dataclasses
import math

import pytest
import torch

from experiments.ablation import plot, run, summary
from experiments.ablation.variants import (
    BASELINE,
    PAPER_ROWS,
    VARIANTS,
    design,
    make_variant,
)
from experiments.heavy_tail.model import EARLY_SETTINGS
from experiments.language_model import loss, make_model
from experiments.long_documents import study
from experiments.long_documents.models import num_inner_parameters
from experiments.long_documents.summary import asked_runs, best_runs
from flash_frac.theory import geometric_bank, named_bank

HEADS, INNER, LAYERS = 8, 1024, 16

# Fields of ControlSettings that differ, parameters of a mixer that differ in shape or are only in
# one of the two, and how many parameters a layer gains, at full size.
DIFFERENCES = {
    "alpha_1": ({"alpha_fixed"}, {"dyn_proj.weight", "dyn_proj.bias"}, -HEADS * (INNER + 1)),
    "no_write_prior": ({"write_prior"}, set(), 0),
    "pure_bank": (
        {"alpha_fixed", "read_prior", "write_prior"},
        {"dyn_proj.weight", "dyn_proj.bias", "base_log_tau"},
        16 - HEADS * (INNER + 1),
    ),
    "no_softmax": ({"normalization"}, set(), 0),
    "learned_timescales": (set(), {"base_log_tau"}, 16),
    "no_D": (set(), {"D"}, -INNER),
    "modes_8": (set(), {"rw_proj.weight"}, -2 * HEADS * 8 * INNER),
    "modes_32": (set(), {"rw_proj.weight"}, 2 * HEADS * 16 * INNER),
    "paper_clock": ({"lambda_map", "alpha_min", "alpha_max"}, set(), 0),
    "exact_zoh": ({"beta"}, set(), 0),
    "sigmoid": ({"normalization"}, set(), 0),
    "exact_prior": ({"prior"}, set(), 0),
    "optimised_bank": (set(), set(), 0),
    "exact_prior_and_bank": ({"prior"}, set(), 0),
    "time_dilation": (set(), set(), 0),
    "early_regime": (set(EARLY_SETTINGS), set(), 0),
    "early_regime_and_dilation": (set(EARLY_SETTINGS), set(), 0),
}


def full_size(name):
    with torch.device("meta"):
        return make_model(design(name), seed=0)


def tiny(name, seed=0):
    return make_variant(name, seed, vocab_size=40, smoke=True)


def some_tokens():
    return torch.randint(40, (2, 33), generator=torch.Generator().manual_seed(0))


def test_every_variant_says_how_it_differs():
    assert {*DIFFERENCES} == {*VARIANTS} - {BASELINE}
    assert len(PAPER_ROWS) == 9 and PAPER_ROWS[0] == BASELINE


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differs_from_the_baseline_in_what_it_says(name):
    settings, parameters, gained = DIFFERENCES[name]
    model, baseline = full_size(name), full_size(BASELINE)
    ours, theirs = (m.layers[0].mixer for m in (model, baseline))
    differ = {
        field.name
        for field in dataclasses.fields(ours.settings)
        if getattr(ours.settings, field.name) != getattr(theirs.settings, field.name)
    }
    assert differ == settings
    shapes, base_shapes = ({(n, p.shape) for n, p in m.named_parameters()} for m in (ours, theirs))
    assert {name for name, _ in shapes ^ base_shapes} == parameters
    gain = num_inner_parameters(model) - num_inner_parameters(baseline)
    assert gain == LAYERS * gained
    assert {n for n, _ in model.named_children()} == {n for n, _ in baseline.named_children()}


@pytest.mark.parametrize("name", VARIANTS)
def test_timescales(name):
    tau = tiny(name).layers[0].mixer.base_log_tau.detach().double().exp().numpy()
    options = VARIANTS[name].options
    if options.get("learned_timescales"):
        assert not (tau[1:] > tau[:-1]).all()
        assert ((tau >= 1) & (tau <= 2**17)).all()
        return
    modes = options.get("num_modes", 16)
    expected = geometric_bank(modes, options.get("tau_min", 1.0), options.get("tau_max", 2.0**17))
    if "bank" in options:
        expected = named_bank(options["bank"])
    assert tau == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_has_finite_gradients_everywhere(name):
    model, tokens = tiny(name), some_tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = loss(model, tokens[:, :-1], tokens[:, 1:])
    before.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.count_nonzero() > 0, parameter_name
    optimizer.step()
    torch.manual_seed(1)
    after = loss(model, tokens[:, :-1], tokens[:, 1:])
    assert after < before


@pytest.mark.parametrize("name", sorted({*VARIANTS} - {BASELINE, "time_dilation"}))
def test_another_function_of_the_same_weights(name):
    """With the weights that both have in common, no variant computes what Frac does."""
    model, baseline, tokens = tiny(name), tiny(BASELINE), some_tokens()
    theirs = baseline.state_dict()
    # D starts at zero, where leaving it out changes nothing.
    for key in theirs:
        if key.endswith(".D"):
            theirs[key].fill_(0.5)
    own = model.state_dict()
    kept = "base_log_tau"
    shared = {
        k: v for k, v in theirs.items() if k in own and own[k].shape == v.shape and kept not in k
    }
    model.load_state_dict(shared, strict=False)
    with torch.no_grad():
        assert (model(tokens) - baseline(tokens)).abs().max() > 1e-6


def test_time_dilation_is_for_training_alone():
    model, baseline, tokens = tiny("time_dilation"), tiny(BASELINE), some_tokens()
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens), baseline.eval()(tokens))
        assert not torch.equal(model.train()(tokens), baseline.train()(tokens))


def test_time_dilation_is_one_factor_for_a_row_in_all_layers(monkeypatch):
    model, seen = tiny("time_dilation"), []
    for layer in model.layers:
        inner = layer.mixer.controls
        monkeypatch.setattr(
            layer.mixer,
            "controls",
            lambda *args, inner=inner: (seen.append(args[3]), inner(*args))[1],
        )
    model(some_tokens())
    first, second = seen
    assert torch.equal(first, second)
    assert torch.equal(first, first[:, :1].expand_as(first)) and first[0, 0] != first[1, 0]
    assert (first >= 1).all() and (first <= 16).all()


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    run.main(["--smoke", "--variants", BASELINE, "alpha_1", "exact_prior", "--out", str(folder)])
    return folder


def test_smoke_leaves_rows_a_figure_and_a_table(smoke, capsys):
    rows = study.results(smoke).rows.values()
    assert [row["measurement"] for row in rows] == ["perplexity"] * 6
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    plot.main(["--out", str(smoke)])
    assert "exact prior" in (smoke / "figure.svg").read_text()
    capsys.readouterr()
    summary.main(["--out", str(smoke)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "| 47.2 | 28.4 | 11.3 |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1


def test_a_second_run_trains_nothing(smoke, monkeypatch):
    monkeypatch.setattr(study, "train_rows", lambda *_: pytest.fail("a run was repeated"))
    run.main(["--smoke", "--variants", "alpha_1", BASELINE, "--out", str(smoke)])


def test_changes_are_from_the_baseline_of_the_same_seed():
    columns = ("model", "seed", "perplexity")
    rows = [
        dict(zip(columns, values, strict=True))
        | {"lr": "0.002", "steps": "9", "measurement": "perplexity", "length": "4096"}
        | {"loss": "1", "train_length": "4096"}
        for values in (
            (BASELINE, "0", "10"),
            (BASELINE, "1", "20"),
            ("no_D", "1", "22"),
            ("no_D", "0", "12"),
            ("no_D", "2", "99"),
        )
    ]
    runs = best_runs(rows, steps=9)
    found = summary.changes(runs, 4096)
    assert found["no_D"] == pytest.approx([10.0, 20.0])
    assert found[BASELINE] == [0.0, 0.0]
    assert summary.seed_spread(runs, 4096) == pytest.approx(100 * 50**0.5 / 15)
    assert summary.seed_spread(best_runs(rows[:1], steps=9), 4096) is None


def test_the_readme_has_every_row():
    text = (run.HERE / "README.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    rows = {row[0]: row for row in cells if len(row) == 3}
    for name, variant in VARIANTS.items():
        gained = LAYERS * DIFFERENCES[name][2] if name != BASELINE else 0
        expected = f"{gained:+,}" if gained else ""
        if name == BASELINE:
            expected = f"{num_inner_parameters(full_size(BASELINE)):,}"
        assert rows[variant.label][2] == expected


def test_the_readme_has_the_numbers_of_the_table():
    _, by_steps = asked_runs("", [], run.HERE)
    assert by_steps[min(by_steps)].keys() >= {*PAPER_ROWS}
    text = (run.HERE / "README.md").read_text()
    for found in by_steps.values():
        for line in summary.table(found):
            assert line in text


def test_the_papers_changes():
    """Means over three sets of documents; rows of ours have none."""
    assert summary.paper_change(BASELINE) == 0.0
    assert summary.paper_change("no_D") == pytest.approx(74.1, abs=0.1)
    assert summary.paper_change("exact_prior") is None


def test_a_folder_without_rows_is_named(smoke, tmp_path):
    for command in (summary, plot):
        with pytest.raises(SystemExit, match="has no rows"):
            command.main(["--out", str(tmp_path)])
    others = [row for row in study.results(smoke).rows.values() if row["model"] != BASELINE]
    study.results(tmp_path).append(others)
    with pytest.raises(SystemExit, match="rows of the baseline"):
        plot.main(["--out", str(tmp_path)])
