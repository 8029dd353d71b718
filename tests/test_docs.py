"""Code in the README and the pages of the site: each block runs on its own, as they promise.

Blocks without a title are run. Blocks with a title, from the list below, cannot run here; their
syntax, the options of their commands and their recipes are checked.
"""

import ast
import base64
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from typer.main import get_command

from flash_frac.cli import app
from flash_frac.train import load_recipe
from tests.commands import frac
from tests.test_layout import ROOMS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TITLES = {
    "in a clone",
    "needs a GPU",
    "needs a network",
    "needs a server",
    "needs several GPUs",
    "takes minutes",
}
BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    page: str
    line: int
    language: str
    title: str
    code: str


def blocks_of(path):
    text = path.read_text()
    for found in BLOCK.finditer(text):
        _, language, options, code = found.groups()
        title = re.fullmatch(r' title="([^"]+)"', options)
        assert title or not options, f"{path.name}: {options}"
        line = text[: found.start()].count("\n") + 1
        page = path.relative_to(ROOT).as_posix().removeprefix("docs/")
        yield Block(page, line, language, title[1] if title else "", code)


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
# Hours of work, so their code is never run.
EXPERIMENTS = [x for path in sorted(ROOT.glob("experiments/**/*.md")) for x in blocks_of(path)]
SHELL = [block for block in BLOCKS if block.language == "bash"]
PYTHON = [block for block in BLOCKS if block.language == "python"]
START = next(block for block in PYTHON if block.page == "index.md")


def name(block):
    return f"{block.page}:{block.line}"


def run(block):
    names = {"__name__": "__main__"}
    exec(compile(block.code, name(block), "exec"), names)
    return names


def to_run(blocks):
    return [block for block in blocks if not block.title]


@pytest.fixture(scope="module")
def names_of_the_examples(tmp_path_factory):
    """What docs/index.md says that there is: a checkpoint, made as it is there, and texts."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(START)
    (folder / "book.txt").write_text("Memory fades as a power law, not as an exponential.\n" * 60)
    for texts in ("my-texts", "other-texts"):
        (folder / texts).mkdir()
        (folder / texts / "a.txt").write_text(f"Some words of {texts}. " * 200)
    return folder


@pytest.fixture
def examples(names_of_the_examples, tmp_path, monkeypatch):
    folder = shutil.copytree(names_of_the_examples, tmp_path / "examples")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("block", to_run(PYTHON), ids=name)
def test_python_runs(block, examples):
    run(block)


# What bash does in place of a command: note what is piped into it, and its words. A record is
# written at once, because commands with & behind them write side by side.
NOTE = r"""
note() {
    local record= words
    if [ -p /dev/stdin ] && [ "$PATH" != /nothing ]; then record=$(base64 -w0); fi
    printf -v words '\x1f%s' "$@"
    printf '%s\x1e' "$record$words" >> calls
}
"""
RUN_OTHERS = 'frac() { note frac "$@"; }\n'
# Folders that a block would make do not exist here, so it stays in this one.
RUN_NOTHING = 'command_not_found_handle() { note "$@"; }\ncd() { note cd "$@"; }\nPATH=/nothing\n'


def commands_in(block, folder, rule):
    """(words, standard input) of each command of ours, after bash has expanded the block."""
    calls = folder / "calls"
    calls.write_text("")
    shell = ["bash", "-c", NOTE + rule + block.code + "wait\n"]
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 60}
    done = subprocess.run(shell, cwd=folder, **options)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for record in calls.read_text().split("\x1e")[:-1]:
        piped, *words = record.split("\x1f")
        if "flash_frac.cli" in words:
            words = words[words.index("flash_frac.cli") :]
        if words[0] in ("frac", "flash_frac.cli"):
            yield words[1:], base64.b64decode(piped)


@pytest.mark.parametrize("block", to_run(SHELL), ids=name)
def test_commands_run(block, examples):
    """Those of frac in this process, which has imported torch, after all others."""
    commands = list(commands_in(block, examples, RUN_OTHERS))
    assert commands
    for words, piped in commands:
        done = frac(*words, stdin=piped)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "block", SHELL + [b for b in EXPERIMENTS if b.language == "bash"], ids=name
)
def test_commands_are_understood(block, tmp_path):
    """The shell parses the block, and `frac` its options; recipes and their fields exist."""
    for words, _ in commands_in(block, tmp_path, RUN_NOTHING):
        context = parse(get_command(app), words)
        if words[0] in ("train", "plan"):
            load_recipe(context.params["recipe"], context.args, planned=1)
        else:
            assert not context.args or "--sequential" in words, f"unknown: {context.args}"


def parse(command, words):
    """The context of a command; an error for an option or a command that there is not."""
    inner = getattr(command, "commands", {})
    if inner:
        # `frac eval CHECKPOINT` is short for `frac eval run CHECKPOINT`.
        word, rest = (words[0], words[1:]) if words[0] in inner else ("run", words)
        return parse(inner[word], rest)
    return command.make_context(command.name, list(words))


@pytest.mark.parametrize(
    "block",
    [b for b in PYTHON if b.title] + [b for b in EXPERIMENTS if b.language == "python"],
    ids=name,
)
def test_python_that_is_not_run_parses(block):
    ast.parse(block.code)


@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_titles_say_why_a_block_is_not_run(block):
    if block.language in ("bash", "python"):
        assert block.title in TITLES | {""}


def test_the_page_of_the_commands_is_whole(monkeypatch):
    """On any terminal of its builder: no text is cut, and lines have 100 columns."""
    for name in ("latex2mathml.converter", "mkdocs.config.defaults", "mkdocs.exceptions"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    for name in ("files", "pages"):
        monkeypatch.setitem(sys.modules, f"mkdocs.structure.{name}", mock.MagicMock())
    monkeypatch.setenv("COLUMNS", "60")
    page = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["command_page"]()
    lines = [line for line in page.splitlines() if not line.startswith("Usage:")]
    assert page.count("```text") > 15 and not [line for line in lines if line.endswith("...")]
    assert 90 < max(map(len, lines)) <= 100


def test_the_picture_of_the_rooms_is_the_table_of_arrows():
    rows = runpy.run_path(str(ROOT / "docs" / "draw.py"))["ROWS"]
    floors = {name: n for n, row in enumerate(rows) for name, _ in row}
    assert set(floors) <= set(ROOMS)
    for name, floor in floors.items():
        assert all(floors[other] >= floor for other in ROOMS[name] & set(floors)), name
