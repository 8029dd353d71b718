"""The n-gram model against hand counts, and as a distribution."""

import numpy as np
import pytest

from flash_frac.quickstart.ngram import ByteNgram

TEXT = b"the state of the union is strong, and the union is the state of us all; so be it. "


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("history", [b"", b"t", b"th", b"of the", b"\xff\x00", b"t\xff", b"\xffh"])
def test_probabilities_sum_to_one(order, history):
    chances = ByteNgram(TEXT, order=order).probabilities(history)
    assert chances.shape == (256,) and (chances > 0).all()
    assert chances.sum() == pytest.approx(1, abs=1e-12)


def test_equals_a_hand_count():
    """Of "abab" + "c": a, b twice, c once; behind a: b twice; behind b: a, c; behind ab: a, c."""
    model = ByteNgram(b"ababc")
    one = {"a": (2 + 3 / 256) / 8, "c": (1 + 3 / 256) / 8, "x": 3 / 256 / 8}
    # Behind b two bytes of two kinds, behind ab the same two.
    two = {"a": (1 + 2 * one["a"]) / 4, "c": (1 + 2 * one["c"]) / 4, "x": 2 * one["x"] / 4}
    three = {"a": (1 + 2 * two["a"]) / 4, "c": (1 + 2 * two["c"]) / 4, "x": 2 * two["x"] / 4}
    for history, expected in ((b"", one), (b"b", two), (b"ab", three)):
        chances = model.probabilities(history)
        for letter, chance in expected.items():
            assert chances[ord(letter)] == pytest.approx(chance)
    # Nothing came behind cb; b alone decides.
    assert model.probabilities(b"cb")[ord("a")] == pytest.approx(two["a"])


def test_scores_of_a_text_are_the_probabilities_of_its_bytes():
    model, text = ByteNgram(TEXT), b"the onion\xfe"
    each = [np.log2(model.probabilities(text[:n])[byte]) for n, byte in enumerate(text)]
    np.testing.assert_allclose(model.log2_probabilities(text), each, rtol=1e-12)
    assert model.bits_per_byte(text) == pytest.approx(-np.mean(each))
    assert model.log2_probabilities(b"").shape == (0,)
    assert model.bits_per_byte(np.frombuffer(text, np.uint8)) == model.bits_per_byte(text)


def test_longer_histories_help_on_text():
    # Alternating, so that both halves have the same words in other places.
    words = (TEXT * 40).split()
    rng = np.random.default_rng(0)
    train, test = (b" ".join(rng.choice(words, 800)) for _ in range(2))
    bits = [ByteNgram(train, order=order).bits_per_byte(test) for order in (1, 2, 3)]
    assert bits[0] > bits[1] + 0.5 and bits[1] > bits[2] + 0.3


def test_errors():
    with pytest.raises(ValueError, match="order must be 1, 2 or 3"):
        ByteNgram(TEXT, order=4)
    with pytest.raises(ValueError, match="at least 3 bytes"):
        ByteNgram(b"ab")
    with pytest.raises(ValueError, match="at least one byte"):
        ByteNgram(TEXT).bits_per_byte(b"")
    with pytest.raises(ValueError, match="uint8 array, got int64"):
        ByteNgram(np.arange(10))


def test_the_old_import_keeps_working():
    from flash_frac import evals

    assert evals.ByteNgram is ByteNgram
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = evals.nonsense
