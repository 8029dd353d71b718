"""The DNA experiment end to end on a tiny generated genome, and its protocol."""

import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.dna import plot, run
from experiments.dna.data import PAD, Interval, RowSettings, encode, make_rows
from experiments.dna.designs import CORES, MODELS, make_design
from experiments.dna.protocol import KEY, LENGTHS, LRS, Job, Protocol, parse
from experiments.dna.summary import SETTING, best_rows, lines
from experiments.language_model import loss, make_model, num_parameters
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.recipes import find_config

FEW = ["--smoke", "--models", "frac", "gated_deltanet", "--device", "cpu"]


@pytest.fixture(scope="module")
def fasta(tmp_path_factory):
    """A fixture and no genome: 12,000 bases drawn at random, with a gap in the middle."""
    bases = np.random.default_rng(0).choice(list("ACGT"), 12_000)
    bases[3000:3010] = "N"
    path = tmp_path_factory.mktemp("genome") / "tiny.fa"
    path.write_text(">tiny\n" + "\n".join("".join(part) for part in bases.reshape(-1, 60)) + "\n")
    return path


@pytest.fixture(scope="module")
def smoke(fasta, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dna")
    run.main([*FEW, "--fasta", str(fasta), "--out", str(folder)])
    return folder


def test_smoke_leaves_rows_and_a_figure(smoke):
    rows = list(run.results(smoke).rows.values())
    assert [(row["length"], row["model"], row["lr"]) for row in rows] == [
        (length, model, lr)
        for length in ("64", "128")
        for model in ("frac", "gated_deltanet")
        for lr in ("0.001", "0.004")
    ]
    for row in rows:
        assert row["data"] == "tiny.fa" and row["steps"] == "4"
        assert 3 < float(row["valid_ppl"]) < 2 * 16 and 3 < float(row["test_base_ppl"]) < 2 * 16
    # Of 23 intervals of 512 bases the last two are for the test: 1024 tokens, all of them.
    assert {row["test_tokens"] for row in rows} == {str(16 * 63), str(8 * 127)}
    plot.main(["--out", str(smoke)])
    assert "Gated DeltaNet" in (smoke / "figure.svg").read_text()


def test_a_second_run_trains_nothing(smoke, fasta, monkeypatch, capsys):
    monkeypatch.setattr(run, "train_together", lambda *_: pytest.fail("a run was repeated"))
    run.main([*FEW, "--fasta", str(fasta), "--out", str(smoke)])
    assert "128 frac" in capsys.readouterr().out


def test_what_was_interrupted_goes_on(fasta, tmp_path, monkeypatch):
    """The row of a finished run is kept, and the next call makes the others."""
    arguments = [*FEW[:3], "--device", "cpu", "--lengths", "64", "--fasta", str(fasta)]
    arguments += ["--strands", "2", "--out", str(tmp_path)]
    make_row, made = run.make_row, []

    def stops(job, *others):
        if made:
            raise KeyboardInterrupt
        made.append(job)
        return make_row(job, *others)

    monkeypatch.setattr(run, "make_row", stops)
    with pytest.raises(KeyboardInterrupt):
        run.main(arguments)
    (first,) = run.results(tmp_path).rows.values()
    monkeypatch.setattr(run, "make_row", make_row)
    run.main([*arguments, "--at-once", "2"])
    rows = list(run.results(tmp_path).rows.values())
    assert len(rows) == 2 and rows[0] == first


def test_models_rates_and_seeds_of_the_command_line(fasta, tmp_path):
    """Several at once; each is a row."""
    run.main([
        *("--smoke", "--models", "frac_delta", "mamba3", "--lrs", "1e-3", "2e-3"),
        *("--seeds", "0", "1", "--lengths", "64", "--max-tokens", "512", "--at-once", "4"),
        *("--device", "cpu", "--fasta", str(fasta), "--out", str(tmp_path)),
    ])  # fmt: skip
    rows = run.results(tmp_path).rows.values()
    found = {(row["model"], row["lr"], row["seed"]) for row in rows}
    assert found == set(product(("frac_delta", "mamba3"), ("0.001", "0.002"), ("0", "1")))
    assert {row["steps"] for row in rows} == {"2"}
    assert all(1 < float(row["test_ppl"]) < 100 for row in rows)


def test_bed_file_and_no_sep(fasta, tmp_path):
    bed = tmp_path / "a.bed"
    places = [("train", 0), ("train", 1000), ("valid", 4000), ("test", 5000)]
    bed.write_text("".join(f"tiny\t{at}\t{at + 200}\t{split}\n" for split, at in places))
    run.main([
        *FEW[:3], "--device", "cpu", "--lengths", "64", "--lrs", "1e-3", "--mode", "hyenadna",
        "--bed", str(bed), "--batch-tokens", "64", "--no-eos", "--unknown", "pad",
        "--fasta", str(fasta), "--out", str(tmp_path),
    ])  # fmt: skip
    (row,) = run.results(tmp_path).rows.values()
    assert (row["mode"], row["eos"], row["unknown"], row["test_tokens"]) == (
        "hyenadna", "0", "pad", "63",
    )  # fmt: skip


def test_a_missing_genome_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"does not exist; run python -m experiments\.dna\.fetch"):
        run.main([*FEW, "--fasta", str(tmp_path / "none.fa"), "--out", str(tmp_path)])


