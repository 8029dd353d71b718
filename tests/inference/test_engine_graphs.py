"""The engine with graphs: one for each number of rows, whatever the requests."""

import logging
import weakref

import pytest
import torch

from flash_frac.inference import (
    Engine,
    PrefixStates,
    Request,
    SamplingSettings,
    graphs,
    runner,
)
from flash_frac.inference.graphs import Graph
from tests.inference.engines import answers, expected, make, random_requests, run_at_random
from tests.inference.tape import Tape

DEVICES = [pytest.param("cpu", id="tape"), pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [None, "delta", "all", "transformer"]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "Graph", Tape)
        monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    return request.param


@pytest.fixture
def recorded(monkeypatch):
    """Graphs that were made since, by weak references."""
    made, make_one = [], Graph.__init__

    def counted(graph, *arguments, **options):
        make_one(graph, *arguments, **options)
        made.append(weakref.ref(graph))

    monkeypatch.setattr(Graph, "__init__", counted)
    return made


def kinds_of(engine):
    return [kind for kind, _ in engine._runner._recorder._graphs]


def assert_recorded_once(engine, recorded):
    """Steps of 1, 2, 4 and 6 rows, and pieces of few shapes."""
    kinds = kinds_of(engine)
    assert len(recorded) == len(kinds)
    assert {kind for kind in kinds if kind[0] == "step"} == {("step", n) for n in (1, 2, 4, 6)}
    shapes = {kind[1:3] for kind in kinds if kind[0] == "piece"}
    assert shapes and shapes <= {(1, 32), (1, 48), (1, 64), (2, 32)}


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps(kind, device, recorded):
    """Tokens of `generate`, with neighbours that sample, ask for logprobs and share beginnings."""
    model = make(kind).to(device)
    prefixes = PrefixStates(device_bytes=2**24, spacing=9)
    engine = Engine(model, slots=6, max_length=128, piece=64, late=True, prefixes=prefixes)
    plain = random_requests(16)
    sampling = SamplingSettings(temperature=0.8, top_p=0.9, repetition_penalty=1.3)
    others = random_requests(16, seed=1, sampling=sampling, logprobs=2, eos_token_ids=(7, 8, 9))
    mixed = [x for pair in zip(plain, others, strict=True) for x in pair]
    for _ in range(2):
        found = run_at_random(engine, mixed)
        assert found[::2] == [expected(model, request) for request in plain]
    assert_recorded_once(engine, recorded)


def test_short_prompts_are_read_side_by_side(device):
    """Eight at once; the rows of others that are read are not touched."""
    model = make("all").to(device)
    engine = Engine(model, slots=16, max_length=256, piece=256)
    requests = [Request(prompt=[n + 5] * 9, max_new_tokens=5) for n in range(13)]
    for request in requests:
        engine.submit(request)
    updates, read = [], []
    while engine._has_work():
        before = engine.stats().prompt_tokens
        updates += engine.step()
        read.append(engine.stats().prompt_tokens - before)
    assert [n // 9 for n in read if n] == [8, 4, 1]
    found = answers(updates)
    assert [found[n] for n in range(13)] == [expected(model, x) for x in requests]


def test_warm_up(device, recorded):
    """All graphs are there before the first request, which they do not disturb."""
    model = make("all").to(device)
    engine = Engine(model, slots=6, max_length=128, piece=64)
    engine.warm_up()
    assert_recorded_once(engine, recorded)
    before = {*kinds_of(engine)}
    requests = random_requests(12)
    assert run_at_random(engine, requests) == [expected(model, x) for x in requests]
    assert {*kinds_of(engine)} == before


@pytest.mark.parametrize("kind", [*KINDS, "sliding"])
def test_nothing_is_recorded_while_serving(kind, device, recorded):
    """However long the prompts are; and all graphs are kept."""
    model = make(kind).to(device)
    engine = Engine(model, slots=1, max_length=2200, piece=128)
    engine.warm_up()
    assert len(recorded) == len(kinds_of(engine)) > 5
    # 62 tokens are padded to 64, also where there is room for no more.
    small = Engine(model, slots=1, max_length=64, piece=64)
    small.warm_up()
    lengths = (1100, 2190) if kind in ("all", "transformer") else (1100,)
    for each, length in ((small, 62), *((engine, n) for n in lengths)):
        known = {*each._runner._recorder._run}
        request = Request(prompt=[n % 50 + 3 for n in range(length)], max_new_tokens=2)
        assert run_at_random(each, [request]) == [expected(model, request)]
        assert {*each._runner._recorder._run} == known


@torch.no_grad()
def test_a_model_that_changes(device, recorded):
    """It is recorded again when the engine has had nothing to do."""
    model = make(None).to(device)
    engine = Engine(model, slots=2)
    request = Request(prompt=[5, 6, 7], max_new_tokens=9)
    for _ in range(2):
        engine.submit(request)
        (tokens,) = answers(engine.run_until_idle()).values()
        assert tokens == expected(model, request)
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.flip(0))
    assert len(recorded) == 2


def test_a_model_that_cannot_be_recorded(device, recorded, caplog, monkeypatch):
    """It decodes without graphs, with one warning that says why."""
    monkeypatch.setattr(logging.getLogger("flash_frac.inference"), "propagate", True)
    runner.logger.warning_once.cache_clear()
    model, request = make(None).to(device), Request(prompt=[5, 6, 7], max_new_tokens=9)
    answer = expected(model, request)
    model.model.norm.register_forward_hook(lambda *unused: None)
    for _ in range(2):
        engine = Engine(model, slots=2)
        engine.warm_up()
        assert run_at_random(engine, [request]) == [answer] and not recorded
    assert caplog.text.count("cannot be recorded: it has hooks") == 1


def test_nothing_outlives_the_engine(device, recorded):
    model = make("all").to(device)
    engine = Engine(model, slots=2, max_length=128)
    with engine:
        list(engine.stream(Request(prompt=[5], max_new_tokens=9)))
    found = [weakref.ref(engine), *recorded]
    del engine
    assert all(x() is None for x in found) and len(found) > 3
