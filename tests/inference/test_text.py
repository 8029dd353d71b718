"""Text from streams: letters and spaces come whole, however the tokens cut them."""

import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from flash_frac.data.tokenizer import byte_tokenizer
from flash_frac.inference import FracStream
from flash_frac.inference.text import TextTail
from tests.inference.conftest import assert_holds
from tests.models.conftest import make_model


def spell(text, tokenizer, context=""):
    """The pieces in which a text comes, token by token."""
    tail, pieces = TextTail().skip(tokenizer(context).input_ids, tokenizer), []
    for token in tokenizer(text).input_ids:
        piece, tail = tail.take(token, tokenizer)
        pieces.append(piece)
    return pieces


def test_letters_of_several_bytes():
    tokenizer = byte_tokenizer()
    text = "aé€😀日本語 ñ"
    pieces = spell(text, tokenizer, context="vor ü")
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[1:3] == ["", "é"]
    # Bytes that make no letter are shown as such, and hold nothing up for ever.
    tail, shown = TextTail(), ""
    for byte in [0x80] * 20 + [0xE2, 0x82] + list("né".encode()) + [0xFF] * 9 + list(b"end"):
        piece, tail = tail.take(3 + byte, tokenizer)
        shown += piece
        assert len(tail.ids) < 12
    raw = bytes([0x80] * 20 + [0xE2, 0x82]) + "né".encode() + b"\xff" * 9 + b"end"
    assert shown == raw.decode(errors="replace")


def test_words_with_their_spaces():
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
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tail, pieces = TextTail().skip([1], tokenizer), []
    for token in [2, *(3 + byte for byte in "€😀".encode()), *[1] * 20, 2]:
        piece, tail = tail.take(token, tokenizer)
        pieces.append(piece)
    assert [piece for piece in pieces if piece] == [" Wort", "€", "😀", *[" ein"] * 20, " Wort"]


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
