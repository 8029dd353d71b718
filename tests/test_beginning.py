"""One rule for the start of a text, in training, evaluation, generation and serving."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from flash_frac.beginning import beginning, set_beginning
from flash_frac.data import DataArguments, Encoder, byte_tokenizer, dna_tokenizer, prepare
from flash_frac.evals import long_perplexity
from flash_frac.evals.suites import SUITES
from flash_frac.inference import FracStream
from tests.evals.known import request, tiny_frac

BOS, EOS = 1, 2


@pytest.fixture(params=[False, True], ids=["none", "bos"])
def tokenizer(request):
    """Bytes, with and without a bos token before each text."""
    tokenizer = byte_tokenizer()
    set_beginning(tokenizer, request.param)
    return tokenizer


@pytest.fixture
def start(tokenizer):
    return [BOS] if tokenizer.add_bos_token else []


def spell(text):
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("make", [byte_tokenizer, dna_tokenizer])
def test_setting_it_is_saved(make, tmp_path):
    tokenizer = make()
    assert beginning(tokenizer) == []
    for asked, expected in ((True, [tokenizer.bos_token_id]), (None, ...), (False, [])):
        set_beginning(tokenizer, asked)
        expected = [tokenizer.bos_token_id] if expected is ... else expected
        tokenizer.save_pretrained(tmp_path)
        assert beginning(tokenizer) == expected
        assert beginning(AutoTokenizer.from_pretrained(tmp_path)) == expected


def test_conventions_of_others():
    core = Tokenizer(models.WordLevel(vocab={"[A]": 0, "[B]": 1, "[E]": 2, "a": 3}))
    tokens = [("[A]", 0), ("[B]", 1), ("[E]", 2)]
    core.post_processor = processors.TemplateProcessing(
        single="[A] [B] $A [E]", pair="$A $B", special_tokens=tokens
    )
    assert beginning(PreTrainedTokenizerFast(tokenizer_object=core, bos_token="[B]")) == [0, 1]
    # A vocabulary that has no letters, and refuses them.
    wordless = Tokenizer(models.WordLevel(vocab={"[B]": 1}))
    wordless.post_processor = processors.TemplateProcessing(
        single="[B] $A", pair="$A $B", special_tokens=[("[B]", 1)]
    )
    assert beginning(PreTrainedTokenizerFast(tokenizer_object=wordless, bos_token="[B]")) == [1]
    assert beginning(ByT5Tokenizer()) == []
    with pytest.raises(ValueError, match="add_bos_token is true, but the tokenizer has no bos tok"):
        set_beginning(ByT5Tokenizer(), True)
    with pytest.raises(ValueError, match=r"but ByT5Tokenizer still starts texts with \[\]"):
        set_beginning(ByT5Tokenizer(bos_token="<s>"), True)


def test_documents_to_train_on(tokenizer, start, tmp_path, monkeypatch):
    encoder = Encoder(tokenizer)
    # The quick way for bytes does not depend on it.
    assert encoder._table is not None
    monkeypatch.setattr("flash_frac.data.encoding.PIECE_CHARACTERS", 4)
    texts = ["abcdefghij", "", "é"]
    pieces = [ids for _, ids, _ in encoder.encode_documents([(False, text) for text in texts])]
    expected = [token for text in texts for token in (*start, *spell(text), EOS)]
    assert np.concatenate(pieces).tolist() == expected

    (tmp_path / "a.txt").write_text("one")
    stores = []
    for kind in (byte_tokenizer(), tokenizer):
        arguments = DataArguments(
            data_files=[str(tmp_path / "a.txt")], held_out=0.0, cache_dir=str(tmp_path / "cache")
        )
        stores.append(prepare(arguments, kind, seed=0, progress=False).train)
    assert stores[1].tokens(0, stores[1].num_tokens).tolist() == [*start, *spell("one"), EOS]
    assert (stores[0].folder == stores[1].folder) == (start == [])


def test_a_stream_begins_once(tokenizer, start):
    model = tiny_frac()
    stream = FracStream(model, tokenizer).feed("").feed("ab").feed("c")
    assert stream.lengths == (len(start) + 3,)
    expected = model(torch.tensor([[*start, *spell("abc")]])).logits[:, -1]
    torch.testing.assert_close(stream.logits, expected, rtol=1e-4, atol=1e-4)
    # As `transformers serve` reads a prompt.
    assert tokenizer("abc").input_ids == [*start, *spell("abc")]
    # Ids are read as they are, and what follows them is no beginning.
    assert FracStream(model, tokenizer).feed([BOS]).feed("abc").lengths == (4,)
    rows = FracStream(model, tokenizer, batch_size=2).feed(["a", "bc"])
    assert rows.lengths == (len(start) + 1, len(start) + 2)
    with pytest.raises(ValueError, match=r"inputs must be for 2 sequences, .* got 3"):
        FracStream(model, tokenizer, batch_size=2).feed(["a", "b", "c"])


def test_evaluations(tokenizer, start, monkeypatch):
    """A first token that is scored needs one before it: eos, if texts begin with nothing."""
    pytest.importorskip("lm_eval")
    from flash_frac.evals.language_model import FracLM

    lm, asked = FracLM(tiny_frac(), tokenizer=tokenizer, max_length=64, batch_size=1), []

    def score(self, requests, *args, **options):
        asked.extend((list(context), list(answer)) for _, context, answer in requests)
        return [(0.0, True)] * len(requests)

    monkeypatch.setattr(FracLM, "_loglikelihood_tokens", score)
    before = start or [EOS]
    lm.loglikelihood_rolling([SimpleNamespace(args=("abc",))], disable_tqdm=True)
    lm.loglikelihood([SimpleNamespace(args=pair) for pair in (("", "abc"), ("ab", "c"))])
    spelt = spell("abc")
    assert asked == [(before, spelt), (before, spelt), ([*start, *spelt[:2]], spelt[2:])]
    assert lm.tok_encode("abc") == [*start, *spelt]


def test_long_documents(tokenizer, start, tmp_path, monkeypatch):
    seen, suite = [], SUITES["longppl"]
    (tmp_path / "longppl").mkdir()
    (tmp_path / "longppl" / "pg19.jsonl").write_text(json.dumps({"text": "x" * 40}) + "\n")

    def losses(model, tokens, **options):
        seen.append(tokens.tolist())
        return torch.ones(1)

    monkeypatch.setattr(long_perplexity, "token_losses", losses)
    lm = SimpleNamespace(model=tiny_frac(), tokenizer=tokenizer)
    suite.measure(request(suite, "pg19", lm, length=20, data_dir=tmp_path))
    assert seen[0] == [*start, *spell("x" * 40)][:20]
