"""The engine from graphs: one for each number of rows, whatever the requests."""

import weakref

import pytest
import torch

from flash_frac.inference import Engine, PrefixStates, Request, SamplingSettings, graphs
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


def test_nothing_outlives_the_engine(device, recorded):
    model = make("all").to(device)
    engine = Engine(model, slots=2, max_length=128)
    with engine:
        list(engine.stream(Request(prompt=[5], max_new_tokens=9)))
    found = [weakref.ref(engine), *recorded]
    del engine
    assert all(x() is None for x in found) and len(found) > 3
