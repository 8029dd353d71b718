"""Reports show names of models, files and tasks unchanged, whatever characters they contain."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from experiments.evaluation.summary import lm_table
from flash_frac.bench.table import paper_table
from flash_frac.drawing import figure_at, label
from flash_frac.evals.report import compare, markdown
from flash_frac.files import write_json
from flash_frac.inspect.write import render_page
from flash_frac.markdown import plain
from tests.evals.test_report import report

EVIL = "_a|b`c* <script>alert('$x$')</script>\n# [link](x) ~~&amp;"
SHOWN = {
    "a|b": r"a\|b",
    "my_model_1": "my_model_1",
    "_em_": r"\_em\_",
    "<b>&": "&lt;b&gt;&amp;",
    "two\nlines\r\n": "two lines",
    r"\|": r"\\\|",
    "frac-1.3b, 2 of 3": "frac-1.3b, 2 of 3",
}


@pytest.mark.parametrize("text", SHOWN)
def test_plain(text):
    assert plain(text) == SHOWN[text]


def cells(line):
    """The cells of a row of a table, as GitHub cuts them."""
    return line.replace(r"\\", "").replace(r"\|", "").count("|") - 1


def test_tables_of_results():
    whole = report(EVIL) | {"left_out": [f"lm/{EVIL}"]}
    whole["units"][0]["results"] |= {"left_out": [EVIL]}
    whole["units"][0]["source"] = EVIL
    text = markdown([whole])
    assert "<script" not in text and "\n# [" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {cells(line) for line in markdown([report("mine")]).splitlines() if line[:1] == "|"}
    assert {cells(row) for row in rows} == widths
    # Ours, the title, and those of suites.
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# Results"]


def test_tables_of_speed_and_of_experiments():
    row = {"implementation": EVIL, "pass": "prefill", "B": 1, "T": 16, "tokens_per_s": 5}
    row |= {"mode": "eager", "state_bytes": 1}
    lines = paper_table([row], paper=False)
    assert len({cells(line) for line in lines}) == 1 and "<script" not in "".join(lines)
    row = {"name": EVIL, "task": EVIL, "metric": EVIL, "suite": "lm", "chance": "0.5"}
    lines = lm_table([row | {"value": "1", "samples": "1", "seconds": "1"}])
    assert len({cells(line) for line in lines}) == 1 and "<script" not in "".join(lines)


def test_the_page_of_an_inspection():
    page = render_page({"name": EVIL, "text": EVIL})
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_pages_are_built_from_text_alone():
    """Names reach the document as text, never as HTML."""
    for path in (Path(__file__).parents[1] / "flash_frac/inspect/page").glob("*.js"):
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert sink not in path.read_text(), path.name


def test_figures(tmp_path):
    write_json(tmp_path / "a" / "results.json", report(EVIL.split("\n")[0]))
    write_json(tmp_path / "b" / "results.json", report("$\\undefined"))
    for path in compare([tmp_path / "a", tmp_path / "b"], tmp_path / "out"):
        assert "<script" not in path.read_text()
        if path.suffix == ".svg":
            texts = "".join(ElementTree.parse(path).getroot().itertext())
            assert "<script>alert('$x$')</script>" in texts and "$\\undefined" in texts


def test_labels_are_drawn(tmp_path):
    with figure_at(tmp_path / "a.svg", (3, 2)) as (_, (axes,)):
        axes.plot([1, 2], label=label("_hidden"))
        axes.legend()
    assert "_hidden" in (tmp_path / "a.svg").read_text()
