"""The text of an answer while its tokens arrive."""

import pytest

from flash_frac.data import load_tokenizer
from flash_frac.inference.server.shown_text import ShownText, named_token
from tests.inference.test_text import as_bytes, fallback_tokenizer

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


@pytest.mark.parametrize("size", [1, 2, 100])
def test_bytes_that_are_no_text_after_a_letter(size):
    """The tokenizer's own stream of Llama's kind of tokens raises there."""
    tokenizer = fallback_tokenizer()
    ids = [1, *as_bytes("é"), *(3 + byte for byte in b"\xff\xc3"), 2, *as_bytes("ü"), 2]
    found, _ = parts(tokenizer, ids, size)
    text = "".join(found)
    assert text.startswith("ein") and text.endswith(" Wortü Wort")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("letter", "stray"), [("é", b"\xff"), ("€", b"\xf0\x9f"), ("€", b"\xd3\xff")]
)
def test_letters_after_bytes_that_are_no_text(letter, stray, size):
    """What the tokenizer's own stream held back when it raised is not lost."""
    ids = [1, *as_bytes(letter), *(3 + byte for byte in stray), 2, *as_bytes("😀"), 2]
    found, _ = parts(fallback_tokenizer(), ids, size)
    assert "".join(found).endswith(" Wort😀 Wort")


def test_names_and_bytes_of_tokens():
    """Bytes that are no text have names of their own, so that each is one key."""
    known = load_tokenizer("bytes")
    assert named_token(known, known("a").input_ids[0]) == ("a", b"a")
    for byte in (0x80, 0xC3, 0xFF):
        expected = (f"bytes:\\x{byte:02x}", bytes([byte]))
        assert (
            named_token(known, 3 + byte) == named_token(fallback_tokenizer(), 3 + byte) == expected
        )
    assert len({named_token(known, id) for id in range(3, 259)}) == 256
