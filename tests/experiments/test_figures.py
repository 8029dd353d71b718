"""The committed figures match the committed rows, in one style, with every line labelled."""

import importlib
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from shutil import copytree

import pytest

from experiments import style
from experiments.heavy_tail import plot as heavy_tail

matplotlib = pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/plot.py"))


@pytest.fixture(scope="module", params=NAMES)
def drawn(request, tmp_path_factory):
    """Name, text of the figure drawn anew, and its axes and legends as matplotlib has them."""
    name, folder = request.param, tmp_path_factory.mktemp("figure") / request.param
    copytree(ROOT / "experiments" / name, folder)
    (folder / "figure.svg").unlink()
    module = importlib.import_module(f"experiments.{name}.plot")
    figures, figure_at = [], module.figure_at

    @contextmanager
    def kept(*arguments, **options):
        with figure_at(*arguments, **options) as (figure, axes):
            figures.append(figure)
            yield figure, axes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "figure_at", kept)
        module.main(["--out", str(folder)])
    (figure,) = figures
    return name, (folder / "figure.svg").read_text(), figure


def test_the_committed_figure_is_of_the_committed_rows(drawn):
    name, text, _ = drawn
    kept = (ROOT / "experiments" / name / "figure.svg").read_text()
    # Up to what the version of matplotlib and the fonts of the machine decide.
    for element in ("<path", "<text"):
        assert text.count(element) == kept.count(element)


def test_a_figure_is_a_white_sheet(drawn):
    """Text in ink can then be read on a dark page, too."""
    _, text, figure = drawn
    sheet = text[text.index('id="patch_1"') :]
    assert "fill: #ffffff" in sheet[: sheet.index("</g>")]
    assert all(not axes.spines["top"].get_visible() for axes in figure.axes)


def test_every_line_has_a_name(drawn):
    """In a legend, or as a text at the line; the line of zero needs none."""
    name, _, figure = drawn
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
    named = {text.get_text() for legend in legends if legend for text in legend.get_texts()}
    for axes in figure.axes:
        assert axes.lines or axes.patches, f"{name} has an empty panel"
        assert axes.get_xlabel() or axes.get_ylabel()
        # Error bars belong to their bars.
        lines = [line for line in axes.lines if any(line.get_xdata()) and not axes.containers]
        unnamed = [line.get_label() for line in lines if line.get_label() not in named]
        assert len(unnamed) <= len(axes.texts), unnamed
        bars = [each for each in axes.containers if hasattr(each, "patches")]
        assert {each.get_label() for each in bars} <= named


def test_lines_of_one_figure_differ():
    """By colour; a variant has the colour of its model, and dashes."""
    # Frac without its write prior is never beside Frac (ours).
    colours = {name: c for name, c in style.COLOURS.items() if name != "frac_no_write_prior"}
    for (a, one), (b, two) in combinations(colours.items(), 2):
        assert (
            max(abs(x - y) for x, y in zip(*map(matplotlib.colors.to_rgb, (one, two)), strict=True))
            > 0.15
        ), (a, b)
    drawn = {heavy_tail.VARIANTS.get(name, name) for name in heavy_tail.DESIGNS}
    assert drawn <= colours.keys() and not heavy_tail.VARIANTS.keys() & colours.keys()
