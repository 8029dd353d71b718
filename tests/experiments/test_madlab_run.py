"""MADLab end to end in small runs, and the summary of their rows."""

import math
from itertools import product

import pytest
import torch

from experiments.madlab import plot, run
from experiments.madlab.settings import PRESETS, Protocol
from experiments.madlab.summary import PAPER, best_scores, table
from experiments.madlab.tasks import IGNORE, TASKS

FEW = ["--smoke", "--tasks", "compression", "in-context-recall", "--models", "frac", "attention"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("madlab")
    run.main([*FEW, "--out", str(folder)])
    return folder


def test_smoke_leaves_rows_and_a_figure(smoke):
    rows = list(run.results(smoke).rows.values())
    assert [(row["task"], row["model"]) for row in rows] == [
        ("compression", "frac"),
        ("compression", "attention"),
        ("in-context-recall", "frac"),
        ("in-context-recall", "attention"),
    ]
    for row in rows:
        assert row["epochs_run"] == "2" and 0 <= float(row["last_batch_macro"]) <= 1
        assert float(row["best_ppl"]) <= float(row["last_ppl"])
    plot.main(["--out", str(smoke), "--epochs", "2"])
    assert "Frac" in (smoke / "figure.svg").read_text()


def test_a_second_run_trains_nothing(smoke, monkeypatch):
    monkeypatch.setattr(run, "Run", lambda *_: pytest.fail("a run was repeated"))
    run.main([*FEW, "--out", str(smoke)])


def test_a_row_is_saved_when_its_run_ends(tmp_path, monkeypatch):
    """The second of two runs side by side is cut off at its last epoch."""
    row = run.Run.row

    def cut_off(self):
        if self.job.model == "mamba2":
            raise KeyboardInterrupt
        return row(self)

    monkeypatch.setattr(run.Run, "row", cut_off)
    few = ["--tasks", "selective-copying", "--models", "frac", "mamba2", "--epochs", "1"]
    with pytest.raises(KeyboardInterrupt):
        run.main(["--smoke", "--device", "cpu", "--out", str(tmp_path), *few])
    assert [key[1] for key in run.results(tmp_path).rows] == ["frac"]


def test_the_readme_has_the_numbers_of_the_table():
    text = (run.HERE / "README.md").read_text()
    lines = table(best_scores(run.results(run.HERE).rows.values(), PRESETS["paper"]))
    assert len(lines) >= 10
    for line in lines:
        assert line in text


def test_models_rates_and_seeds_of_the_command_line(tmp_path):
    """Several at once; without --epochs as many as the paper has."""
    models = ["frac", "frac_no_write_prior", "gated_deltanet", "mamba2", "mamba3", "frac_delta"]
    chosen = ["--models", *models, "--lrs", "5e-4", "1e-3", "--wds", "0", "--seeds", "1", "2"]
    options, protocol = run.parse(chosen)
    assert (protocol.epochs, protocol.seeds, protocol.lrs) == (200, (1, 2), (5e-4, 1e-3))
    assert options.models == models and options.at_once == 6
    few = [
        "--models",
        "frac_no_write_prior",
        "frac_delta",
        "--tasks",
        "memorization",
        "--epochs",
        "1",
    ]
    more = ["--smoke", "--device", "cpu", "--at-once", "4", "--out", str(tmp_path)]
    run.main([*chosen, *few, *more])
    rows = run.results(tmp_path).rows.values()
    found = {(row["model"], row["lr"], row["seed"]) for row in rows}
    assert found == set(
        product(("frac_no_write_prior", "frac_delta"), ("0.0005", "0.001"), ("1", "2"))
    )


def test_presets_that_share_a_schedule_share_rows(smoke):
    rows = run.results(smoke).rows.values()
    assert best_scores(rows, PRESETS["paper"], epochs=2)
    assert not best_scores(rows, PRESETS["official"], epochs=2)
    assert not best_scores(rows, PRESETS["paper"], epochs=200)


def test_a_model_learns(tmp_path):
    """Frac learns most pairs of a small memorization in sixty steps; by chance it is below 1%."""
    run.main(
        [
            *("--smoke", "--tasks", "memorization", "--models", "frac", "--epochs", "30"),
            *("--out", str(tmp_path)),
        ]
    )
    (row,) = run.results(tmp_path).rows.values()
    assert float(row["last_batch_macro"]) > 0.5


class Constant(torch.nn.Module):
    """The same logits for every token."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, tokens):
        return self.logits.expand(*tokens.shape, -1)


def test_scores_of_an_epoch():
    protocol = Protocol(lr_schedule="cosine", select="last", batch_size=2, bfloat16=False)
    targets = torch.tensor([[0, 0], [0, IGNORE], [1, IGNORE], [0, IGNORE]])
    model = Constant([math.log(3.0), 0.0])
    found = run.evaluate(model, 2, torch.zeros_like(targets), targets, protocol)
    scores = run.EpochScores(*found.tolist())
    assert scores.batch_macro == pytest.approx((1 + 1 / 2) / 2)
    assert scores.macro == pytest.approx(1 / 2) and scores.micro == pytest.approx(4 / 5)
    assert scores.ppl == pytest.approx((4 / 3 + math.sqrt(4 * 4 / 3)) / 2)


def test_loss_leaves_out_what_is_not_scored():
    model = Constant([math.log(3.0), 0.0])
    targets = torch.tensor([[0, IGNORE, IGNORE]])
    loss = run.token_loss(model, torch.zeros_like(targets), targets)
    assert loss.item() == pytest.approx(math.log(4 / 3))


def test_a_run_stops_when_it_is_good_enough():
    task = TASKS["compression"]
    data = run.Arrays(*(torch.zeros(16, 32, dtype=torch.long) for _ in range(4)))
    protocol = Protocol(lr_schedule="constant", select="last", epochs=50, batch_size=16)
    job = run.Job("compression", "attention", "constant", 50, 1e-3, 0.0, 0)
    kept = []
    started = run.Run(job, task, data, protocol)
    run.train_together([started], 1, kept.append)
    assert kept[0]["epochs_run"] < 50 and kept[0]["last_batch_macro"] == 1.0


def row(lr, seed, last, best, task="compression", model="frac", schedule="cosine", epochs="200"):
    return {
        "task": task,
        "model": model,
        "lr_schedule": schedule,
        "epochs": epochs,
        "lr": lr,
        "weight_decay": "0.0",
        "seed": seed,
        "last_batch_macro": last,
        "best_batch_macro": best,
    }


def test_the_best_pair_counts_by_its_mean():
    rows = [
        row("0.0001", "0", "0.90", "0.7"),
        row("0.0001", "1", "0.80", "0.7"),
        row("0.001", "0", "0.99", "0.6"),
        row("0.001", "1", "0.61", "0.6"),
        row("0.001", "0", "1.0", "1.0", schedule="constant"),
        row("0.001", "0", "1.0", "1.0", epochs="2"),
        # A pair whose seeds are not all there does not count.
        row("0.0005", "0", "1.0", "0.9"),
    ]
    score = best_scores(rows, PRESETS["paper"])["compression", "frac"]
    assert score.mean == pytest.approx(85) and score.spread == pytest.approx(7.0711, rel=1e-4)
    assert (score.num_seeds, score.lr) == (2, 1e-4)
    official = best_scores(rows, PRESETS["official"])["compression", "frac"]
    assert (official.mean, official.num_seeds) == (100, 1)


def test_the_papers_averages():
    """The table's own last column, from the numbers kept here."""
    averages = {"mamba2": 73.8, "gated_deltanet": 74.3, "mamba3": 74.8, "frac": 75.4}
    for model, average in averages.items():
        mean = sum(accuracy for accuracy, _ in PAPER[model].values()) / 4
        assert mean == pytest.approx(average, abs=0.06)


def test_a_folder_without_rows_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no rows of preset paper"):
        plot.main(["--out", str(tmp_path)])
