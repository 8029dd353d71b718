"""A small text and a small model, to train in a second."""

import pytest

from tests.train.runs import make_recipe, make_text


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
