import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from flash_frac.data import byte_tokenizer, check_vocabulary, dna_tokenizer, load_tokenizer
from flash_frac.data.tokenizer import tokenizer_hash

WEIRD = [
    "plain",
    " spaces  before , and n't .",
    "tabs\tand\r\nline ends\n\n",
    "\x00nul\x00",
    "👩‍🚀",
    "e\u0301 é ﬁ \u202e right to left",
    "\U0010ffff\ue000\x7f\x80",
    "<eos> <pad> <bos> [SEP]",
    "\u2581metaspace Ġ Ċ",
    "",
]


@pytest.mark.parametrize("text", WEIRD)
@pytest.mark.parametrize("skip", [False, True])
def test_bytes_are_the_utf8_bytes_and_come_back(text, skip):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == [3 + byte for byte in text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=skip) == text


def test_special_bytes():
    tokenizer = byte_tokenizer()
    special = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    assert special == (0, 1, 2)
    assert len(tokenizer) == tokenizer.vocab_size == 259
    assert tokenizer.decode([2, 100, 0], skip_special_tokens=True) == "a"
    assert tokenizer.decode([2, 100]) == "<eos>a"


def test_dna_ids():
    tokenizer = dna_tokenizer()
    assert tokenizer("ACGTN").input_ids == [7, 8, 9, 10, 11]
    assert tokenizer("acgtn").input_ids == [7, 8, 9, 10, 11]
    assert tokenizer("AX é\n[SEP]").input_ids == [7, 6, 6, 6, 6, 6, 6, 6, 6, 6]
    names = ["[CLS]", "[SEP]", "[BOS]", "[MASK]", "[PAD]", "[RESERVED]", "[UNK]"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(7))
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, 2, 4)
    assert len(tokenizer) == 12
    assert tokenizer.decode([7, 8, 9, 10, 11]) == "ACGTN"
    assert tokenizer.decode([2, 7, 5, 1], skip_special_tokens=True) == "A"


def test_saved_tokenizers_need_no_flash_frac(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "b")
    dna_tokenizer().save_pretrained(tmp_path / "d")
    code = (
        "import json, sys; from transformers import AutoTokenizer\n"
        f"texts = json.loads({json.dumps(json.dumps(WEIRD))})\n"
        f"b = AutoTokenizer.from_pretrained({str(tmp_path / 'b')!r})\n"
        f"d = AutoTokenizer.from_pretrained({str(tmp_path / 'd')!r})\n"
        "assert 'flash_frac' not in sys.modules\n"
        "print(json.dumps([[b(t).input_ids for t in texts],"
        " [b.decode(b(t).input_ids) for t in texts], d('acgX[SEP]').input_ids,"
        " b.eos_token_id, d.eos_token_id]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ids, texts, dna, *eos = json.loads(done.stdout)
    assert ids == [[3 + byte for byte in text.encode()] for text in WEIRD]
    assert texts == WEIRD
    assert dna == [7, 8, 9, 6, 6, 6, 6, 6, 6] and eos == [2, 1]


def test_load_by_name(tmp_path):
    assert len(load_tokenizer("bytes")) == 259 and len(load_tokenizer("dna")) == 12
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("<eos>").input_ids == byte_tokenizer()("<eos>").input_ids


@pytest.mark.parametrize("name", ["missing/folder/of/one", "empty"])
def test_a_tokenizer_that_cannot_be_had(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"tokenizer '.*{name}' cannot be loaded: expected"):
        load_tokenizer(str(tmp_path / name))


def test_no_eos(tmp_path):
    core = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no eos token.*save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_vocabulary_must_fit():
    check_vocabulary(byte_tokenizer(), 259)
    with pytest.raises(ValueError, match=r"has 259 tokens.*vocab_size is 258.*to 259"):
        check_vocabulary(byte_tokenizer(), 258)


def test_vocabulary_with_holes_counts_to_its_largest_id():
    core = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 9}, unk_token="a"))
    with pytest.raises(ValueError, match="has 10 tokens"):
        check_vocabulary(PreTrainedTokenizerFast(tokenizer_object=core), 9)


def test_hash_is_of_the_content(tmp_path):
    tokenizer = byte_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=1)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(tokenizer) == before
    assert tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == before
    tokenizer.eos_token = "<bos>"
    assert len({tokenizer_hash(tokenizer), tokenizer_hash(dna_tokenizer()), before}) == 3


def test_hash_of_a_slow_tokenizer():
    assert tokenizer_hash(ByT5Tokenizer()) == tokenizer_hash(ByT5Tokenizer())
    assert tokenizer_hash(ByT5Tokenizer()) != tokenizer_hash(ByT5Tokenizer(extra_ids=7))