def arrays(bases, settings, **changes):
    genome = {"1": encode(bases)}
    splits = {"train": [Interval("1", 0, 40)], "valid": [Interval("1", 40, 60)]}
    splits["test"] = [Interval("1", 60, 80)]
    protocol = Protocol(data="a", rows=settings, **changes)
    return run.make_arrays(genome, splits, settings, protocol, torch.device("cpu"))


def test_arrays_of_both_strands():
    data = arrays("A" * 60 + "ACGT" * 5, RowSettings(20, eos=False), strands=2)
    assert data.inputs.shape == data.targets.shape == (4, 19)
    assert (data.inputs[:2] == 7).all() and (data.inputs[2:] == 10).all()
    assert data.valid.shape == (1, 20) and data.test[0, :4].tolist() == [7, 8, 9, 10]
    with pytest.raises(ValueError, match="length 30 leaves no row of the valid split"):
        arrays("A" * 80, RowSettings(30))


def test_order_draws_a_strand_for_every_row():
    order = run.row_order(20, 30, 5, 2, seed=0)
    rows, strand = order % 10, order // 10
    assert order.shape == (30, 5) and torch.equal(rows, run.row_order(10, 30, 5, 1, seed=0))
    assert 0.3 < strand.double().mean() < 0.7


def test_rows_that_are_evaluated_come_from_all_over():
    rows = np.arange(100)[:, None].repeat(10, 1)
    assert run.some_rows(rows, 0).shape == (100, 10)
    assert run.some_rows(rows, 300)[:, 0].tolist() == list(range(0, 100, 4))
    assert len(run.some_rows(rows, 5)) == 1


def test_scores_are_plain_perplexities():
    model = make_model(make_design("frac", "plain", small=True), seed=0)
    bases = "ACGTTGCANNACGTAC" * 20
    rows = make_rows({"1": encode(bases)}, [Interval("1", 5, 325)], RowSettings(80, "hyenadna"))
    rows[0, :3] = PAD
    found = run.score(model, torch.from_numpy(rows))
    tokens = torch.from_numpy(rows).long()
    with torch.no_grad():
        losses = F.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    targets = tokens[:, 1:]
    asked, base = losses[targets != PAD], losses[(targets >= 7) & (targets <= 10)]
    assert found.num_tokens == len(asked) == 79 - 2 and len(base) < len(asked)
    assert found.ppl == pytest.approx(asked.mean().exp().item(), rel=1e-5)
    assert found.base_ppl == pytest.approx(base.mean().exp().item(), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, 1e6])
