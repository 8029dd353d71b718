"""The variants, the memory measurements and small runs of experiments/parametrisation."""

import math
from itertools import chain

import numpy as np
import pytest
import torch

from experiments.long_documents import study
from experiments.mixed_models.models import DESIGNS, count, make_config, make_model
from experiments.parametrisation import memory, run, summary
from experiments.parametrisation.variants import (
    MODELS,
    PUBLISHED,
    VARIANTS,
    describe,
    design,
    label,
    split_name,
)
from flash_frac.inspect import inspect_model
from flash_frac.models import FracForCausalLM

README = (run.HERE / "README.md").read_text()
NAMES = [f"{model}.{variant}" for model in MODELS for variant in VARIANTS]
FEW = ("published", "combined")
ROWS = {f"{model}.{variant}" for model in MODELS for variant in FEW}


def tiny(name):
    return make_model(make_config(design(name), 259, smoke=True), 0)


def test_the_readme_has_the_variants():
    for line in describe():
        assert line in README


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_changes_its_fields_and_nothing_else(name):
    model, variant = split_name(name)
    base, changed = make_config(DESIGNS[model]), make_config(design(name))
    before, after = base.to_dict(), changed.to_dict()
    different = {key: after[key] for key in after if after[key] != before[key]}
    assert different == VARIANTS[variant].changes
    added = 2 * 16 * changed.mixer_types.count("frac") if changed.frac_rw_norm else 0
    assert count(changed) - count(base) == added


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns(variant):
    model, ids = tiny(f"frac.{variant}"), torch.randint(259, (2, 65))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(model.model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3
    assert all(not torch.equal(start[name], value) for name, value in model.named_parameters())


def test_numbers_of_memory_are_those_of_inspect():
    model, ids = tiny("frac.wide_delta"), torch.randint(259, (200,))
    facts = {"model": "x", "lr": 0.1, "seed": 3, "steps": 7, "commit": "c", "perplexity": 1}
    (row,) = memory.memory_rows(model.model, ids, facts)
    layer = inspect_model(model.model, ids[None]).layers[0]
    assert row["delta_median"] == pytest.approx(layer.distributions["delta"].quantiles[2], rel=1e-4)
    assert (row["delta_max"], row["lambda_max"], row["alpha_max"]) == (16.0, 4.0, 0.9)
    assert row["half"] == pytest.approx(layer.horizon.half, rel=1e-4)
    assert row["within_1"] < row["within_16"] < row["within_256"] == row["within_1024"] == 1
    assert (row["model"], row["layer"], row["tokens"]) == ("x", 0, 200)
    assert set(row) <= set(memory.COLUMNS)
    read = np.array([head.read_share for head in layer.heads])
    assert row["slow_read"] == pytest.approx(read[:, 8:].sum() / 2, rel=1e-4)


def test_effective_number_and_slower_half():
    shares = np.array([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])
    assert memory.effective_number(shares) == pytest.approx((4 + 1) / 2)
    assert memory.slower_half(shares) == pytest.approx(0.25)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parametrisation")
    arguments = ["--out", str(folder), "--at-once", "2", "--save", str(folder / "saved")]
    run.main(["--smoke", *arguments, "--variants", *FEW])
    return folder


def test_smoke_leaves_rows_and_tables(smoke, capsys):
    rows = list(study.results(smoke).rows.values())
    assert {row["model"] for row in rows} == ROWS and len(rows) == 2 * len(ROWS)
    assert all(math.isfinite(float(row["loss"])) for row in rows)
    layers = memory.results(smoke).rows
    assert {key[0] for key in layers} == ROWS and len(layers) == len(ROWS)
    # From the start on, more of the response is far, and more of the slow modes is written.
    published, other = (layers[f"frac.{name}", "0.002", "0", "3", "0"] for name in FEW)
    for column in ("half", "write_modes", "slow_write"):
        assert float(other[column]) > 2 * float(published[column])
    saved = smoke / "saved" / "frac.combined-lr0.002-seed0-steps3"
    assert FracForCausalLM.from_pretrained(saved).config.frac_bank == "per_head"
    summary.main(["--out", str(smoke)])
    printed = capsys.readouterr().out
    assert printed.count(f"| {label('frac_attention.combined')} |") == 3
    assert printed.count(f"| {label('frac.published')} |") == 2


def test_a_second_run_trains_nothing(smoke, monkeypatch):
    monkeypatch.setattr(study, "train_rows", lambda *_: pytest.fail("a run was repeated"))
    run.main(["--smoke", "--out", str(smoke), "--variants", *FEW])


def test_a_model_without_memory_is_trained_again(smoke, tmp_path, monkeypatch):
    """Its memory is measured at the end of training alone."""
    (tmp_path / "results.csv").write_bytes((smoke / "results.csv").read_bytes())
    trained = []
    monkeypatch.setattr(study, "train_rows", lambda jobs, *_: trained.extend(jobs) or ())
    run.main(["--smoke", "--out", str(tmp_path), "--variants", *FEW])
    assert {job.model for job in trained} == ROWS


def test_the_default_is_one_seed_of_everything():
    options = run.parse(["--corpus", "x"])
    assert (options.seeds, options.lrs, options.steps) == ([0], [2e-3], 2400)
    assert options.variants[0] == PUBLISHED and len(options.variants) == len(VARIANTS)
    assert options.lengths == [2**n for n in range(10, 17)]


def test_the_readme_has_the_numbers_of_the_rows():
    lines = []
    if study.results(run.HERE).rows:
        _, by_steps = summary.asked_runs("", [], run.HERE)
        found = by_steps[run.STEPS]
        lines = [*chain(*summary.tables(found, run.STEPS, run.HERE).values())]
    assert (
        ("**Not yet measured.**" in README) == ("There are no rows yet." in README) == (not lines)
    )
    for line in lines:
        assert line in README


def test_a_folder_without_rows_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"has no rows.*parametrisation"):
        summary.main(["--out", str(tmp_path)])
