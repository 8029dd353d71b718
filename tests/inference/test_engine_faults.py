"""The engine: a failure ends one request, or ends everything with a message."""

import itertools

import numpy as np
import pytest
import torch

from flash_frac.inference import Engine, EngineStopped, PrefixStates, Request
from tests.inference.engines import answers, expected, make, random_requests
from tests.models.conftest import make_model

GOOD = Request(prompt=[5, 6, 7], max_new_tokens=8)


@pytest.fixture
def model():
    return make(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "prompt must be ids of tokens, at least one, got none"),
        ({"prompt": [5, 6.5]}, r"prompt must be ids of tokens, at least one, got \(5, 6.5\)"),
        ({"prompt": "text"}, "prompt must be ids of tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, and whole, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be at least 1, and whole, got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be at least 1, and whole, got True"),
        ({"logprobs": -1}, "logprobs must be None or whole, at least 0, got -1"),
        ({"logprobs": 1.5}, "logprobs must be None or whole, at least 0, got 1.5"),
        ({"seed": 1.5}, "seed must be a signed 64-bit integer, got 1.5"),
        ({"seed": 10**400}, "seed must be a signed 64-bit integer, got 10{400}"),
        ({"max_new_tokens": torch.tensor(2.5)}, "max_new_tokens must be at least 1, and whole"),
        ({"prompt": [torch.tensor(1.5)]}, "prompt must be ids of tokens"),
        (
            {"stop": (x for x in ["a", 1])},
            r"stop must be a list of non-empty texts, got \['a', 1\]",
        ),
        ({"sampling": {"temperature": 1}}, "sampling must be SamplingSettings, got {'temp"),
        ({"sampling": None}, "sampling must be SamplingSettings, got None"),
        ({"boundaries": [1.5]}, r"boundaries must be positions, got \(1.5,\)"),
        ({"eos_token_ids": 2}, "eos_token_ids must be ids of tokens, got 2"),
        ({"stop": "text"}, r"stop must be a list of texts, got 'text'; use \['text'\]"),
        ({"stop": ["a", ""]}, r"stop must be a list of non-empty texts, got \['a', ''\]"),
    ],
)
def test_requests_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": [5], "max_new_tokens": 3} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [5, 61]}, r"prompt must be in \[0, 61\), the vocabulary, got ids from 5 to 61"),
        ({"prompt": [-1]}, r"prompt must be in \[0, 61\), the vocabulary, got ids from -1 to -1"),
        (
            {"prompt": [5] * 30},
            r"prompt \(30 tokens\) and max_new_tokens \(3\) must be at most 32 together",
        ),
        ({"stop": ["text"]}, "stop needs a tokenizer"),
        ({"boundaries": [2]}, r"boundaries must be between 0 and the prompt's length \(1\)"),
        ({"seed": 2**63}, "seed must be a signed 64-bit integer"),
    ],
)
def test_requests_that_never_fit(model, options, message):
    """They are refused at once, and others go on."""
    engine = Engine(model, slots=2, max_length=32)
    engine.submit(GOOD)
    with pytest.raises(ValueError, match=message):
        engine.submit(Request(**{"prompt": [5], "max_new_tokens": 3} | options))
    tokens = [token for update in engine.run_until_idle() for token in update.tokens]
    assert tokens == expected(model, GOOD)


@pytest.mark.parametrize("seed", [-(2**63), 1 - 2**63, 2**63 - 1])
def test_seeds_of_64_bits(model, seed):
    engine = Engine(model, slots=1)
    request = Request(prompt=[5], max_new_tokens=2, seed=seed, stop=iter([]))
    engine.submit(request)
    assert request.stop == () and engine.run_until_idle()[-1].finished == "length"


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: tuple(np.array(ids))])
def test_ids_of_other_libraries(kind):
    request = Request(prompt=kind([5, 6]), max_new_tokens=np.int64(3), eos_token_ids=kind([2]))
    assert request.prompt == (5, 6) and request.eos_token_ids == (2,)
    assert {*map(type, (*request.prompt, *request.eos_token_ids))} == {int}


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_depend_on_other_requests_are_refused(rope):
    factors = [1.0] * 4 if rope == "longrope" else None
    options = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4}
    options |= {"original_max_position_embeddings": 16}
    options |= {} if factors is None else {"short_factor": factors, "long_factor": factors}
    model = make_model(
        torch.float32, mixer_types=["frac", "attention"], attention_rope_parameters=options
    )
    assert model.model.rotary_emb.rope_type == rope
    with pytest.raises(ValueError, match=f"rope_type '{rope}', whose frequencies depend on"):
        Engine(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"piece": 0}, "piece must be at least 1, got 0"),
        ({"max_waiting": 0}, "max_waiting must be at least 1, got 0"),
        ({"max_length": 1}, "max_length must be None or at least 2, got 1"),
    ],
)
def test_engines_that_make_no_sense(model, options, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **options)
    with pytest.raises(ValueError, match="model must be in eval mode"):
        Engine(model.train())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [None, "all", "transformer"])
