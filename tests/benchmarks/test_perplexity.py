"""The perplexity benchmark, on a tiny model whose weights differ only by rounding."""

import json
import math
from pathlib import Path

import perplexity
import pytest
import torch

from flash_frac.bench.rows import read_rows
from flash_frac.data import CorpusArguments, byte_tokenizer, prepare_corpus
from flash_frac.data.prepared import TOKENIZER
from flash_frac.models import FracForCausalLM
from tests.tiny import tiny_config

TEXTS = [f"{n} times {n} is {n * n}, and so it goes on." for n in range(40)]


@pytest.fixture
def folders(tmp_path):
    """A checkpoint, and tokens with held-out documents."""
    torch.manual_seed(0)
    model = FracForCausalLM(tiny_config(hidden_size=64, initializer_range=0.1))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in TEXTS))
    for name, share in (("tokens", 0.5), ("none", 0.0)):
        arguments = CorpusArguments(sources=(str(tmp_path / "a.jsonl"),), held_out=share)
        prepare_corpus(arguments, tmp_path / name, processes=1, progress=False)
    return [str(tmp_path / name) for name in ("model", "tokens", "none")]


def test_rows_say_what_the_rounding_changes(folders, tmp_path, capsys):
    checkpoint, tokens, none = folders
    out = tmp_path / "rows.csv"
    options = ["--length", "32", "--out", str(out), "--commit", "abc"]
    perplexity.main([checkpoint, tokens, *options])
    rows = read_rows(out, perplexity.COLUMNS)
    assert [row["weights"] for row in rows] == [rows[0]["dtype"], "int8", "fp8"]
    before = float(rows[0]["perplexity"])
    assert float(rows[0]["change_percent"]) == 0
    for row in rows:
        found = float(row["perplexity"])
        assert found == pytest.approx(math.exp(float(row["loss"])), rel=1e-4)
        assert float(row["change_percent"]) == pytest.approx(100 * (found / before - 1), abs=1e-3)
        assert int(row["tokens"]) % 32 == 0 < int(row["tokens"])
    assert 0 < abs(float(rows[1]["change_percent"])) < 0.5
    with pytest.raises(SystemExit):
        perplexity.main([checkpoint, none, *options])
    assert "has no held-out documents" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_takes_one(folders, tmp_path, capsys):
    """As `experiments.mixed_models.run --save` leaves it."""
    checkpoint, tokens, _ = folders
    for path in Path(checkpoint).glob("tokenizer*"):
        path.unlink()
    out = tmp_path / "rows.csv"
    options = [checkpoint, tokens, "--length", "32", "--out", str(out), "--quantize", "int8"]
    for refused, said in (([], "pass --tokenizer"), (["--tokenizer", "dna"], "was tokenised by")):
        with pytest.raises(SystemExit):
            perplexity.main([*options, *refused])
        assert said in capsys.readouterr().err
    perplexity.main([*options, "--tokenizer", str(Path(tokens) / TOKENIZER)])
    assert len(read_rows(out, perplexity.COLUMNS)) == 2
