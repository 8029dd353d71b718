"""The heavy-tail probe: its data, its models, its fixed kernels, and a small run of everything."""

import math

import numpy as np
import pytest
import torch

from experiments.heavy_tail import plot, run, summary
from experiments.heavy_tail.data import (
    BACKGROUND,
    MINUS,
    PLUS,
    QUERY,
    Law,
    draw,
    event_values,
)
from experiments.heavy_tail.kernels import accuracies, yardsticks
from experiments.heavy_tail.model import DESIGNS, EARLY, LONGEST, Probe
from experiments.language_model import num_parameters
from flash_frac.models.inputs import random_elapsed
from flash_frac.ops import dynamics, log_prior


def test_gaps_have_their_law():
    law = Law()
    tokens = draw(0, 2000, 512, law).tokens
    assert set(np.unique(tokens)) == {BACKGROUND, PLUS, MINUS, QUERY}
    assert (tokens[:, -1] == QUERY).all() and not (tokens[:, :-1] == QUERY).any()
    where = [np.flatnonzero(row) for row in event_values(tokens)]
    first = np.array([positions[0] + 1 for positions in where])
    # Gaps that begin early end inside the row whatever their length: no bias towards short ones.
    gaps = np.concatenate([np.diff(p)[p[:-1] < 400] for p in where])
    for sample in (gaps, first):
        for g in (1, 2, 5, 20, 63):
            share, p = (sample <= g).mean(), law.gap_cdf()[g - 1]
            assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / len(sample))
    assert gaps.max() <= 64


def test_labels_are_the_sign_of_the_sum():
    law = Law(gamma=0.5)
    tokens, labels = draw(1, 50, 100, law)
    for row, label in zip(tokens, labels, strict=True):
        y = 0.0
        for k, token in enumerate(row[:-1]):
            y += {PLUS: 1, MINUS: -1}.get(int(token), 0) / (100 - k) ** 0.5
        assert label == (y > 0)
    assert 0.4 < draw(1, 2000, 100, law).labels.mean() < 0.6


def test_a_seed_means_the_same_sequences():
    few, many = draw(7, 10, 300, Law()), draw(7, 700, 300, Law())
    assert (few.tokens == many.tokens[:10]).all()
    assert not (few.tokens == draw(8, 10, 300, Law()).tokens).all()
    assert len(np.unique(many.tokens, axis=0)) == 700


def test_short_rows_have_an_event():
    sequences = draw(0, 3000, 2, Law())
    assert (event_values(sequences.tokens) != 0).any(1).all()


@pytest.mark.parametrize("name", DESIGNS)
def test_models_answer_as_their_layer_would(name):
    """Absorbing tokens, in one piece or many, gives what the whole layer gives at the query."""
    torch.manual_seed(0)
    model = Probe(DESIGNS[name]).double().eval()
    tokens = torch.from_numpy(draw(0, 3, 100, Law()).tokens)
    hidden = model.embed(tokens.int())
    if name == "frac_delta":
        hidden = hidden + model.first(model.first_norm(hidden))[0]
    hidden = (hidden + model.mixer(model.norm(hidden))[0])[:, -1]
    hidden = hidden if model.ffn is None else hidden + model.ffn(hidden)
    expected = model.head(model.final_norm(hidden))
    torch.testing.assert_close(model(tokens), expected)
    torch.testing.assert_close(model(tokens, 33), expected)


DILATED = {name: design for name, design in DESIGNS.items() if design.dilation > 1}
DILATED["frac_delta"] = DESIGNS["frac_delta"]._replace(dilation=1024.0)


