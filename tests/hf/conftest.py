import re
from pathlib import Path

import pytest
from transformers import testing_utils

from tests.hf.source import MODULES, path_of


def pytest_configure(config):
    """transformers marks its tests; pytest must know the names."""
    files = [testing_utils.__file__, *map(path_of, MODULES)]
    found = (re.findall(r"\bmark\.(\w+)", Path(f).read_text()) for f in files if Path(f).is_file())
    for name in {name for names in found for name in names}:
        config.addinivalue_line("markers", f"{name}: of transformers")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: transformers' tests choose their own determinism."""


def pytest_ignore_collect(collection_path, config):
    """Importing transformers' tests takes seconds: only for those who ask for them."""
    unasked = config.option.markexpr != "hf"
    return True if unasked and collection_path.name == "test_models.py" else None


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr == "hf" and not path_of("generation.test_utils").is_file():
        terminalreporter.write_line(
            "GenerationTesterMixin did not run: source distributions lack it (docs/ecosystem.md)"
        )
