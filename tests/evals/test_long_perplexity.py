"""Long-document perplexity: models with known probabilities, and pieces against whole passes."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from flash_frac.data import byte_tokenizer
from flash_frac.evals import long_perplexity as module
from flash_frac.evals.examples import read_rows
from flash_frac.evals.long_perplexity import SUITE, long_perplexity, token_losses, window_starts
from tests.evals.known import SAMPLES, Bigram, request, tiny_frac


def documents(*lengths, vocab_size=259):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("score_last", [None, 1, 100])
def test_to_a_uniform_model_all_tokens_are_equally_hard(score_last):
    model = tiny_frac()
    torch.nn.init.zeros_(model.lm_head.weight)
    result = long_perplexity(model, documents(300, 500), 256, bos=1, score_last=score_last)
    # float32 of log 259, over hundreds of tokens.
    assert result.ppl == pytest.approx(259, rel=1e-6)
    assert result.ppl_documents == pytest.approx(259, rel=1e-6)
    # Of 44 and 244 starts, each 10th and each 24th.
    windows = 5 + 11
    assert result.num_tokens == (2 * 255 if score_last is None else windows * score_last)


def test_a_bigram_model_by_hand():
    """Token 0 is followed by 0 with probability 1/2; after 1, a 1 has probability 1/8."""
    model = Bigram(torch.log(torch.tensor([[1 / 2, 1 / 2], [7 / 8, 1 / 8]])))
    zeros, ones = [0] * 9, [1] * 9
    result = long_perplexity(model, [zeros, ones, [0] * 8], 9)
    assert (result.num_documents, result.num_tokens) == (2, 16)
    assert result.ppl == pytest.approx(math.sqrt(2 * 8))
    assert result.ppl_documents == pytest.approx((2 + 8) / 2)
    # The beginning token is one of the nine: it is seen, and the last of the document is not.
    result = long_perplexity(model, [ones], 9, bos=0)
    assert result.ppl == pytest.approx(2 ** (1 / 8) * 8 ** (7 / 8))
    # The last two of 0 0 0 1 1: 0 -> 1, 1 -> 1.
    result = long_perplexity(model, [[0, 0, 0, 1, 1]], 5, bos=1, score_last=2)
    assert result.ppl == pytest.approx(math.sqrt(2 * 8)) and result.num_tokens == 2


def test_the_whole_measure_is_a_hugging_face_loss():
    """YaRN's: the loss of the beginning token and N - 1 others, document by document."""
    model, texts = tiny_llama(), documents(64, 80)
    ids = [torch.tensor([[1, *text[:63]]]) for text in texts]
    with torch.no_grad():
        losses = [model(i, labels=i).loss.item() for i in ids]
    result = long_perplexity(model, texts, 64, bos=1)
    assert result.ppl == pytest.approx(math.exp(sum(losses) / 2), rel=1e-6)
    assert result.ppl_documents == pytest.approx(sum(map(math.exp, losses)) / 2, rel=1e-6)


def test_the_ends_are_the_last_tokens_of_windows():
    model, (text,) = tiny_llama(), documents(90)
    losses = []
    for start in range(0, 90 - 64, 10):
        window = torch.tensor([text[start : start + 64]])
        with torch.no_grad():
            logits = model(window).logits
        losses.append(F.cross_entropy(logits[0, -6:-1], window[0, -5:]))
    result = long_perplexity(model, [text], 64, bos=1, score_last=5)
    assert result.ppl == pytest.approx(math.exp(torch.stack(losses).mean().item()), rel=1e-6)
    assert result.num_tokens == 3 * 5


@pytest.mark.parametrize(
    "num_tokens, starts",
    [(64, [0]), (65, [0]), (74, [0]), (75, [0, 10]), (264, list(range(0, 200, 20)))],
)
def test_windows_are_spread_over_a_document(num_tokens, starts):
    assert list(window_starts(num_tokens, 64)) == starts


@pytest.mark.parametrize("attention_layers", [None, [1]])
@pytest.mark.parametrize("score_last", [None, 1, 10, 60])
def test_pieces_equal_the_whole(attention_layers, score_last):
    options = {} if attention_layers is None else {"attention_layers": attention_layers}
    model = tiny_frac(**options).double()
    tokens = torch.tensor(documents(65)[0])
    with torch.no_grad():
        logits = model(tokens[None, :-1], use_cache=False).logits[0]
        wanted = F.cross_entropy(logits, tokens[1:], reduction="none")[-(score_last or 64) :]
        for piece in (1, 7, 32, 63, 64, 100):
            losses = token_losses(model, tokens, score_last=score_last, piece_tokens=piece)
            assert losses.dtype == torch.float64 and len(losses) == (score_last or 64)
            # Logits are float32, whatever the model.
            torch.testing.assert_close(losses.float(), wanted, rtol=1e-6, atol=1e-6)


def test_logits_of_one_piece_are_in_memory(monkeypatch):
    monkeypatch.setattr(module, "BATCH_TOKENS", 16)
    model, sizes = tiny_frac(), []
    model.lm_head.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[1]))
    long_perplexity(model, documents(100), 100)
    assert sizes == [16] * 6 + [3]
    sizes.clear()
    # Pieces that hold no scored token bring the memory forward alone.
    long_perplexity(model, documents(100), 100, score_last=10)
    assert sizes == [1] * 5 + [7, 3]


