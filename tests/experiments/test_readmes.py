"""Every experiment's README starts with a verdict, and the list of the paper's claims agrees."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERVIEW = ROOT / "experiments" / "README.md"
READMES = sorted((ROOT / "experiments").glob("*/README.md"))
VERDICT = re.compile(r"\*\*(Holds|Does not hold here|Holds in part|Not yet measured)\.?\*\*")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")


def folder(path):
    return path.parent.name


def paragraphs(path):
    return path.read_text().split("\n\n")


def claims():
    """Verdict and cells of each row of the overview."""
    lines = [line for line in OVERVIEW.read_text().splitlines() if line[:2] == "| "]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(VERDICT.fullmatch(cells[1]), cells) for cells in rows[1:]]


@pytest.mark.parametrize("path", READMES, ids=folder)
def test_the_first_line_is_the_answer(path):
    title, answer, *_ = paragraphs(path)
    assert title.startswith("# ") and VERDICT.match(answer)
    assert re.search(r"\d", answer) and re.search(r"[Tt]he paper: |Our claim|The claim: ", answer)


@pytest.mark.parametrize("path", READMES, ids=folder)
def test_table_figure_commands_and_cost_follow(path):
    text = path.read_text()
    wanted = ["\n|", "](figure.svg)", "```bash", "**Cost:**"]
    if not (path.parent / "figure.svg").exists():
        wanted.remove("](figure.svg)")
    assert [text.index(part) for part in wanted] == sorted(text.index(part) for part in wanted)


def test_the_overview_has_every_experiment_and_its_verdict():
    found = claims()
    assert len(found) > 15 and all(verdict for verdict, _ in found)
    for path in READMES:
        rows = [row for row in found if f"({folder(path)}/README.md)" in " ".join(row[1])]
        answer = paragraphs(path)[1]
        assert rows, path
        if "The paper: " in answer:
            verdict = VERDICT.match(answer)
            assert verdict and verdict[1] in {row[0][1] for row in rows}


def test_every_claim_names_its_command():
    for _, cells in claims():
        assert len(cells) == 5 and len(cells[4]) > 5, cells


def test_images_exist_and_say_what_they_show():
    seen = 0
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *READMES]:
        for text, target in IMAGE.findall(path.read_text()):
            assert (path.parent / target).exists()
            # More than the names of the axes: what a reader who cannot see it should know.
            assert len(text) > 60, (path, text)
            seen += 1
    assert seen >= 10
