"""What the README says: its code runs, its files exist, its targets are in the Makefile."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_runs(tmp_path, monkeypatch):
    """All python blocks, one after another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "my-frac" / "model.safetensors").exists()
    assert names["fit"].error < 1e-3


@pytest.mark.parametrize(
    "document",
    [
        *("README.md", "CONTRIBUTING.md", "docs/maths.md", "docs/log.md"),
        *("docs/hybrid.md", "docs/serving.md", "docs/evaluation.md"),
    ],
)
def test_paths_exist(document):
    text = (ROOT / document).read_text()
    pattern = r"`((?:flash_frac|tests|docs|benchmarks|recipes)/[\w./-]+)"
    paths = [path.rstrip(".") for path in re.findall(pattern, text)]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert paths and not missing


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_length():
    assert len(README.splitlines()) <= 150