@pytest.mark.parametrize("name", DILATED)
def test_training_dilates_time(name):
    """In every layer."""
    torch.manual_seed(0)
    model = Probe(DILATED[name]).double()
    tokens = torch.from_numpy(draw(0, 3, 60, Law()).tokens)
    torch.manual_seed(1)
    answers = model(tokens)
    torch.manual_seed(1)
    elapsed = random_elapsed(tokens[..., None], None, 1024.0)
    hidden = model.embed(tokens.int())
    if model.first is not None:
        hidden = hidden + model.first(model.first_norm(hidden), elapsed=elapsed)[0]
    hidden = (hidden + model.mixer(model.norm(hidden), elapsed=elapsed)[0])[:, -1]
    torch.testing.assert_close(answers, model.head(model.final_norm(hidden)))
    assert not torch.allclose(answers, model.eval()(tokens))


def test_sizes_are_those_of_the_paper():
    counts = {name: num_parameters(Probe(design)) for name, design in DESIGNS.items()}
    assert counts["attention"] == 199_298
    assert counts["mamba2"] == 200_666
    assert counts["gated_deltanet"] == 203_282
    assert counts["frac"] == counts["frac_ours"] == counts["frac_paper_clock"] == 190_436
    for name in ("mamba2", "gated_deltanet"):
        assert counts[f"{name}_dilated"] == counts[name]
    assert counts["mamba3"] == 201_394
    assert counts["frac_delta"] == 191_612


def test_the_kernel_itself_is_always_right():
    sequences = draw(0, 300, 128, Law(gamma=0.0))
    assert accuracies(sequences, gamma=0.0)["sum"] == 1
    recent = draw(0, 300, 128, Law(gamma=50.0))
    assert accuracies(recent, gamma=50.0)["last"] == 1


def test_a_plain_sum_is_right_as_often_as_geometry_says():
    """1 - arccos(rho) / pi with rho = sqrt(1 - 2 gamma) / (1 - gamma)."""
    gamma, num = 0.1, 3000
    right = accuracies(draw(0, num, 4096, Law(gamma=gamma)), gamma)["sum"]
    rho = math.sqrt(1 - 2 * gamma) / (1 - gamma)
    expected = 1 - math.acos(rho) / math.pi
    assert abs(right - expected) < 4 * math.sqrt(expected * (1 - expected) / num)


def test_one_rate_is_chosen_at_the_shortest_length():
    kernels = [f"exponential_{2**n}" for n in range(4, 24)]
    others = dict.fromkeys(("sum", "last", "window_128", "window_512", "window_2048"), 0.5)
    short = {**dict.fromkeys(kernels, 0.5), "exponential_64": 0.9, **others, "bank": 0.7}
    long = {**dict.fromkeys(kernels, 0.5), "exponential_4096": 0.8, **others, "bank": 0.6}
    rows = yardsticks({512: short, 2048: long})
    assert rows["exponential_best"] == {512: 0.9, 2048: 0.8}
    assert rows["exponential_fixed"] == {512: 0.9, 2048: 0.5}
    assert rows["bank"] == {512: 0.7, 2048: 0.6}


def test_smoke_run_skips_what_it_has(tmp_path, capsys):
    arguments = ["--smoke", "--out", str(tmp_path), "--models", "frac", "frac_delta"]
    run.main(arguments)
    first = (tmp_path / "results.csv").read_text()
    assert capsys.readouterr().out.count("gamma=0.1 seed=0") == 2
    run.main(arguments)
    assert capsys.readouterr().out.count("gamma=0.1") == 0
    assert (tmp_path / "results.csv").read_text() == first
    run.main([*arguments, "attention"])
    assert capsys.readouterr().out.count("attention gamma=0.1") == 1


def test_training_learns():
    """A model that sees 16-token rows for a while answers well above chance."""
    plan = run.Optimisation(lr=3e-3, steps=150, batch_size=32, clip=1.0)
    protocol = run.Protocol((16,), 16, 400, plan, torch.device("cpu"), {})
    (rows,) = run.train_rows([run.Job("frac", 0.1, 0)], protocol)
    assert float(rows[0]["accuracy"]) > 0.8


