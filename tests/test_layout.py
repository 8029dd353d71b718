"""Rules of the house that a machine can check."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "flash_frac").rglob("*.py"))
# Packages from the ground up; each may import what stands before it.
LAYERS = [
    *("extras", "files", "provenance", "drawing", "theory", "ops", "layers", "baselines", "models"),
    *("sampling", "generation", "stream", "terminal", "serving", "inspect", "doctor", "data"),
    *("evals", "recipes", "bench", "train", "quickstart", "cli"),
]


def imported_parts(path):
    """Names of our own packages that a file imports, at its top or inside functions."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts |= {n.split(".")[1] for n in names if n.startswith("flash_frac.")}
    return parts


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= (500 if "triton" in path.parts else 400)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            kernel = any(ast.unparse(d) == "triton.jit" for d in node.decorator_list)
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            assert length <= (90 if kernel else 60), f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    part = path.relative_to(ROOT / "flash_frac").parts[0].removesuffix(".py")
    if part not in LAYERS:
        return
    allowed = set(LAYERS[: LAYERS.index(part) + 1])
    assert imported_parts(path) <= allowed


def test_every_part_has_its_place():
    """A new package must be put into LAYERS, or nothing would hold it."""
    parts = {path.relative_to(ROOT / "flash_frac").parts[0].removesuffix(".py") for path in SOURCES}
    assert parts == {"__init__", *LAYERS}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_pickle(path):
    """Tensors come from safetensors; a torch file only with weights_only=True."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert keywords.get("weights_only") == "True"
    assert not re.search(r"\bimport (pickle|dill|joblib)\b", path.read_text())


def run(code, env=None):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    return done.stdout


def test_ops_and_layers_load_torch_alone():
    heavy = {
        "transformers",
        "scipy",
        "matplotlib",
        "datasets",
        "accelerate",
        "triton",
        "safetensors",
    }
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import flash_frac, flash_frac.ops, flash_frac.layers\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    assert not heavy & set(run(code).split())


def test_a_cpu_does_not_load_triton():
    code = (
        "import sys, torch; from flash_frac.ops import frac_scan\n"
        "x = torch.zeros(1, 3, 1, 2); y = frac_scan(x, x, x, x); print('triton' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert run(code, env=environment).strip() == "False"


def test_import_is_quick():
    """Beyond torch itself, the op and the layer cost under half a second."""
    code = (
        "import time, torch; start = time.perf_counter()\n"
        "import flash_frac, flash_frac.ops, flash_frac.layers\n"
        "print(time.perf_counter() - start)"
    )
    assert float(run(code)) < 0.5


def test_package_does_not_need_torch_to_be_imported():
    assert run("import sys, flash_frac; print('torch' in sys.modules)").strip() == "False"


def test_public_names_exist():
    import flash_frac

    assert all(getattr(flash_frac, name) is not None for name in flash_frac.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flash_frac.nonsense


def test_a_missing_extra_is_named():
    from flash_frac.extras import require

    with pytest.raises(
        ImportError, match=r"plotting needs surely_absent: pip install 'flash-frac\[plot\]'"
    ):
        require("surely_absent.part", "plot", "plotting")