def test_logits_that_are_no_numbers(kind, late):
    """One token breaks the model; who reads it ends alone, and leaves nothing behind."""
    model = make(kind)
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.nan
    # Untied, or all logits would be broken.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(0.1))
    requests = random_requests(12, seed=1)
    bad = [Request(prompt=[*x.prompt[:3], 60, 5], max_new_tokens=9) for x in requests]
    good = [Request(prompt=[min(n, 59) for n in x.prompt], max_new_tokens=9) for x in requests]
    engine = Engine(model, slots=3, max_length=64, piece=16, late=late)
    found = {}
    for pair in zip(good, bad, strict=True):
        for request in pair:
            engine.submit(request)
    for update in engine.run_until_idle():
        found.setdefault(update.id, []).append(update)
    for n, request in enumerate(good):
        tokens = [token for update in found[2 * n] for token in update.tokens]
        if 60 not in tokens:
            assert tokens == expected(model, request)
    for n, request in enumerate(bad):
        (update,) = found[2 * n + 1]
        assert update.finished == "error" and not update.tokens
        length = len(request.prompt)
        assert update.error == f"the logits after {length} tokens are not finite (NaN or infinite)"
    assert engine.failed is None and engine.stats().running == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [None, "all", "transformer", "sliding"])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_fault_that_passes(kind, late, bad):
    """One forward pass gives NaN: nothing of it is found in the prefix cache afterwards."""
    model, passes = make(kind), itertools.count()
    prefixes = PrefixStates(device_bytes=2**24, spacing=16)
    engine = Engine(model, slots=2, max_length=128, piece=16, late=late, prefixes=prefixes)

    def fail(module, inputs, output):
        return output * torch.nan if next(passes) == bad else output

    # Three passes read the prompt, and later ones the answer.
    request = Request(prompt=[*range(3, 43)], max_new_tokens=9)
    handle = model.model.embed_tokens.register_forward_hook(fail)
    engine.submit(request)
    assert [x.finished for x in engine.run_until_idle() if x.finished] == ["error"]
    handle.remove()
    for _ in range(2):
        before = engine.stats().prompt_tokens
        id = engine.submit(request)
        assert answers(engine.run_until_idle())[id] == expected(model, request)
    assert engine.stats().prompt_tokens == before


@pytest.mark.parametrize("kind", [None, "all", "transformer", "sliding"])
def test_numbers_that_nobody_has_seen(kind):
    """A request that ends before its NaN is found leaves none to the next in its slot."""
    requests = random_requests(16, most_new=6)
    wanted = [expected(make(kind), request) for request in requests]
    model = make(kind)
    # With this piece, a prompt of 50 tokens is read alone.
    engine = Engine(model, slots=3, max_length=64, piece=50, late=True)
    runner = engine._runner

    def fail(module, inputs, output):
        """NaN for what is read beyond the end of an answer, and for prompts of 50 tokens."""
        if inputs[0].data_ptr() == runner._slots.token.data_ptr():
            for job, x in zip(runner.rows, output, strict=False):
                if job and job.num_read >= len(job.prompt) + job.request.max_new_tokens - 1:
                    x.fill_(torch.nan)
        return output * torch.nan if output.shape[1] == 50 else output

    model.model.embed_tokens.register_forward_hook(fail)
    cancelled = []
    for request in requests:
        engine.submit(request)
        cancelled.append(engine.submit(Request(prompt=[5] * 50, max_new_tokens=9)))
    found = {}
    while engine._has_work():
        for update in engine.step():
            found.setdefault(update.id, []).extend(update.tokens)
            assert update.finished != "error"
        for job in runner.rows:
            if job and job.id in cancelled:
                engine.cancel(job.id)
    assert [found[2 * n] for n in range(16)] == wanted


def test_a_callback_that_fails(model):
    """Its request is cancelled; others go on."""
    engine, updates = Engine(model, slots=2), []

    def fail(update):
        raise RuntimeError("no reader")

    engine.submit(Request(prompt=[5], max_new_tokens=10**6), fail)
    engine.submit(GOOD, updates.append)
    engine.run_until_idle()
    assert [token for x in updates for token in x.tokens] == expected(model, GOOD)
    assert engine.stats().finished == {"stop": 0, "length": 1, "cancelled": 1, "error": 0}


def test_a_tokenizer_that_fails(model):
    class Broken:
        def decode(self, ids):
            raise KeyError("no such token")

    engine = Engine(model, slots=2, tokenizer=Broken())
    engine.submit(Request(prompt=[5], max_new_tokens=9, stop=["x"]))
    engine.submit(GOOD)
    updates = engine.run_until_idle()
    assert [x.error for x in updates if x.id == 0] == ["KeyError: 'no such token'"]
    assert [token for x in updates for token in x.tokens] == expected(model, GOOD)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_step_that_fails(model, threaded):
    """All requests end with the error, and the engine says so from then on."""
    engine, updates = Engine(model, slots=1), []
    calls = iter(range(100))

    def fail(*_):
        if next(calls) == 3:
            raise MemoryError("no room")

    model.model.norm.register_forward_pre_hook(fail)
    for _ in range(3):
        engine.submit(GOOD, updates.append)
    if threaded:
        engine.start()
        engine._thread.join(30)
        engine.stop()
    else:
        with pytest.raises(MemoryError):
            engine.run_until_idle()
    ends = [x for x in updates if x.finished]
    assert len(ends) == 3 and isinstance(engine.failed, MemoryError)
    assert all(x.error == "the engine has failed: MemoryError: no room" for x in ends)
    for call in (engine.step, engine.start, lambda: engine.submit(GOOD)):
        with pytest.raises(EngineStopped, match="the engine has failed: MemoryError: no room"):
            call()
    engine.stop()


def test_a_stream_of_an_engine_that_fails(model):
    """It ends with the error, and never hangs."""
    engine = Engine(model, slots=1)

    def fail(*_):
        raise MemoryError("no room")

    model.model.norm.register_forward_pre_hook(fail)
    with engine:
        updates = list(engine.stream(GOOD))
    assert [x.finished for x in updates] == ["error"]
