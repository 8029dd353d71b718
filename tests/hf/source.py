"""transformers' own test classes, from its source distribution, which `make test-hf` unpacks."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import transformers

import tests

SOURCE = Path(
    os.environ.get("TRANSFORMERS_SOURCE")
    or Path(__file__).parents[2] / "build" / f"transformers-{transformers.__version__}"
)
# `test_modeling_common` imports the other two, which a source distribution leaves out and a
# checkout of the repository has.
MIXINS = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}
MODULES = ("test_modeling_common", *MIXINS)


def path_of(module):
    return SOURCE / "tests" / f"{module.replace('.', '/')}.py"


def load(module):
    """One module of transformers' tests, with empty classes for mixins that are not there."""
    folder = str(SOURCE / "tests")
    if folder not in tests.__path__:
        # Its tests call themselves `tests`, as ours do.
        tests.__path__.append(folder)
        for name, mixin in MIXINS.items():
            if not path_of(name).is_file():
                stand_in = ModuleType(f"tests.{name}")
                setattr(stand_in, mixin, type(mixin, (), {}))
                sys.modules[f"tests.{name}"] = stand_in
                sys.modules.setdefault(f"tests.{name.split('.')[0]}", stand_in)
    return importlib.import_module(f"tests.{module}")
