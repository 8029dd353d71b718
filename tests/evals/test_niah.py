"""The suite "niah": prompts equal lm-eval's; models that know or do not know get 100 or 0."""

import re
import shutil

import pytest
import torch

from flash_frac.evals import niah
from flash_frac.evals.language_model import FracLM
from flash_frac.evals.runner import Settings, evaluate
from flash_frac.evals.suites import SUITES
from tests.evals.known import SAMPLES, request

SUITE = SUITES["niah"]


class Copyist(FracLM):
    """Generates the value of the first needle in its prompt, token by token as models do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._has_engine = False

    def _model_generate(self, context, max_length, stop, *, attention_mask, **options):
        answers = []
        for row, mask in zip(context, attention_mask, strict=True):
            text = self.tokenizer.decode(row[mask.bool()])
            value = re.search(r"special magic \w+ for [\w-]+ is: (\S+)\.", text)[1]
            answers.append(f" {value}.")
        self.tokenizer.padding_side = "right"
        new = self.tokenizer(answers, padding=True, return_tensors="pt").input_ids
        return torch.cat([context, new], 1)


@pytest.fixture(scope="module")
def settings():
    return Settings(suites=("niah",), lengths=(640, 4096), data_dir=SAMPLES, limit=3)


def test_who_copies_the_needle_gets_everything(checkpoint, tmp_path, settings, no_network):
    lm = Copyist(str(checkpoint), batch_size=3)
    report = evaluate(str(checkpoint), tmp_path, settings, lm=lm)
    assert [unit["length"] for unit in report["units"]] == [640, 4096] * 3
    assert all(unit["results"]["accuracy"] == 1 for unit in report["units"])
    table = (tmp_path / "results.md").read_text()
    assert "| S-NIAH-3 (acc) | 640 | 4,096 |" in table and table.count("| 100.0 | 100.0 |") == 3


def test_who_knows_nothing_gets_nothing(uniform, tmp_path, settings, no_network):
    report = evaluate(str(uniform), tmp_path, settings)
    assert all(unit["results"]["accuracy"] == 0 for unit in report["units"])
    assert all(unit["results"]["num_truncated"] == 0 for unit in report["units"])


def test_prompts_are_those_of_lm_eval(checkpoint):
    """From the same seed, the prompts of the same length."""
    import random

    lm = FracLM(str(checkpoint))
    ours = niah.examples(request(SUITE, "niah_single_1", lm, length=1024, limit=5))
    from lm_eval.tasks.ruler.niah_utils import niah_single_1

    random.seed(0)
    theirs = niah_single_1(max_seq_lengths=[1024], tokenizer=str(checkpoint))["test"]
    assert len(theirs) == niah.NUM_EXAMPLES and list(theirs)[:5] == ours


def test_essays_fill_the_length(checkpoint):
    lm = FracLM(str(checkpoint))
    asked = request(SUITE, "niah_single_2", lm, length=8192, limit=2)
    for row in niah.examples(asked):
        # Whole steps of 500 words, about 3,000 bytes each.
        assert 8192 - 3500 < row["length"] <= 8192
        assert row["outputs"][0] in row["input"]


def test_too_little_text_is_an_error(checkpoint):
    """lm-eval would take what there is, and call it 64K."""
    lm = FracLM(str(checkpoint))
    with pytest.raises(ValueError, match=r"essays have 12\d{3} tokens, too few for .* 65536"):
        niah.examples(request(SUITE, "niah_single_3", lm, length=65536, limit=1))


def test_missing_essays_are_named(checkpoint, tmp_path):
    (tmp_path / "niah").mkdir()
    settings = Settings(suites=("niah",), data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"missing .*niah/\*\.txt: frac eval prepare .* niah"):
        evaluate(str(checkpoint), tmp_path / "out", settings)
    with pytest.raises(ValueError, match="there is no text in"):
        niah.essays(tmp_path / "niah")
    shutil.copy(SAMPLES / "niah" / "address.txt", tmp_path / "niah" / "any.txt")
    # What is said of the texts is not one of them.
    (tmp_path / "niah" / "SOURCE.txt").write_text("an address\n")
    assert [path.name for path in niah.essays(tmp_path / "niah")] == ["any.txt"]


def test_sentences():
    text = 'It grew by 2.5 percent. "Really?" Yes! 1990 was another year.'
    assert niah.split_sentences(text) == [
        "It grew by 2.5 percent.",
        '"Really?" Yes!',
        "1990 was another year.",
    ]
