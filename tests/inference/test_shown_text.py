"""The text of an answer while its tokens arrive."""

import pytest

from flash_frac.data import load_tokenizer
from flash_frac.inference.server.shown_text import ShownText

TEXT = "héllo wörld, €uro 😀 User: no"


class Slow:
    """A tokenizer without a fast core."""

    def __init__(self, tokenizer):
        self.decode = tokenizer.decode


@pytest.fixture(scope="module", params=["fast", "slow"])
def tokenizer(request):
    known = load_tokenizer("bytes")
    return known if request.param == "fast" else Slow(known)


def ids_of(text):
    return load_tokenizer("bytes")(text).input_ids


def parts(tokenizer, ids, size, stops=()):
    shown = ShownText(tokenizer, stops)
    found = [shown.add(ids[n : n + size]) for n in range(0, len(ids), size)]
    return [*found, shown.end()], shown


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_parts_are_the_text(tokenizer, size):
    found, _ = parts(tokenizer, ids_of(TEXT), size)
    assert "".join(found) == TEXT
    # Letters come whole, as soon as they are.
    assert size > 1 or (found[1:3] == ["", "é"] and found[-1] == "")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("stops", [["User:"], ["zz", "User: n", "r: no"], ["no"], ["no!", "w"]])
def test_a_stop_text_and_what_follows_are_cut_off(tokenizer, size, stops):
    found, shown = parts(tokenizer, ids_of(TEXT), size, stops)
    cut = min(TEXT.find(stop) for stop in stops if stop in TEXT)
    assert "".join(found) == TEXT[:cut] and shown.stopped


def test_what_may_begin_a_stop_text_is_held_back(tokenizer):
    found, shown = parts(tokenizer, ids_of("abUsUse"), 1, ["User:"])
    assert found == ["a", "b", "", "", "Us", "", "", "Use"] and not shown.stopped


def test_a_letter_that_never_ends(tokenizer):
    found, _ = parts(tokenizer, ids_of("a€")[:-1], 1)
    assert found[0] == "a" and set(found[-1]) == {"\ufffd"}