def test_a_model_that_diverged_has_a_score(value):
    """An infinite one, which is never the best."""
    model = make_model(make_design("frac", "plain", small=True), seed=0)
    torch.nn.init.constant_(model.norm.weight, value)
    score = run.score(model, torch.randint(7, 11, (2, 20), dtype=torch.uint8))
    assert score.ppl == score.base_ppl == math.inf


SIZES = {
    "frac": (7_476_752, 3_247_632),
    "mamba3": (7_645_568, 3_416_448),
    "gated_deltanet": (7_439_104, 3_209_984),
    "mamba2": (7_560_640, 3_331_520),
    "attention": (7_381_248, 3_152_128),
    "frac_delta": (7_462_634, 3_233_514),
}


@pytest.mark.parametrize("model", MODELS)
def test_sizes(model):
    for core, size in zip(CORES, SIZES[model], strict=True):
        assert num_parameters(make_model(make_design(model, core), seed=0)) == size


def test_frac_delta_has_the_mixers_of_both():
    mixers = {
        name: [layer.mixer for layer in make_model(make_design(name, "swiglu"), seed=0).layers]
        for name in ("frac", "gated_deltanet", "frac_delta")
    }
    for number, mixer in enumerate(mixers["frac_delta"]):
        source = "gated_deltanet" if number in (1, 4, 7) else "frac"
        other = mixers[source][number]
        assert type(mixer) is type(other) and num_parameters(mixer) == num_parameters(other)


def test_plain_frac_is_the_model_of_the_recipe():
    """The recipe's model takes its weights, and has the same loss with them."""
    config = FracConfig.from_pretrained(find_config("frac-dna"))
    official = FracForCausalLM(config)
    ours = make_model(make_design("frac", "plain"), seed=0)
    official.model.load_state_dict(
        {name: w for name, w in ours.state_dict().items() if name != "lm_head.weight"}
    )
    tokens = torch.randint(7, 11, (1, 33), generator=torch.Generator().manual_seed(0))
    value = loss(ours, tokens[:, :-1], tokens[:, 1:])
    assert value.item() == pytest.approx(official(tokens, labels=tokens).loss.item(), rel=1e-6)


def test_designs_are_checked():
    with pytest.raises(ValueError, match=r"model must be one of frac, .*, got 'mamba'"):
        make_design("mamba", "plain")
    with pytest.raises(ValueError, match="core must be one of swiglu, plain, got 'mlp'"):
        make_design("frac", "mlp")


def test_protocol_of_the_paper():
    options, protocol = parse("", [])
    assert options.lengths == list(LENGTHS) == [1024, 4096, 8192, 16384, 32768, 65536]
    assert options.lrs == list(LRS) and len(LRS) == 8
    assert options.models == ["frac", "mamba3", "gated_deltanet", "mamba2"]
    assert (protocol.weight_decay, protocol.warmup, protocol.core) == (0.1, 0.1, "swiglu")
    tokens = {length * protocol.batch_size(length) for length in LENGTHS}
    assert tokens == {protocol.batch_tokens} and protocol.steps == 4096
    assert len(Job("frac", 1024, 1e-3, 0).key(protocol)) == len(KEY)
    assert parse("", ["--steps", "10", "--batch-tokens", "65536"])[1].max_tokens == 655_360


def test_protocol_is_checked():
    with pytest.raises(ValueError, match="batch_tokens must be a multiple of every length"):
        parse("", ["--lengths", "1000"])
    with pytest.raises(ValueError, match="max_tokens must be at least batch_tokens"):
        parse("", ["--max-tokens", "1000"])


def row(model="frac", length=1024, lr=1e-3, valid=3.0, test=3.1, seed=0, **changes):
    setting = dict.fromkeys(SETTING, "1")
    values = {"model": model, "length": length, "lr": lr, "seed": seed, "parameters": 7}
    values |= {"valid_ppl": valid, "test_ppl": test, "valid_base_ppl": 1, "test_base_ppl": 2}
    return setting | {name: str(value) for name, value in values.items()} | changes


