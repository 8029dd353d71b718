"""A small text and a small model that train in a second."""

import pytest

from flash_frac.train import run
from tests.train.runs import make_recipe, make_text, no_curves


@pytest.fixture(autouse=True)
def quick_end(request, monkeypatch):
    """Leave out the figure at the end of a run, where it is not what is tested."""
    if request.path.name != "test_watching.py":
        monkeypatch.setattr(run, "draw_curves", no_curves)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def write_recipe(tmp_path, text_folder, cache_folder):
    """A function that writes a recipe of a few quick steps, with changes, and gives its path."""

    def write(**changes):
        return make_recipe(tmp_path, text_folder, cache_folder, **changes)

    return write
