"""The experiment on banks: the committed rows, a small run end to end, and its figure."""

import statistics

import pytest

from experiments.soe_quality import plot, run

README = (run.HERE / "README.md").read_text()


@pytest.fixture(scope="module")
def committed():
    errors = {}
    for row in run.results(run.HERE).rows.values():
        errors.setdefault((row["variant"], int(row["modes"]), row["window"]), []).append(
            float(row["error"])
        )
    return errors


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soe_quality")
    run.main(["--smoke", "--out", str(folder)])
    return folder


def expected_rows(num_alphas):
    return num_alphas * sum(len(v.modes) * len(v.windows) for v in run.VARIANTS.values())


def test_committed_rows_are_complete(committed):
    assert sum(map(len, committed.values())) == expected_rows(90)
    assert {len(errors) for errors in committed.values()} == {90}


@pytest.mark.parametrize(("modes", "error"), [(8, 1.34e-3), (16, 6.82e-4), (32, 6.45e-4)])
def test_the_papers_table(committed, modes, error):
    assert statistics.mean(committed["paper", modes, "W1"]) == pytest.approx(error, rel=0.02)


def test_rows_repeat():
    """A few committed rows, computed again."""
    rows = run.results(run.HERE).rows
    for variant, modes, alpha in (
        ("paper", 8, 0.3),
        ("paper_sum_le_1", 16, 0.5),
        ("shared_W2", 16, 0.9),
        ("prior_exact", 16, 0.5),
    ):
        task = run.Task(modes, alpha, "W1", 2000)
        error = float(run.measure(variant, task)["error"])
        kept = float(rows[run.key_of(variant, task)]["error"])
        assert error == pytest.approx(kept, rel=1e-3)


def test_better_banks_are_better(committed):
    """From the worst to the best, by their mean error over the orders."""
    order = (
        "prior_asymptotic",
        "prior_exact",
        "prior_exact_W2",
        "paper",
        "shared_W2",
        "best_range",
        "paper_sum_le_1",
        "shared_W1",
        "shared_W1_sum_le_1",
        "free_nodes",
    )
    means = [statistics.mean(committed[name, 16, "W1"]) for name in order]
    assert means == sorted(means, reverse=True)
    assert statistics.mean(committed["shared_W1", 8, "W1"]) < min(
        statistics.mean(committed["paper", modes, "W1"]) for modes in (8, 16, 32)
    )


def test_numbers_of_the_readme(committed):
    """Every row of its table of variants stands in results.csv."""
    seen = set()
    for line in README.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 6 or cells[0].strip("`") not in run.VARIANTS:
            continue
        variant = cells[0].strip("`")
        seen.add(variant)
        errors = [committed[variant, int(cells[1]), window] for window in ("W1", "W2")]
        numbers = [f(e) for e in errors for f in (statistics.mean, max)]
        assert cells[2:] == [f"{number:.2e}" for number in numbers]
    assert seen == set(run.VARIANTS)


def test_smoke_leaves_all_rows_and_a_figure(smoke):
    assert len(run.results(smoke).rows) == expected_rows(3)
    plot.main(["--out", str(smoke)])
    assert "order α" in (smoke / "figure.svg").read_text()


def test_a_second_run_computes_nothing(smoke, capsys, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("a row was computed again"))
    run.main(["--smoke", "--out", str(smoke)])
    assert "0 rows to compute" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    """What was computed before the interruption stays, and only the rest is computed."""
    arguments = ["--smoke", "--out", str(tmp_path), "--variants", "prior_exact"]
    measure, calls = run.measure, []

    def interrupted(variant, task):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(task)
        return measure(variant, task)

    monkeypatch.setattr(run, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.main(arguments)
    assert len(run.results(tmp_path).rows) == 2
    monkeypatch.setattr(run, "measure", lambda *a: calls.append(a[1]) or measure(*a))
    run.main(arguments)
    assert len(run.results(tmp_path).rows) == len(calls) == len(set(calls)) == 6


def test_a_folder_without_rows_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"has no rows; run python -m experiments\.soe_quality\.run"
    ):
        plot.main(["--out", str(tmp_path)])


def test_unknown_variants_are_named(capsys):
    with pytest.raises(SystemExit):
        run.main(["--variants", "best"])
    assert "'paper_sum_le_1'" in capsys.readouterr().err
