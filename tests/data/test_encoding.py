import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flash_frac.data import Encoder, byte_tokenizer, dna_tokenizer, encoding, is_held_out
from tests.data.test_tokenizer import WEIRD


def word_tokenizer(eos="<eos>"):
    core = Tokenizer(models.WordLevel(vocab={"<eos>": 0, "?": 1, "a": 2, "b": 3}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, unk_token="?")


def whole(encoder, texts, **options):
    """All ids of `encode_documents`, by document."""
    documents, pieces = [], []
    for _, ids, ends in encoder.encode_documents([(False, text) for text in texts], **options):
        pieces.append(ids)
        if ends:
            documents.append(np.concatenate(pieces).tolist())
            pieces = []
    assert not pieces
    return documents


@pytest.mark.parametrize("make", [byte_tokenizer, dna_tokenizer])
def test_table_equals_the_tokenizer(make):
    letters = "acgtnACGTNxX \n\x00é€👍"
    rng = np.random.default_rng(0)
    texts = [*WEIRD, "".join(rng.choice(list(letters), 200))]
    encoder = Encoder(make())
    assert encoder._table is not None and encoder.dtype == np.uint16
    slow = [make()(text).input_ids for text in texts]
    assert [ids.tolist() for ids in encoder.encode(texts)] == slow


def test_table_is_found_for_a_saved_tokenizer(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert Encoder(tokenizer)._table is not None
    assert Encoder(word_tokenizer())._table is None


def test_special_tokens_are_not_read_from_text():
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("<eos>|")}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    eos = tokenizer.eos_token_id
    assert tokenizer("<eos>").input_ids == [eos]
    assert eos not in Encoder(tokenizer).encode(["<eos>"])[0]


def test_slow_tokenizers_work():
    tokenizer = ByT5Tokenizer()
    ids = Encoder(tokenizer).encode(["hi", "é</s>"])
    assert [row.tolist() for row in ids] == [[b + 3 for b in t.encode()] for t in ["hi", "é</s>"]]


def test_each_document_ends_with_eos_and_nothing_else_is_added():
    texts = ["a b", "a", "b a a"]
    documents = whole(Encoder(word_tokenizer()), texts)
    assert documents == [[2, 3, 0], [2, 0], [3, 2, 2, 0]]


@pytest.mark.parametrize("limit", [1, 3, 1 << 20])
def test_batches_change_nothing(limit):
    texts = ["ab" * 5, "é", "x\ny"]
    expected = [[3 + byte for byte in text.encode()] + [2] for text in texts]
    assert whole(Encoder(byte_tokenizer()), texts, batch_characters=limit) == expected


@pytest.mark.parametrize("text", ["a b\na\nb b\n" * 9, "a b " * 20, "a" * 50])
def test_long_documents_are_cut_without_loss(monkeypatch, text):
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 16)
    pieces = [piece for piece, _ in encoding._cut(text)]
    assert "".join(pieces) == text and max(map(len, pieces)) <= 16 and len(pieces) > 2
    for piece in pieces[:-1]:
        assert piece.endswith("\n") or "\n" not in text
    if " " in text:
        assert whole(Encoder(word_tokenizer()), [text]) == [[*word_tokenizer()(text).input_ids, 0]]


@pytest.mark.parametrize("largest, dtype", [(65_535, np.uint16), (65_536, np.uint32)])
def test_large_vocabularies_take_four_bytes(largest, dtype):
    core = Tokenizer(models.WordLevel(vocab={"?": 0, "a": largest}, unk_token="?"))
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="?"))
    assert encoder.dtype == dtype
    assert encoder.encode(["a"])[0].tolist() == [largest]


def test_eos_is_needed():
    with pytest.raises(ValueError, match=r"tokenizer has no eos token.*set tokenizer\.eos_token"):
        Encoder(word_tokenizer(eos=None))


def test_held_out_share_and_seed():
    texts = [f"document {i}" for i in range(4000)]
    tenth = {t for t in texts if is_held_out(t, seed=0, share=0.1)}
    # Five standard deviations of a fair draw.
    assert abs(len(tenth) - 400) < 5 * (4000 * 0.1 * 0.9) ** 0.5
    assert tenth < {t for t in texts if is_held_out(t, seed=0, share=0.2)}
    assert tenth != {t for t in texts if is_held_out(t, seed=1, share=0.1)}
    assert not any(is_held_out(t, seed=0, share=0.0) for t in texts)
