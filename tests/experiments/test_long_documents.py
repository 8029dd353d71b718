"""The corpus, the planted facts and small runs of experiments/long_documents."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.language_model import make_model, num_parameters, token_losses
from experiments.long_documents import plot, prepare, run, study, summary
from experiments.long_documents.corpus import (
    read_corpus,
    toy_corpus,
    training_rows,
    windows,
    write_corpus,
)
from experiments.long_documents.measure import last_logits, loss_of_windows
from experiments.long_documents.models import DESIGNS, RECIPE, fitted, num_inner_parameters
from experiments.long_documents.recall import (
    LEAD,
    NUM_DIGITS,
    Phrases,
    draw_questions,
    find_phrases,
    plant,
    recall,
    row_length,
)
from experiments.style import cell
from flash_frac.models import FracConfig, FracForCausalLM

CORPUS = toy_corpus()
DISTANCES = [64, 100, 512]


def some_questions(num=200, seed=0):
    return draw_questions(
        num,
        num_names=len(CORPUS.phrases.questions),
        text_length=len(CORPUS.held_out),
        longest=max(DISTANCES),
        seed=seed,
    )


def planted(distance, *, control=False, num=200):
    rows = plant(
        CORPUS.held_out, CORPUS.phrases, some_questions(num), distance=distance, control=control
    )
    return torch.from_numpy(rows)


def oracle(rows, count):
    """Finds the last place where the tokens before the answer stood before, and copies from it."""
    guesses = torch.zeros(len(rows), count, dtype=torch.long)
    for row, guess in zip(rows, guesses, strict=True):
        words = row[-count - 20 : -count]
        before = row[: -count - 1].unfold(0, len(words), 1)
        place = int((before == words).all(-1).nonzero()[-1]) + len(words)
        guess.copy_(row[place : place + count])
    return 30 * F.one_hot(guesses, CORPUS.vocab_size).float()


def no_context(rows, count):
    """Knows that digits are asked for, and not which."""
    logits = torch.full((len(rows), count, CORPUS.vocab_size), -30.0)
    logits[..., CORPUS.phrases.digits] = 0.0
    return logits


@pytest.mark.parametrize("distance", DISTANCES)
def test_known_answers(distance):
    copied = recall(oracle, planted(distance), rows_at_once=64)
    assert copied.accuracy == copied.exact == 1.0 and copied.loss < 1e-6
    guessed = recall(no_context, planted(distance), rows_at_once=64)
    assert guessed.loss == pytest.approx(math.log(10), rel=1e-4)
    # 1,000 digits, of which one in ten is the digit that is always guessed.
    assert guessed.accuracy == pytest.approx(0.1, abs=0.04) and guessed.exact == 0


def test_the_control_states_another_value():
    misled = recall(oracle, planted(64, control=True), rows_at_once=200)
    assert misled.accuracy == pytest.approx(0.1, abs=0.04) and misled.exact == 0
    assert misled.loss > 20
    rows, control = planted(64), planted(64, control=True)
    differ = (rows != control).any(0).nonzero().flatten().tolist()
    assert differ == list(range(LEAD, LEAD + NUM_DIGITS))


def test_the_fact_stands_at_its_distance():
    questions = some_questions()
    for distance in DISTANCES:
        rows = planted(distance)
        assert rows.shape == (200, row_length(distance))
        stated, asked = rows[:, LEAD : LEAD + NUM_DIGITS], rows[:, -NUM_DIGITS:]
        assert torch.equal(stated, asked)
        assert rows.shape[1] - NUM_DIGITS - LEAD == distance
        digits = torch.tensor(CORPUS.phrases.digits)
        assert torch.equal(asked, digits[torch.from_numpy(questions.values)])
        # Between the two, and before them, is the text itself.
        end = int(questions.ends[0])
        text = torch.from_numpy(CORPUS.held_out.astype(np.int64))[end - rows.shape[1] : end]
        question = CORPUS.phrases.questions[questions.names[0]]
        inside = slice(LEAD + NUM_DIGITS + len(CORPUS.phrases.ending), -len(question) - NUM_DIGITS)
        assert torch.equal(rows[0, inside], text[inside])
        assert torch.equal(rows[0, : LEAD - len(question)], text[: LEAD - len(question)])
    # The rows of all distances end alike.
    near, far = planted(100)[:, -80:], planted(512)[:, -80:]
    assert torch.equal(near, far)


def test_phrases_are_those_of_the_text():
    phrases = CORPUS.phrases
    text = bytes(token - 3 for token in (*phrases.questions[3], phrases.digits[7])).decode()
    assert text == "\n\nThe access code of Balost is 7"
    assert bytes(token - 3 for token in phrases.ending) == b".\n\n"


def test_wrong_use_is_named():
    with pytest.raises(ValueError, match="encode must map each digit to its own token"):
        find_phrases(lambda text: [hash(word) for word in text.split()])
    with pytest.raises(ValueError, match="text_length must be at least"):
        draw_questions(4, num_names=1, text_length=100, longest=64, seed=0)
    with pytest.raises(ValueError, match="num must be at least 2"):
        draw_questions(1, num_names=1, text_length=1000, longest=64, seed=0)
    with pytest.raises(ValueError, match="distance must be at least"):
        planted(20)
    with pytest.raises(ValueError, match="length must divide longest"):
        windows(CORPUS.held_out, 100, longest=256)
    with pytest.raises(ValueError, match="longest must be at most the 4095 tokens"):
        windows(CORPUS.held_out, 8192, longest=8192)
    with pytest.raises(ValueError, match="length must be below"):
        training_rows(CORPUS.train[:10], 64)
    with pytest.raises(SystemExit, match="--corpus must name"):
        run.main(["--models", "frac"])


def test_a_corpus_is_read_as_it_was_written(tmp_path):
    write_corpus(tmp_path, CORPUS)
    found = read_corpus(tmp_path)
    assert np.array_equal(found.train, CORPUS.train)
    assert np.array_equal(found.held_out, CORPUS.held_out)
    assert found[2:4] == CORPUS[2:4] and found.phrases == Phrases(*map(list, CORPUS.phrases))
    facts = json.loads((tmp_path / "corpus.json").read_text())
    (tmp_path / "corpus.json").write_text(json.dumps(facts | {"train": 7}))
    with pytest.raises(ValueError, match="must hold 7 tokens, got 8192"):
        read_corpus(tmp_path)
    with pytest.raises(ValueError, match="folder must hold corpus"):
        read_corpus(tmp_path / "elsewhere")


def test_prepare_splits_by_document(tmp_path):
    texts = [f"Document {n}.\n" for n in range(300)]
    lines = "".join(json.dumps({"name": "x", "text": text}) + "\n" for text in texts)
    (tmp_path / "some.jsonl").write_text(lines)
    prepare.main([str(tmp_path / "some.jsonl"), "bytes", str(tmp_path / "tokens")])
    corpus = read_corpus(tmp_path / "tokens")
    eos = 2
    assert corpus.vocab_size == 259
    assert (corpus.held_out == eos).sum() == corpus.held_out_documents > 0
    documents = "".join(
        bytes(int(token) - 3 for token in tokens if token != eos).decode()
        for tokens in (corpus.train, corpus.held_out)
    )
    assert sorted(documents.splitlines()) == sorted(text.strip() for text in texts)


def test_training_rows_are_all_tokens_in_turn():
    inputs, targets = training_rows(CORPUS.train, 100)
    assert inputs.shape == targets.shape == (81, 100)
    ids = torch.from_numpy(CORPUS.train.astype(np.int32))
    assert torch.equal(inputs.flatten(), ids[:8100])
    assert torch.equal(targets.flatten(), ids[1:8101])


def test_windows_score_the_same_tokens_at_each_length():
    scored = [
        windows(CORPUS.held_out, length, longest=1024, max_tokens=3000)[:, 1:].flatten()
        for length in (128, 256, 1024)
    ]
    assert len(scored[0]) == 2048
    assert torch.equal(scored[0], scored[1]) and torch.equal(scored[0], scored[2])


@pytest.fixture(scope="module")
def tiny():
    return make_model(fitted(DESIGNS["frac"], CORPUS.vocab_size, smoke=True), seed=0)


def test_measurements_are_those_of_the_logits(tiny):
    rows = planted(64, num=4)
    with torch.no_grad():
        logits = tiny.eval()(rows[:, :-1])
    torch.testing.assert_close(last_logits(tiny, rows, 5), logits[:, -5:])
    losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert loss_of_windows(tiny, rows) == pytest.approx(losses.item(), rel=1e-5)
    pieces = loss_of_windows(tiny, rows, tokens_at_once=50)
    assert pieces == pytest.approx(losses.item(), rel=1e-5)
    assert token_losses(tiny, rows, 1000).shape == (4, rows.shape[1] - 1)


def test_a_model_may_read_in_pieces_of_its_own(tiny, monkeypatch):
    rows = planted(64, num=4)
    losses, logits = token_losses(tiny, rows, 1000), last_logits(tiny, rows, 5)
    # The last piece has two tokens, fewer than are asked for.
    monkeypatch.setattr(tiny, "piece", rows.shape[1] - 3)
    torch.testing.assert_close(token_losses(tiny, rows, 1000), losses)
    torch.testing.assert_close(last_logits(tiny, rows, 5), logits)


@pytest.mark.parametrize("name", DESIGNS)
def test_sizes_are_alike(name):
    with torch.device("meta"):
        model = make_model(DESIGNS[name], seed=0)
    assert num_inner_parameters(model) == pytest.approx(29.9e6, rel=0.025)
    assert num_parameters(model) - num_inner_parameters(model) == 32000 * 512
    assert f"| {num_inner_parameters(model):,} |" in (run.HERE / "README.md").read_text()


@pytest.mark.parametrize("name", ["frac", "gated_deltanet"])
def test_sizes_of_states(name):
    with torch.no_grad():
        _, states = make_model(DESIGNS[name], seed=0).encode(torch.zeros(1, 1, dtype=torch.long))
    numbers = sum(state.recurrent.numel() for state in states)
    assert f"{numbers:,}" in (run.HERE / "README.md").read_text()


def test_the_readme_has_the_numbers_of_the_table():
    _, by_steps = summary.asked_runs("", [], run.HERE)
    assert run.STEPS in by_steps
    text = (run.HERE / "README.md").read_text()
    for found in by_steps.values():
        tables = summary.table(found, "perplexity", "perplexity", digits=3)
        for column in ("accuracy", "control_accuracy"):
            tables += summary.table(found, "recall", column, scale=100, digits=1)
        for line in tables:
            assert line in text


def test_frac_is_the_recipes_model():
    design, config = DESIGNS["frac"], FracConfig.from_pretrained(RECIPE)
    assert design.options["settings"] == config.control_settings()
    assert (design.hidden_size, design.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (design.num_heads, design.head_dim) == (config.num_attention_heads, config.frac_head_dim)
    assert design.options["num_modes"] == config.frac_num_modes
    assert design.options["tau_max"] == config.frac_tau_max
    assert design.options["read_init"] == config.frac_residual_read_init


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long_documents")
    run.main(["--smoke", "--out", str(folder), "--at-once", "2", "--save", str(folder / "saved")])
    return folder


def test_smoke_leaves_rows_a_figure_and_tables(smoke, capsys):
    rows = list(study.results(smoke).rows.values())
    assert {row["model"] for row in rows} == {*DESIGNS}
    for row in rows:
        assert math.isfinite(float(row["loss"]))
        assert (row["perplexity"] == "") == (row["measurement"] == "recall")
    plot.main(["--out", str(smoke)])
    assert "Gated DeltaNet" in (smoke / "figure.svg").read_text()
    summary.main(["--out", str(smoke)])
    assert capsys.readouterr().out.count("| Frac |") == 6


def test_a_saved_model_is_one_of_the_library(smoke):
    names = ("frac-lr0.002-seed0-steps3", "frac_paper_clock-lr0.002-seed0-steps3")
    folder, other = sorted((smoke / "saved").iterdir())
    assert (folder.name, other.name) == names
    settings = FracForCausalLM.from_pretrained(other).config.control_settings()
    assert settings == DESIGNS["frac_paper_clock"].options["settings"]
    trained = FracForCausalLM.from_pretrained(folder)
    options = run.parse(["--smoke"])
    protocol = study.make_protocol(options)
    rows = windows(protocol.corpus.held_out, 64, longest=128, max_tokens=None)
    known = study.results(smoke).rows["frac", "0.002", "0", "3", "perplexity", "64"]
    with torch.no_grad():
        logits = trained(rows[:, :-1].long()).logits
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten().long())
    assert loss.item() == pytest.approx(float(known["loss"]), abs=2e-5)


def test_a_second_run_trains_nothing(smoke, monkeypatch):
    monkeypatch.setattr(study, "train_rows", lambda *_: pytest.fail("a run was repeated"))
    run.main(["--smoke", "--out", str(smoke)])
    run.main(["--smoke", "--out", str(smoke), "--save", str(smoke / "saved")])


def test_a_model_with_rows_is_trained_again_for_its_checkpoint(
    smoke, tmp_path, monkeypatch, capsys
):
    """Only Frac models have checkpoints here. One without its last file is not complete."""
    trained = []
    monkeypatch.setattr(study, "train_rows", lambda jobs, *_: trained.extend(jobs) or ())
    (tmp_path / "frac-lr0.002-seed0-steps3").mkdir()
    run.main(["--smoke", "--out", str(smoke), "--save", str(tmp_path)])
    assert [job.model for job in trained] == ["frac", "frac_paper_clock"]
    assert "frac-lr0.002-seed0-steps3 has rows but is not saved" in capsys.readouterr().out


def test_a_model_is_trained():
    """It learns which 65 of 259 ids are in use, all equally likely; nobody can do better."""
    options = run.parse(["--smoke"])
    protocol = study.make_protocol(options)

    def make(name, seed):
        return make_model(fitted(DESIGNS[name], CORPUS.vocab_size, smoke=True), seed)

    ((row, _),) = study.train_rows([study.Job("frac", 1e-2, 0, 60)], make, protocol)
    assert 64 < row["perplexity"] < 75


def row(model="frac", lr="0.002", seed="0", steps="10", length="4096", perplexity="10.0"):
    return {
        "model": model,
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "measurement": "perplexity",
        "length": length,
        "loss": str(math.log(float(perplexity))),
        "perplexity": perplexity,
        "train_length": "4096",
    }


def test_the_best_learning_rate_counts():
    rows = [
        row(seed="0", perplexity="10"),
        row(seed="1", perplexity="12"),
        row(seed="0", lr="0.001", perplexity="9"),
        row(seed="1", lr="0.001", perplexity="11"),
        # A length that was not trained at, a rate that is not finished, and shorter runs.
        row(seed="0", length="1024", perplexity="1"),
        row(lr="0.004", perplexity="2"),
        row(steps="5", perplexity="2"),
    ]
    runs = summary.best_runs(rows, steps=10)["frac"]
    assert (runs.lr, runs.num_seeds) == (0.001, 2)
    assert runs.values("perplexity", "perplexity") == {4096: [9.0, 11.0]}
    assert summary.best_runs(rows, steps=5)["frac"].num_seeds == 1
    assert summary.best_runs([], steps=10) == {}
    assert cell([9.0, 11.0], 2) == "10.00 ± 1.41"


def test_runs_are_asked_for_by_their_steps(tmp_path, capsys):
    columns = dict.fromkeys(study.COLUMNS)
    rows = [columns | row(steps="5", perplexity="20"), columns | row(steps="10")]
    study.results(tmp_path).append(rows)
    summary.main(["--out", str(tmp_path)])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")] == [
        "# 5 steps",
        "# 10 steps",
    ]
    for arguments, panels in (([], 2), (["--steps", "5"], 1)):
        plot.main(["--out", str(tmp_path), *arguments])
        text = (tmp_path / "figure.svg").read_text()
        # Without rows of recall there is no panel for it.
        assert text.count("steps: perplexity (seeds)") == text.count("Frac (1)") == panels
        assert "5 steps: perplexity" in text and "steps: recall" not in text
    with pytest.raises(SystemExit, match=r"--steps must be one of \[5, 10\]"):
        summary.main(["--out", str(tmp_path), "--steps", "7"])


def test_ratios_are_taken_seed_by_seed():
    assert summary.ratios({0: 2.0, 1: 9.0, 2: 5.0}, {1: 3.0, 0: 4.0}) == [0.5, 3.0]


def test_a_folder_without_rows_is_named(tmp_path):
    for module in (plot, summary):
        with pytest.raises(SystemExit, match="has no rows"):
            module.main(["--out", str(tmp_path)])


def test_a_diverged_rate_is_not_the_best():
    row = {"measurement": "perplexity", "length": "64", "train_length": "64", "seed": "0"}
    losses = {"0.008": "nan", "0.002": "2.5", "0.001": "3.5"}
    rows = [row | {"model": "frac", "steps": "9", "lr": lr, "loss": x} for lr, x in losses.items()]
    assert summary.best_runs(rows, 9)["frac"].lr == 0.002


def test_cells_with_fewer_seeds_say_so():
    rows = [
        {"measurement": "perplexity", "length": str(n), "seed": str(seed), "perplexity": "8"}
        for n, seed in ((64, 1), (128, 0), (128, 1))
    ]
    runs = summary.Runs(0.1, rows)
    (*_, line) = summary.table({"frac": runs}, "perplexity", "perplexity", digits=1)
    assert line == "| Frac | 2 | 0.1 | 8.0 (1) | 8.0 ± 0.0 |"
    assert (runs.shown_seeds, summary.Runs(0.1, rows[1:]).shown_seeds) == ("1 to 2", "2")
