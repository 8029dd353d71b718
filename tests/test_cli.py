"""The command `frac`, as it is typed."""

import json
import subprocess
import sys

import pytest

from tests.commands import frac, make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def test_help_and_errors():
    command = [sys.executable, "-m", "flash_frac.cli", "--help"]
    typed = subprocess.run(command, capture_output=True, text=True)
    assert "train" in typed.stdout and typed.returncode == frac("--help").returncode == 0
    done = frac("train", "absent.yaml")
    assert done.returncode == 1 and done.stderr.startswith("frac: there is no recipe absent.yaml")
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    done = frac("train", "x.yaml")
    assert done.returncode == 1
    assert "frac train needs accelerate: pip install 'flash-frac[train]'" in done.stderr


def test_bench(checkpoint, tmp_path):
    out = tmp_path / "rows.json"
    options = ("--parts", "prefill", "--peers", "none", "--lengths", "16,32", "--out", out)
    done = frac("bench", checkpoint, *options)
    assert done.returncode == 0, done.stderr
    assert "| tokens/s | prefill@16 | prefill@32 |" in done.stdout
    # Neither rows of a 1.3B model on a GPU, nor the error of another dtype than the rows have.
    assert "paper" not in done.stdout and "bfloat16" not in done.stdout
    assert "a small model in float32: logits off by" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32"}
    assert all(float(row["error"]) < 1e-5 for row in rows)


def test_doctor():
    done = frac("doctor", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_inspect(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("memory fades as a power law " * 20)
    out = tmp_path / "out"
    done = frac("inspect", checkpoint, "--text", tmp_path / "text.txt", "--out", out)
    assert done.returncode == 0, done.stderr
    assert (out / "index.html").exists() and (out / "report.json").exists()
