"""Run the notebook and keep its outputs: python examples/execute.py [--out FILE]"""

import argparse
import os
import resource
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
# What the start page promises, as CPU time, which other processes do not change.
MOST_SECONDS = 120


def execute(path: Path, out: Path) -> float:
    """Run all cells and return their CPU time; RuntimeError if it exceeds two minutes.

    CellExecutionError if a cell fails, CellTimeoutError after ten minutes.
    """
    notebook = nbformat.read(path, as_version=4)
    # In the notebook's folder, as in Jupyter; cell times would differ in every run.
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=600, resources=resources, record_timing=False)
    # One thread: on a busy machine, several wait for each other.
    before = _cpu_of_children()
    client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})
    seconds = _cpu_of_children() - before
    if seconds > MOST_SECONDS:
        raise RuntimeError(f"{path} took {seconds:.0f} s of CPU time, more than {MOST_SECONDS}")
    # The tour should not record the Python version or machine-specific warnings.
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, out)
    return seconds


def _cpu_of_children() -> float:
    """CPU seconds of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebook", type=Path, default=HERE / "tour.ipynb")
    parser.add_argument("--out", type=Path, help="Output file; default: the notebook itself.")
    arguments = parser.parse_args()
    execute(arguments.notebook, arguments.out or arguments.notebook)


if __name__ == "__main__":
    main()
