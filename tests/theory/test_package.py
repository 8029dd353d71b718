"""Promises of the package: light imports, a named extra, examples that run."""

import doctest
import importlib
import subprocess
import sys

import pytest

from flash_frac.theory import minimax_fit

MODULES = (
    "bank_search",
    "banks",
    "dynamics",
    "minimax",
    "mittag_leffler",
    "soe",
    "spectrum",
    "validation",
)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in sys.modules after a statement in a fresh interpreter."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_computing_without_a_fit_needs_numpy_alone():
    loaded = loaded_by(
        "import flash_frac.theory as t; t.relaxation(1.0, 0.5); t.named_bank('W1_M8_simplex')"
    )
    assert "numpy" in loaded
    assert not loaded & {"scipy", "torch", "transformers", "mpmath"}


def test_missing_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(
        ImportError, match=r"minimax_fit needs scipy: pip install 'flash-frac\[theory\]'"
    ):
        minimax_fit([1.0, 10.0], 0.5)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(f"flash_frac.theory.{name}")
    assert doctest.testmod(module).failed == 0
