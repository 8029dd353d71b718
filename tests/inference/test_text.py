"""Text from streams: characters and spaces arrive whole, however tokens split them."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flash_frac.data.tokenizer import byte_tokenizer
from flash_frac.inference import FracStream, StopStrings
from flash_frac.inference.text import TextTail, text_decoder
from tests.inference.conftest import assert_holds
from tests.models.conftest import make_model

TEXT = "aé€😀日本語 ñ über 👨\u200d👩 नमस्ते мир, ça va"


def fallback_tokenizer():
    """A SentencePiece vocabulary: the first space of a text is dropped, rare letters are bytes."""
    names = ["<unk>", "▁ein", "▁Wort", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


def as_bytes(text):
    """Ids of a text in all of the tokenizers here, whose bytes follow three other tokens."""
    return [3 + byte for byte in text.encode()]


def spell(ids, tokenizer, before=()):
    """The pieces in which the text of ids comes, token by token, after others that were skipped."""
    decode = text_decoder(tokenizer)
    tail, pieces = TextTail().skip(before, decode), []
    for token in ids:
        piece, tail = tail.take(token, decode)
        pieces.append(piece)
        assert len(tail.ids) <= 16
    return pieces


TOKENIZERS = [byte_tokenizer, fallback_tokenizer, ByT5Tokenizer]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_letters_of_several_bytes(make):
    """However a text is cut into what was fed and what comes, each letter comes once, and whole."""
    tokenizer, ids = make(), as_bytes(TEXT)
    for cut in range(len(ids)):
        whole = TEXT.encode()[:cut].decode(errors="ignore")
        pieces = spell(ids[cut:], tokenizer, ids[:cut])
        assert [piece for piece in pieces if piece] == list(TEXT[len(whole) :])
    assert spell(as_bytes("é"), tokenizer) == ["", "é"]


@pytest.mark.parametrize("make", TOKENIZERS[:2])
def test_bytes_that_make_no_letter(make):
    """They are shown as such, and hold nothing up for ever."""
    raw = bytes([0x80] * 20 + [0xE2, 0x82]) + "né".encode() + b"\xff" * 9 + b"end"
    tokenizer = make()
    ids = [3 + byte for byte in raw]
    if make is byte_tokenizer:
        assert "".join(spell(ids, tokenizer)) == raw.decode(errors="replace")
    pieces = spell([*ids, 1, 2], tokenizer)
    assert "".join(map(str, map(bool, pieces))).count("False" * 4) == 0


@pytest.mark.parametrize("special", [0, 1, 2])
def test_special_tokens_show_nothing(special):
    """Whatever their number, and between the bytes of a letter, too."""
    tokenizer = byte_tokenizer()
    a, b, c = as_bytes("€")
    for number in (1, 3, 30):
        ids = [*as_bytes("x"), *[special] * number, *as_bytes("é"), *[special] * number]
        assert "".join(spell(ids, tokenizer)) == "xé"
    assert "".join(spell([special, a, special, b, c], tokenizer)) == "€"


def test_words_with_their_spaces():
    tokenizer = fallback_tokenizer()
    ids = [2, *as_bytes("€😀"), *[1] * 20, 2]
    pieces = [piece for piece in spell(ids, tokenizer, [1]) if piece]
    assert pieces == [" Wort", "€", "😀", *[" ein"] * 20, " Wort"]


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("stop", ["a", "語", "日本", "👩", " ñ", "va", "мир,", "本語 ñ", "absent"])
def test_texts_that_end_a_sequence(make, stop):
    """They are found with their last byte, wherever the bytes before them are cut."""
    tokenizer, texts = make(), [TEXT, "x" + TEXT]
    width = max(len(text.encode()) for text in texts)
    rows = [(as_bytes(text) + as_bytes("." * width))[:width] for text in texts]
    watch = StopStrings(tokenizer, ["nowhere", stop])
    watch.watch(2)
    steps = [[watch.ends(row, rows[row][n]) for row in range(2)] for n in range(width)]
    for text, found in zip(texts, zip(*steps, strict=True), strict=True):
        end = text.find(stop) + len(stop)
        expected = len(text[:end].encode()) if stop in text else None
        assert (found.index(True) + 1 if True in found else None) == expected


def test_special_tokens_may_end_a_sequence():
    watch = StopStrings(byte_tokenizer(), ["<eos>"])
    watch.watch(1)
    assert [watch.ends(0, 70), watch.ends(0, 2)] == [False, True]


def test_text(tmp_path):
    """The text of a stream that is left, saved and split is the text of its tokens."""
    tokenizer = byte_tokenizer()
    model = make_model(vocab_size=259)
    text = "aé€😀"
    tokens = tokenizer(text).input_ids
    # A model that says one byte after the other, whatever it has read.
    script = iter([*tokens, *tokens, *tokens])

    def say(module, arguments, output):
        output = torch.full_like(output, -1.0)
        output[..., next(script)] = 1.0
        return output

    model.lm_head.register_forward_hook(say)
    stream = FracStream(model, tokenizer).feed("Ein Anfang: ")
    got = list(stream.generate(max_new_tokens=4))
    assert got == ["a", "é"] and stream.num_tokens == 16
    stream.save(tmp_path / "a.stream")
    stream = FracStream.load(tmp_path / "a.stream", model, tokenizer).fork()
    assert list(stream.generate(max_new_tokens=6)) == ["€", "😀"]
    for piece in stream.generate():
        assert piece == "a"
        break
    assert stream.num_tokens == 23


def test_text_of_a_batch():
    tokenizer, model = byte_tokenizer(), make_model(vocab_size=259)
    texts = ["kurz", "ein langer Text"]
    stream = FracStream(model, tokenizer, batch_size=2).feed(texts)
    assert stream.lengths == (4, 15)
    for n, text in enumerate(texts):
        assert_holds(stream.select(n), torch.tensor([tokenizer(text).input_ids]))
    pieces = list(stream.generate(max_new_tokens=3, eos=False))
    assert all(isinstance(piece, list) and len(piece) == 2 for piece in pieces)


def test_texts_that_stop():
    """A sequence ends behind the text; others go on, and its state reads nothing more."""
    tokenizer = byte_tokenizer()
    model = make_model(vocab_size=259, initializer_range=0.4)
    prompts = ["one and", "two and"]

    def run(**options):
        stream = FracStream(model, tokenizer, batch_size=2).feed(prompts)
        pieces = [*stream.generate(max_new_tokens=30, eos=False, temperature=1, seed=0, **options)]
        return stream, ["".join(row) for row in zip(*pieces, strict=True)]

    _, free = run()
    # Followed by another whole letter: a broken one would come together with the next.
    word = re.search(r"[ -~]{2}(?=[ -~])", free[0])[0]
    stream, texts = run(stop=[word, "absent" * 9])
    ends = [text.find(word) + len(word) if word in text else len(text) for text in free]
    assert ends[0] < 25 and texts == [text[:end] for text, end in zip(free, ends, strict=True)]
    assert stream.lengths[0] < stream.lengths[1] == len(prompts[1]) + 30
    with pytest.raises(ValueError, match="stop must be a list of texts"):
        stream.generate(stop="abc")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        FracStream(model).feed([5]).generate(stop=["abc"])