def test_the_readme_has_the_numbers_of_the_table():
    text = (run.HERE / "README.md").read_text()
    for gamma in sorted({float(row["gamma"]) for row in run.results(run.HERE).rows.values()}):
        found = summary.accuracies(run.HERE, gamma)
        tables = summary.table(found, paper=gamma == 0.1)
        for leader in {"frac", "frac_ours"} & found.keys():
            tables += summary.lead(found, leader)
        for line in tables:
            assert line in text


def test_rows_of_every_model_are_shown():
    assert {*DESIGNS} <= {*summary.NAMES}


def test_the_papers_clock_is_ten_times_slower():
    rates = []
    for name in ("frac", "frac_paper_clock"):
        dyn = dynamics(*(torch.zeros(1) for _ in range(3)), Probe(DESIGNS[name]).mixer.settings)
        rates.append((dyn.delta * dyn.lam ** (1 / dyn.alpha)).item())
    # The published code's own range of alpha is 0.2 to 0.95 here.
    assert rates == pytest.approx([2.57, 0.33], abs=0.01)
    options = run.parse(["--models", "frac_paper_clock", "--gammas", "0.1"])
    assert options.seeds == [*range(10)]


def test_tables_and_figure_of_a_small_run(tmp_path, capsys):
    run.main(["--smoke", "--out", str(tmp_path), "--models", "frac", "attention"])
    capsys.readouterr()
    summary.main(["--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| Frac | 1 | " in printed and "| Frac ahead of | 64 |" in printed
    plot.main(["--out", str(tmp_path)])
    assert "attention" in (tmp_path / "figure.svg").read_text()


def test_the_lead_is_a_test_over_seeds():
    found = {"frac": {512: [90.0, 91.0, 92.0]}, "mamba2": {512: [60.0, 61.0, 59.0]}}
    (line,) = summary.lead(found, "frac")[2:]
    assert line.startswith("| Mamba2 | ") and float(line.split("|")[2]) < 1e-4
    ((same,),) = [summary.lead({**found, "mamba2": found["frac"]}, "frac")[2:]]
    assert float(same.split("|")[2]) == 0.5


@pytest.mark.parametrize(
    "gamma, expected", [(0.1, {512: 99.8, 131072: 98.5}), (0.5, {512: 99.6, 131072: 97.8})]
)
def test_the_early_regime_starts_with_the_power_law(gamma, expected):
    """What the README says of the untrained kernel, by 1 - arccos(cosine) / pi."""
    log_tau = torch.linspace(math.log(EARLY["tau_min"]), 0, 16, dtype=torch.float64)
    alpha = torch.tensor([1 - gamma], dtype=torch.float64)
    rate = torch.exp(-log_tau) / LONGEST
    weights = log_prior(alpha, log_tau, "exact")[0].softmax(0) * -torch.expm1(-rate)
    for length, accuracy in expected.items():
        lag = torch.arange(1, length + 1, dtype=torch.float64)
        kernel, target = weights @ torch.exp(-rate[:, None] * lag), lag**-gamma
        cosine = kernel @ target / (kernel.norm() * target.norm())
        assert 100 * (1 - math.acos(cosine) / math.pi) == pytest.approx(accuracy, abs=0.05)


def test_rows_of_few_lengths_or_seeds_are_shown(tmp_path, capsys):
    """A cell without rows is empty, as is a test of the order without a spread."""
    table = run.results(tmp_path)
    rows = [*run.results(run.HERE).rows.values()]
    (base,) = [row for row in rows if row["model"] == "frac" and row["gamma"] == "0.1"
               and row["seed"] == "0" and row["length"] == "512"]  # fmt: skip
    table.append([*rows, base | {"model": "mamba3"}])
    summary.main(["--out", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:9] == "| Mamba3 "]
    assert lines == [f"| Mamba3 | 1 | 99.0 |{'  |' * 6}", *2 * [f"| Mamba3 |{'  |' * 7}"]]
