"""Imports are declared, tested versions are pinned, and CI installs by hash."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
EVERY = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
# Modules whose package has another name.
PACKAGES = {"yaml": "pyyaml"}
# What benchmarks compare with, if it is there; no user needs them.
PEERS = {"cut_cross_entropy", "fla", "liger_kernel", "mamba_ssm"}
# torch brings it with its builds for GPUs, in the one version that it works with.
OF_TORCH = {"triton"}


def names(requirements):
    return {canonicalize_name(Requirement(text).name) for text in requirements} - {"flash-frac"}


def imports(path):
    """(module, extra) of every import; the extra is None unless `require` names one."""
    for node in ast.walk(ast.parse(path.read_text())):
        found, extra = [], None
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "require":
            first, second = node.args[:2]
            # Others make the name from parts, beside calls that spell it out.
            if isinstance(first, ast.Constant) and isinstance(second, ast.Constant):
                found, extra = [first.value], second.value
        for name in found:
            module = name.split(".")[0]
            if module not in sys.stdlib_module_names and module != "flash_frac":
                yield module, extra


SOURCES = sorted((ROOT / "flash_frac").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_declared(path):
    for module, extra in imports(path):
        if module in OF_TORCH or (module in PEERS and path.parent.name == "bench"):
            continue
        package = canonicalize_name(PACKAGES.get(module, module))
        if extra is not None:
            assert package in names([*PROJECT["dependencies"], *EXTRAS[extra]]), (module, extra)
        else:
            assert package in names(EVERY), module


@pytest.mark.parametrize("room", ["models", "inference/generator.py", "data", "inspect", "cli.py"])
def test_what_the_core_imports_at_once_needs_no_extra(room):
    """At the top of files, that is; `require` names the extra of what is imported in functions."""
    core = names(PROJECT["dependencies"]) | OF_TORCH
    path = ROOT / "flash_frac" / room
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = (getattr(node, "module", None) or node.names[0].name).split(".")[0]
                known = module in sys.stdlib_module_names or module == "flash_frac"
                assert known or canonicalize_name(module) in core, (file.name, module)


def test_extras_that_share_a_package_ask_for_the_same_release():
    asked = {}
    for text in EVERY:
        requirement = Requirement(text)
        asked.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier))
    assert {name: found for name, found in asked.items() if len(found) > 1} == {}


def pins(name):
    lines = (ROOT / name).read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([\w.+]+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def direct():
    exact = {t for t in EVERY if "==" in t}
    return names(EVERY), {canonicalize_name(Requirement(t).name): t.split("==")[1] for t in exact}


def test_every_direct_dependency_is_pinned():
    every, exact = direct()
    assert set(pins("constraints-cpu.txt")) == every - set(exact)


def test_the_lock_file_has_every_pin_and_a_hash_for_each():
    """All but torch, whose builds differ in hash and in what they need; `make lock` renews it."""
    every, exact = direct()
    wanted = pins("constraints-cpu.txt") | exact
    locked = pins("requirements-lock.txt")
    assert every - set(locked) == {"torch"}
    assert {name: locked[name] for name in every - {"torch"}} == {
        name: wanted[name] for name in every - {"torch"}
    }
    text = (ROOT / "requirements-lock.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all("--hash=sha256:" in entry for entry in entries) and len(entries) == len(locked)
    assert not {name for name in locked if name.startswith(("nvidia-", "cuda-"))}


def test_ci_installs_the_lock_file():
    assert "make -j 2 test LOCKED=1" in (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert "--no-deps --require-hashes -r requirements-lock.txt" in makefile


def test_the_quickstart_installs_little():
    """Beside the core, what it imports; not lm-eval, datasets, a server or linters."""
    assert names(EXTRAS["quickstart"]) <= names(EXTRAS["train"]) | names(EXTRAS["plot"])
    makefile = (ROOT / "Makefile").read_text()
    assert "-e .[quickstart]" in makefile and "quickstart: $(VENV)/quickstart" in makefile


def test_the_documentation_is_locked():
    """In a lock file and an environment of its own, whose tools agree with the tested ones."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    asked = {
        canonicalize_name(Requirement(text).name): text.split("==")[1] for text in groups["docs"]
    }
    locked = pins("requirements-docs.txt")
    assert {name: locked[name] for name in asked} == asked
    text = (ROOT / "requirements-docs.txt").read_text()
    assert all("--hash=sha256:" in entry for entry in re.split(r"\n(?=\S)", text.strip()))
    tested = pins("requirements-lock.txt")
    assert {name: tested[name] for name in ("ruff", "typer")} == {
        name: asked[name] for name in ("ruff", "typer")
    }
    makefile = (ROOT / "Makefile").read_text()
    assert "--require-hashes -r requirements-docs.txt" in makefile
    assert re.search(r"^test:.*\bdocs\b", makefile, re.MULTILINE)