def test_the_readme_has_the_table_of_the_rows(capsys, tmp_path):
    (tmp_path / "results.csv").write_bytes((run.HERE / "results.csv").read_bytes())
    plot.main(["--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 4 and "\n".join(lines) in (run.HERE / "README.md").read_text()


def test_the_learning_rate_is_chosen_on_the_validation_split():
    rows = [
        row(lr=1e-3, valid=3.2, test=3.0),
        row(lr=2e-3, valid=3.1, test=3.3),
        row(lr=4e-3, valid=math.inf, test=math.inf),
        row(model="mamba3", lr=1e-3, valid=3.0, test=3.4),
        row(lr=1e-3, valid=1.0, test=1.0, steps="2"),
    ]
    found = best_rows(rows)
    assert len(found) == 2
    score = found[("1",) * len(SETTING)]["frac", 1024]
    assert (score.ppl, score.lr, score.at_edge) == (3.3, 2e-3, False)
    text = "\n".join(lines(found))
    assert "frac            3.3000" in text and "mamba3" in text
    assert best_rows(rows, "base_ppl")[("1",) * len(SETTING)]["frac", 1024].ppl == 2


def test_unfinished_learning_rates_do_not_count():
    seeds = [row(lr=1e-3, valid=3.2, test=3 + seed, seed=seed) for seed in (0, 1)]
    (found,) = best_rows([*seeds, row(lr=2e-3, valid=3.0)]).values()
    score = found["frac", 1024]
    assert (score.lr, len(score.values), score.ppl) == (1e-3, 2, 3.5)
    assert score.spread == pytest.approx(math.sqrt(0.5))


def test_what_diverged_is_told_and_not_drawn(tmp_path):
    table = run.results(tmp_path)
    made = [row(test=test, seed=i) for i, test in enumerate((math.inf, 3.0))]
    made += [row(length=4096, test=3 + i, seed=i) for i in (0, 1)]
    table.append([dict.fromkeys(table.columns, "1") | values for values in made])
    assert "inf ± inf over 2 seeds" in "\n".join(lines(best_rows(table.rows.values())))
    plot.main(["--out", str(tmp_path)])
    assert "Frac" in (tmp_path / "figure.svg").read_text()


def test_a_figure_is_of_one_setting(tmp_path):
    with pytest.raises(SystemExit, match=r"must have rows of one setting .* found none"):
        plot.main(["--out", str(tmp_path)])
    table = run.results(tmp_path)
    table.append([dict.fromkeys(table.columns, "1") | row(core=core) for core in ("a", "b")])
    with pytest.raises(SystemExit, match="choose with --steps and --core"):
        plot.main(["--out", str(tmp_path)])


def test_a_figure_is_of_the_most_steps(tmp_path, capsys):
    """In numbers, not in letters: 1536 steps are more than 384. New models need not be Frac."""
    short = [row(steps="384", test=3.3), row("mamba3", steps="384", test=3.2)]
    long = [
        row(model, length, seed=seed, steps="1536", test=3.1 + seed)
        for model in ("mamba3", "frac_delta")
        for length in (1024, 65536)
        for seed in (0, 1)
    ]
    table = run.results(tmp_path)
    table.append([dict.fromkeys(table.columns, "1") | each for each in (*short, *long)])
    plot.main(["--out", str(tmp_path)])
    found = capsys.readouterr().out.splitlines()
    assert found[0] == "| `--core 1` | 1K | 64K |" and len(found) == 6
    assert found[2] == "| Frac + delta, test perplexity | 3.600 ± 0.707 | 3.600 ± 0.707 |"
    plot.main(["--out", str(tmp_path), "--steps", "384"])
    assert "| Frac, test perplexity | 3.300 |" in capsys.readouterr().out
