"""A checkpoint as lm-eval sees it."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flash_frac.data import byte_tokenizer
from flash_frac.evals import harness, language_model
from flash_frac.evals.language_model import CPU_TOKENS, FracLM
from flash_frac.evals.suites import SUITES
from tests.evals.known import request, tiny_frac

lm_eval = pytest.importorskip("lm_eval")
logging.getLogger("lm_eval").setLevel(logging.ERROR)
TEXTS = ["To be", "A much longer beginning of a text, so that padding is needed", "x", "Why not?"]


def prompts(texts, **options):
    asked = {"until": [], "max_gen_toks": 12, "do_sample": False} | options
    return [SimpleNamespace(args=(text, asked)) for text in texts]


@pytest.mark.parametrize("options", [{}, {"attention_layers": [1]}], ids=["frac", "hybrid"])
def test_requests_do_not_depend_on_each_other(options):
    """Together, as prompts of all lengths, and one by one."""
    model, tokenizer = tiny_frac(**options), byte_tokenizer()
    together = FracLM(model, tokenizer=tokenizer, batch_size=4).generate_until(prompts(TEXTS))
    alone = FracLM(model, tokenizer=tokenizer, batch_size=1).generate_until(prompts(TEXTS))
    assert together == alone and len(set(alone)) > 1


def test_generation_is_that_of_transformers(checkpoint):
    """Our engine and `generate` give the same text, with texts that end it and without."""
    # Theirs one by one: the penalty would apply to padding, too.
    ours, theirs = (FracLM(str(checkpoint), batch_size=size) for size in (2, 1))
    theirs._has_engine = False
    plain = ours.generate_until(prompts(TEXTS))
    assert plain == theirs.generate_until(prompts(TEXTS))
    ending = plain[1][4:6]
    for options in (
        {"until": [ending]},
        {"until": ending, "max_new_tokens": 9},
        {"repetition_penalty": 1.7, "temperature": 0.0},
    ):
        found = ours.generate_until(prompts(TEXTS, **options))
        assert found == theirs.generate_until(prompts(TEXTS, **options)) != plain
    stopped = ours.generate_until(prompts(TEXTS, until=[ending]))
    assert stopped[1] == plain[1].split(ending)[0]
    mixed = prompts(TEXTS[:2], until=[ending]) + prompts(TEXTS[2:])
    assert ours.generate_until(mixed) == stopped[:2] + plain[2:]


def test_all_requests_are_submitted_at_once(checkpoint, monkeypatch):
    """With as many slots as the batch is large; what the engine lacks is left to `generate`."""
    made, waiting = [], []

    class Watched(language_model.Engine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(options["slots"])

        def step(self):
            waiting.append(self.stats().waiting)
            return super().step()

    monkeypatch.setattr(language_model, "Engine", Watched)
    lm = FracLM(str(checkpoint), batch_size=2)
    assert len(lm.generate_until(prompts(TEXTS))) == 4
    assert made == [2] and waiting[0] == 4
    assert len(lm.generate_until(prompts(TEXTS, num_beams=2))) == 4
    assert made == [2]


def test_sampling_is_seeded_by_torch(checkpoint):
    lm = FracLM(str(checkpoint), batch_size=4)
    asked = prompts(TEXTS, do_sample=True, temperature=1.0)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(lm.generate_until(asked))
    assert found[0] == found[1] != found[2]


def test_an_end_of_thinking(checkpoint):
    """As a token and as a text: what comes after its last place."""
    lm = FracLM(str(checkpoint), batch_size=4)
    text = lm.generate_until(prompts(TEXTS[:1]))[0]
    letter = next(x for x in text[2:-1] if x.isascii() and x.isprintable())
    lm.think_end_token = letter
    expected = text.split(letter)[-1].lstrip()
    assert lm.generate_until(prompts(TEXTS[:1]))[0] == expected != text
    lm.think_end_token = lm.tok_encode(letter)[-1]
    assert lm.generate_until(prompts(TEXTS[:1]))[0] == expected


def test_right_padding_does_not_change_likelihoods(checkpoint):
    suite = SUITES["lm"]
    values = []
    for size in (1, 3, "auto"):
        lm = FracLM(str(checkpoint), batch_size=size, max_length=2048)
        values.append(harness.measure(request(suite, "lambada_openai", lm))["perplexity,none"])
    assert values[1:] == pytest.approx(values[:1] * 2, rel=1e-5)


def test_auto_on_a_cpu_bounds_the_tokens_of_a_batch(checkpoint):
    lm = FracLM(str(checkpoint), batch_size="auto", max_length=1024)
    assert lm._detect_batch_size() == CPU_TOKENS // 1024
    assert lm._generation_batch_size(65536, 99) == 1 and lm._generation_batch_size(1, 99) == 64
    # No more than there is to do.
    assert lm._generation_batch_size(1, 10) == 10
    assert lm.generate_until(prompts(TEXTS)) and lm.batch_size == "auto"


def test_auto_takes_fewer_rows_until_they_fit(checkpoint, monkeypatch):
    """The search on a GPU, with a memory that holds five sequences."""
    tried = []

    class Small(language_model.Engine):
        def __init__(self, *args, **options):
            tried.append(options["slots"])
            if tried[-1] > 5:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            super().__init__(*args, **options)

    monkeypatch.setattr(language_model, "Engine", Small)
    lm = FracLM(str(checkpoint), batch_size="auto")
    lm._device = SimpleNamespace(type="cuda")
    engine = lm._engine(32, 99)
    assert tried[0] == 64 and engine.slots == tried[-1] <= 5
    assert engine.stats().finished["length"] == 1


def test_other_models_take_fewer_rows_until_they_fit(checkpoint):
    tried = []

    class Small(FracLM):
        def _model_generate(self, context, max_length, stop, **options):
            tried.append(tuple(context.shape))
            if len(context) > 5:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super()._model_generate(context, max_length, stop, **options)

    assert Small(str(checkpoint), batch_size="auto")._try_batch_sizes(32, 64) <= 5
    assert tried[0] == (64, 30) and tried[-1][0] <= 5


def test_nothing_is_cut_in_silence(checkpoint):
    lm = FracLM(str(checkpoint), max_length=24)
    room = r"1 of 4 requests .* than the 12 that max_length = 24 .* --truncate"
    with pytest.raises(ValueError, match=room):
        lm.generate_until(prompts(TEXTS))
    with pytest.raises(ValueError, match=r"8 of 8 requests have more tokens .* than the 24"):
        harness.measure(request(SUITES["lm"], "boolq", lm))
    with pytest.raises(ValueError, match=r"an answer has .*, more than max_length = 24"):
        harness.measure(request(SUITES["lm"], "piqa", lm))


def test_cuts_that_are_asked_for_are_counted(checkpoint):
    lm = FracLM(str(checkpoint), max_length=24, truncate=True)
    texts = lm.generate_until(prompts(TEXTS))
    assert lm.num_truncated == 1
    kept = FracLM(str(checkpoint)).generate_until(prompts([TEXTS[1][-12:]]))
    assert texts[1] == kept[0]
    lm.allow(100)
    assert lm.num_truncated == 0 and lm.max_length == 100


def test_windows_are_not_cuts(checkpoint):
    """A page longer than max_length is read in windows, which is how wikitext is scored."""
    lm = FracLM(str(checkpoint), max_length=64)
    assert harness.measure(request(SUITES["lm"], "wikitext", lm))["num_examples"] == 2
    assert lm.num_truncated == 0


@pytest.mark.parametrize("name", ["frac", "hf"])
def test_lm_eval_finds_the_model_by_name(checkpoint, name):
    """After our package is imported, both lm-eval's own class and ours load a checkpoint."""
    ours = FracLM(str(checkpoint), max_length=2048)
    asked = request(SUITES["lm"], "arc_easy", ours)
    output = lm_eval.simple_evaluate(
        model=name,
        model_args={"pretrained": str(checkpoint), "max_length": 2048, "device": "cpu"},
        tasks=[harness.build(asked)],
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert output["results"]["arc_easy"]["acc,none"] == harness.measure(asked)["acc,none"]


def test_importing_the_package_is_enough():
    """In a fresh process, where nothing else has loaded lm-eval's models; it stays light."""
    code = (
        "import sys, flash_frac.evals; print('datasets' in sys.modules)\n"
        "from lm_eval.api.registry import get_model\n"
        "print(get_model('frac').__name__, get_model('hf').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "FracLM", "HFLM"]


def test_any_other_model_of_transformers_runs(no_network):
    sizes = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 32}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    lm = FracLM(model, tokenizer=byte_tokenizer(), batch_size=2, max_length=2048)
    assert 0 <= harness.measure(request(SUITES["lm"], "boolq", lm))["acc,none"] <= 1
    assert len(lm.generate_until(prompts(TEXTS))) == 4
