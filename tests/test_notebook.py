"""examples/tour.ipynb runs from the first cell to the last, and contains its outputs."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "examples" / "tour.ipynb"


def code_cells(path):
    notebook = json.loads(path.read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(path):
    """Of the outputs of each cell: text, or a picture."""
    found = []
    for cell in code_cells(path):
        names = [output["output_type"] for output in cell["outputs"]]
        assert "error" not in names
        found.append(set(names))
    return found


def test_the_tour_runs(tmp_path, monkeypatch):
    """In a kernel of its own; the outputs that are committed are of the same kinds."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    from execute import execute

    # Importing torch alone takes more than a second: the time of the kernel is counted.
    assert 1 < execute(TOUR, tmp_path / "tour.ipynb") < 120
    assert kinds(tmp_path / "tour.ipynb") == kinds(TOUR)


def test_the_tour_is_small_and_complete():
    assert TOUR.stat().st_size < 200_000
    cells = code_cells(TOUR)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = json.dumps([cell["outputs"] for cell in cells])
    # Neither warnings nor paths of the machine on which it ran.
    assert "Warning" not in outputs and "site-packages" not in outputs
