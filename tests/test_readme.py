"""The documents: files and commands exist, lines are short. `test_docs.py` runs their code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = ("benchmarks", "docs", "experiments", "flash_frac", "tests")
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml")
}
GUIDES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
DOCUMENTS = sorted({*GUIDES, *(ROOT / path for path in FILES if path.endswith(".md"))})


def name(document):
    return document.relative_to(ROOT).as_posix()


def without_code(document):
    code = r"^ *```.*?^ *```$"
    return re.sub(code, "", document.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", GUIDES, ids=name)
def test_paths_exist(document):
    """Paths from the root, and names of files in any folder."""
    paths = []
    for span in re.findall(r"`([^`\n]+)`", without_code(document)):
        paths += re.findall(rf"(?<![\w./])(?:{'|'.join(FOLDERS)})/[\w./-]*", span)
        paths += re.findall(r"^[\w./-]+\.(?:py|md|yaml)$", span)
    missing = [
        path
        for path in paths
        if not (ROOT / path).exists() and not any(file.endswith(f"/{path}") for file in FILES)
    ]
    assert not missing
    assert paths or document.name != "README.md"


@pytest.mark.parametrize("document", GUIDES, ids=name)
def test_pictures_exist_and_are_described(document):
    """Each has a text for those who do not see it; screenshots are small."""
    for words, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", document.read_text()):
        picture = document.parent / path
        assert picture.exists() and len(words.split()) > 3, path
        assert picture.suffix == ".svg" or picture.stat().st_size < 150_000, path


def test_modules_exist():
    """Those that commands name, in text and in blocks of code."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    modules = re.findall(r"python -m ((?:flash_frac|experiments)(?:\.\w+)*)", text)
    paths = {module.replace(".", "/") for module in modules}
    missing = [path for path in paths if not {f"{path}.py", f"{path}/__main__.py"} & FILES]
    assert paths and not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_lines_fit_in_120_columns(document):
    """Tables and code aside."""
    lines = without_code(document).splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.lstrip().startswith("|")]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (\w+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 100
