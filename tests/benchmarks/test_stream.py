"""The benchmark of streams, with a tiny model on the CPU."""

import csv
import json

import pytest
import stream
import torch

from tests.benchmarks.test_model import TINY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes would be a GPU's")


def test_files_and_steps_are_timed(tmp_path, capsys):
    config, out = tmp_path / "config.json", tmp_path / "out.csv"
    config.write_text(json.dumps(TINY))
    stream.main(["--config", str(config), "--out", str(out), "--commit", "abc"])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["pass"] for row in rows] == ["save", "load", "stream"]
    assert all(float(row["ms_p50"]) > 0 and row["dtype"] == "bfloat16" for row in rows)
    # A file's time has nothing to do with how many tokens were fed.
    assert [row["tokens_per_s"] != "" for row in rows] == [False, False, True]
    assert float(rows[2]["tokens_per_s"]) == pytest.approx(1e3 / float(rows[2]["ms_p50"]), rel=2e-3)
    assert capsys.readouterr().out.count("(FracStream)") == 3


def test_a_stream_that_stops_early_is_refused(monkeypatch):
    class Short:
        def generate(self, **_):
            return iter(range(3))

    with pytest.raises(AssertionError, match="3 of 5"):
        stream.step_times(Short(), 5)
