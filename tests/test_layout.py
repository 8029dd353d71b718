"""House rules that a machine can check."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flash_frac"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Allowed arrows between the rooms: what each may import, beside itself.
TOOLS = {
    "extras",
    "files",
    "lock",
    "manifest",
    "provenance",
    "drawing",
    "markdown",
    "recipes",
    "beginning",
}
MODEL = {"theory", "ops", "layers", "models"}
ROOMS = {
    "extras": set(),
    "files": set(),
    "lock": {"files"},
    "manifest": {"files"},
    "provenance": set(),
    "markdown": set(),
    "drawing": {"extras", "files"},
    "recipes": set(),
    "beginning": set(),
    "theory": {"extras"},
    "ops": set(),
    "layers": {"theory", "ops"},
    "models": {"extras", "files", "manifest", "theory", "ops", "layers"},
    "inference": {"extras", "files", "lock", "manifest", "beginning"} | MODEL,
    "generation": {"inference"},
    "sampling": {"inference"},
    "stream": {"inference"},
    "data": TOOLS | {"models"},
    "inspect": TOOLS | MODEL | {"inference"},
    "doctor": TOOLS | MODEL | {"inference"},
    "bench": TOOLS | MODEL | {"inference", "data", "evals", "train"},
    "evals": TOOLS | MODEL | {"inference", "inspect", "data"},
    "train": TOOLS | MODEL | {"inspect", "data"},
    "quickstart": TOOLS | MODEL | {"inference", "inspect", "data", "evals", "train"},
}
ROOMS["cli_eval"] = {"extras", "files", "evals"}
ROOMS["cli_plan"] = {"extras", "train"}
ROOMS["cli_train"] = {"extras", "train"}
ROOMS["cli_data"] = {"data"}
ROOMS["cli_bench"] = {"files", "bench"}
ROOMS["cli_options"] = {"data"}
ROOMS["cli_inspect"] = {"cli_options", "files", "inspect", "quickstart"}
ROOMS["cli"] = set(ROOMS)
# Arrows that point up, in functions only: what transformers asks of a model and an engine does.
UPWARD = {"models/generation.py": {"inference"}}
# Inside ops, the same by folder: scan is the ground floor.
OPERATORS = {
    "scan": set(),
    "control": {"scan"},
    "delta": {"scan", "control"},
    "conv": {"scan"},
    "norm": set(),
    "swiglu": set(),
    "loss": set(),
    "attention": set(),
    "sample": set(),
    "decode": {"control", "conv", "norm", "swiglu"},
}
# And by file, from the ground up: plain forms, the table of backends, kernels, their launches, the
# functions that users call. Files of one row may import each other.
FLOORS = [
    {"arithmetic", "reference", "levels", "passes", "chunk"},
    {"backends"},
    {"tuning", "plan", "kernels", "mix", "walk", "gemv", "product"},
    {"triton", "step", "linear", "fused"},
    {"api"},
    {"context_parallel", "testing"},
    {"autotune", "__init__"},
]


def our_imports(path, *, at_top=False):
    """Modules of ours that a file imports, as parts of their names, by line."""
    tree = ast.parse(path.read_text())
    lazy = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if at_top and (node in lazy or _is_for_types(node, tree)):
            continue
        yield from (n.split(".")[1:] for n in names if n.startswith("flash_frac."))


def _is_for_types(node, tree):
    """Whether an import stands under `if TYPE_CHECKING:`."""
    return any(
        isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and node in ast.walk(branch)
    )


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_kernel_file(path):
    return "import triton" in path.read_text()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= (500 if is_kernel_file(path) else 400)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            assert length <= (90 if kernel else 60), f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_between_rooms(path):
    room = room_of(path)
    if room == "__init__":
        return
    allowed = ROOMS[room] | {room}
    assert {module[0] for module in our_imports(path, at_top=True)} <= allowed
    upward = UPWARD.get(str(path.relative_to(PACKAGE)), set())
    assert {module[0] for module in our_imports(path)} <= allowed | upward


def test_every_room_is_in_the_table():
    """A new package must be put there, or nothing would hold its arrows."""
    assert {room_of(path) for path in SOURCES} == {"__init__", *ROOMS}


def test_rooms_have_no_cycle():
    def reaches(room, seen=()):
        assert room not in seen, f"cycle: {' -> '.join([*seen, room])}"
        for other in ROOMS[room] - {room}:
            reaches(other, (*seen, room))

    for room in ROOMS:
        if room != "cli":
            reaches(room)


OPS = [path for path in SOURCES if room_of(path) == "ops"]


@pytest.mark.parametrize("path", OPS, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_inside_ops(path):
    """By folder, imports inside functions included; by floor, those at the top of a file.

    `backends` names the Triton forms in functions, so that a CPU never imports triton.
    """
    *folder, name = path.relative_to(PACKAGE / "ops").parts
    name = name.removesuffix(".py")
    if folder and name != "__init__":
        others = {module[1] for module in our_imports(path) if module[1] in OPERATORS}
        assert others <= OPERATORS[folder[0]] | {folder[0]}
    floor = next(n for n, names in enumerate(FLOORS) if name in names)
    below = set().union(*FLOORS[: floor + 1])
    assert {module[-1] for module in our_imports(path, at_top=True)} <= below


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_pickle(path):
    """Tensors come from safetensors; a torch file only with weights_only=True.

    One reader, of the index that torch writes beside tensors, refuses all classes but those of it.
    """
    allowed = {"UnpicklingError"} | ({"Unpickler"} if path.name == "shards.py" else set())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            assert {name.name for name in node.names} <= allowed
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert keywords.get("weights_only") == "True"
    assert not re.search(r"\bimport (pickle|dill|joblib)\b", path.read_text())


OUTSIDE = [
    path for folder in ("experiments", "benchmarks") for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("path", [*SOURCES, *OUTSIDE], ids=lambda p: str(p.relative_to(ROOT)))
def test_automatic_classes_never_ask_to_run_code(path):
    """Left out, `trust_remote_code` means a question on standard input, which may be a pipe."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(node.func)):
            words = {ast.unparse(keyword) for keyword in node.keywords}
            assert {"trust_remote_code=False", "**found.options"} & words, ast.unparse(node)


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


def test_unknown_names_are_refused():
    import flash_frac

    assert all(getattr(flash_frac, name) is not None for name in flash_frac.__all__)
    assert set(flash_frac.__all__) <= set(dir(flash_frac))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flash_frac.nonsense


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("flash_frac.generation", ["Generator", "StopStrings"]),
        ("flash_frac.sampling", ["GREEDY", "SamplingSettings", "adjust", "choose"]),
        ("flash_frac.stream", ["FracStream", "StreamMark"]),
    ],
)
def test_documented_imports_of_code_that_moved(module, names):
    for name in names:
        found = getattr(importlib.import_module(module), name)
        assert type(found).__module__.startswith("flash_frac.inference.") or (
            found.__module__.startswith("flash_frac.inference.")
        )


def test_a_missing_extra_is_named():
    from flash_frac.extras import require

    with pytest.raises(
        ImportError, match=r"plotting needs surely_absent: pip install 'flash-frac\[plot\]'"
    ):
        require("surely_absent.part", "plot", "plotting")