def test_other_models_read_at_once_unless_asked():
    model = Bigram(torch.zeros(4, 4))
    long_perplexity(model, documents(50, vocab_size=4), 50)
    assert model.calls == [(49, None, False)]
    model.calls.clear()
    long_perplexity(model, documents(50, vocab_size=4), 50, piece_tokens=20)
    assert model.calls == [(20, None, True), (20, 20, True), (9, 40, False)]


def test_every_length_may_have_the_same_documents():
    texts, model = documents(30, 60, 90), Bigram(torch.zeros(259, 259))
    assert long_perplexity(model, texts, 20).num_documents == 3
    assert long_perplexity(model, texts, 20, min_tokens=60).num_documents == 2
    model.train()
    long_perplexity(model, texts, 20)
    assert model.training and model.logits.grad is None


class Model:
    """What a measurement asks of lm-eval's model."""

    def __init__(self, model):
        self.model, self.tokenizer = model, byte_tokenizer()


@pytest.mark.parametrize("task", [task.name for task in SUITE.tasks])
def test_samples_of_every_task(task):
    rows = read_rows(SAMPLES / "longppl" / f"{task}.jsonl")
    lengths = [len(row["text"].encode()) for row in rows]
    result = module.measure(request(SUITE, task, Model(tiny_frac()), length=1000))
    # 4096 is the largest of the suite's lengths that a document has.
    assert result["min_tokens"] == 4096
    assert result["num_examples"] == sum(n >= 4096 for n in lengths) > 0
    assert result["num_left_out"] == sum(n < 4096 for n in lengths)
    assert result["num_tokens"] == 999 * result["num_examples"]
    assert result["num_tokens_last"] % 100 == 0
    assert all(1 < result[key] < 1e6 for key in ("ppl", "ppl_documents", "ppl_last"))
    uniform = tiny_frac()
    torch.nn.init.zeros_(uniform.lm_head.weight)
    result = module.measure(request(SUITE, task, Model(uniform), length=50, limit=1))
    assert [result[k] for k in ("ppl", "ppl_documents", "ppl_last")] == pytest.approx([259] * 3)
    assert result["num_examples"] == 1


def test_lengths_share_their_documents(tmp_path, monkeypatch):
    texts = ["a" * 2048, "b" * 8192, "c" * 8191, "d" * 9000]
    (tmp_path / "longppl").mkdir()
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    (tmp_path / "longppl" / "pg19.jsonl").write_text(lines)
    lm = Model(Bigram(torch.zeros(259, 259)))
    for length, num_documents, least in ((100, 2, 8192), (8192, 2, 8192), (8500, 1, 8500)):
        result = module.measure(request(SUITE, "pg19", lm, length=length, data_dir=tmp_path))
        assert (result["num_examples"], result["min_tokens"]) == (num_documents, least)
    assert result["left_out"][1:] == [
        "document 2 (8,192 tokens, fewer than 8,500)",
        "document 3 (8,191 tokens, fewer than 8,500)",
    ]
    with pytest.raises(
        ValueError, match="no document of pg19 has 9001 tokens, the longest has 9000"
    ):
        module.measure(request(SUITE, "pg19", lm, length=9001, data_dir=tmp_path))
    monkeypatch.setattr(module, "NUM_DOCUMENTS", 1)
    result = module.measure(request(SUITE, "pg19", lm, length=100, data_dir=tmp_path))
    assert result["num_examples"] == 1 and result["num_left_out"] == 3
    assert result["left_out"][-1] == "document 4 (after the first 1)"


def test_errors_name_the_remedy(tmp_path):
    model = Bigram(torch.zeros(259, 259))
    with pytest.raises(ValueError, match=r"none of 2 documents has 50 tokens, .* has 40: use a"):
        long_perplexity(model, documents(30, 40), 50)
    with pytest.raises(ValueError, match=r"length must be at least 2.* got 1"):
        long_perplexity(model, documents(30), 1)
    with pytest.raises(ValueError, match="min_tokens must be at least length = 20, got 10"):
        long_perplexity(model, documents(30), 20, min_tokens=10)
    with pytest.raises(ValueError, match="score_last must be from 1 to length - 1 = 19, got 20"):
        long_perplexity(model, documents(30), 20, score_last=20)
    with pytest.raises(ValueError, match="piece_tokens must be at least 1, got 0"):
        long_perplexity(model, documents(30), 20, piece_tokens=0)
    with pytest.raises(ValueError, match="set them with --lengths"):
        module.measure(request(SUITE, "pg19", Model(model)))
    with pytest.raises(FileNotFoundError, match=r"pg19\.jsonl is missing: .* --suite longppl"):
        module.measure(request(SUITE, "pg19", Model(model), length=20, data_dir=tmp_path))


def test_preparation_keeps_the_texts(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda name, config, split: [{"text": f"{name} {split}", "input": "report", "tokens": [1]}],
    )
    files = module.prepare(tmp_path)
    assert [file.stem for file in files] == ["proofpile", "pg19", "govreport"]
    assert read_rows(files[1]) == [{"text": "emozilla/pg19-test-tokenized test"}]
    assert read_rows(files[2]) == [{"text": "report"}]
