"""What a release states about itself: one version everywhere, and the tested Python versions."""

import re
import tomllib
from pathlib import Path

import yaml

import flash_frac

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_one_version():
    """The package has it; build and command read it there, and texts that repeat it agree."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_frac.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert flash_frac.__version__ == citation["version"] == newest[1]


def test_the_changelog_has_its_form():
    """Keep a Changelog: versions from the newest on, each with a date, and sections by kind."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    heads = [line for line in lines if line.startswith("## ")]
    dated = r"## \[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|unreleased)"
    assert heads and all(re.fullmatch(dated, head) for head in heads)
    versions = [tuple(map(int, re.findall(r"\d+", head)[:3])) for head in heads]
    assert versions == sorted(versions, reverse=True)
    kinds = {line[4:] for line in lines if line.startswith("### ")}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_pythons_agree():
    """The lowest of the classifiers is what the build, the linter and the type checker take."""
    classifiers = PROJECT["project"]["classifiers"]
    pythons = [c.split(":: ")[-1] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    minors = [int(python[2:]) for python in pythons]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{pythons[0].replace('.', '')}"
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == pythons[0]


def test_templates_of_issues_have_a_head():
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
    assert templates
    for path in templates:
        head = yaml.safe_load(path.read_text().split("---\n")[1])
        assert set(head) == {"name", "about", "labels"}, path.name
