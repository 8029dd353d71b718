"""Recorded steps: with them a stream is, to the bit, what it is without.

On a CPU a graph is a call that is kept, with inputs and output at fixed places as in CUDA's.
"""

import weakref

import pytest
import torch

from flash_frac.inference import FracStream, graphs
from flash_frac.inference.graphs import Graph
from tests.inference.conftest import assert_same, take
from tests.models.conftest import make_model


class KeptCall(Graph):
    """Records by running once, of which nothing is left but garbage."""

    def _record(self, function):
        self.function = function
        with torch.inference_mode(False):
            return function(*self._inputs).fill_(torch.nan)

    def _replay(self):
        self._output.copy_(self.function(*self._inputs))


@pytest.fixture(params=["kept call", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request, monkeypatch):
    if request.param == "cuda":
        # A fixture sets it back; memory that nobody has written stays NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        return make_model(torch.float32).cuda()
    monkeypatch.setattr(graphs, "Graph", KeptCall)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    return make_model()


@pytest.fixture
def recorded(monkeypatch):
    """Graphs that were made since, by weak references."""
    made, make = [], Graph.__init__

    def counted(graph, *arguments):
        made.append(weakref.ref(graph))
        make(graph, *arguments)

    monkeypatch.setattr(Graph, "__init__", counted)
    return made


@pytest.fixture
def without(monkeypatch):
    """Runs a function while nothing is recorded."""

    def run(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "DEVICES", ())
            return function(*arguments, **options)

    return run


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "seed": 1}])
def test_generate(model, ids, recorded, without, options):
    stream = FracStream(model, batch_size=3).feed(ids)
    other = stream.fork()
    expected = without(take, other, 12, **options)
    assert not recorded
    assert torch.equal(take(stream, 12, **options), expected)
    assert_same(stream, other)
    # There and back, whatever comes between two calls.
    assert len(recorded) == 2
    assert torch.equal(take(stream.feed(ids), 5), without(take, other.feed(ids), 5))
    assert len(recorded) == 2
    assert_same(stream, other)


def test_tokens_one_by_one(model, ids, recorded, without):
    def feed(stream):
        for token in ids[0]:
            stream.feed(token[None])
        return stream

    assert_same(feed(FracStream(model)), without(feed, FracStream(model)))
    assert len(recorded) == 2


def moments(stream, ids, path):
    """Copies of a stream on its way through all that changes it."""
    yield stream.feed(ids).fork()
    take(stream, 6)
    mark = stream.mark()
    logits, kept = stream.logits, stream.logits.clone()
    fork = stream.fork()
    take(stream, 7)
    # What was given away is not written to.
    assert torch.equal(logits, kept) and torch.equal(mark.logits, kept)
    yield stream.fork()
    yield stream.rollback(mark).fork()
    take(stream, 3)
    yield stream.advance(2.5).fork()
    take(stream.feed(ids[:, :1]), 4)
    yield stream.rollback().fork()
    take(fork, 5)
    yield fork.rollback(mark)
    take(stream, 4)
    stream.save(path)
    loaded = FracStream.load(path, stream.model)
    take(loaded, 4)
    yield FracStream.cat([loaded, stream.select([2, 0])])


def test_all_ways_through(model, ids, without, tmp_path):
    one = list(moments(FracStream(model, batch_size=3), ids, tmp_path / "one"))
    stream = FracStream(model, batch_size=3)
    other = without(lambda: list(moments(stream, ids, tmp_path / "other")))
    assert len(one) == 7
    for mine, theirs in zip(one, other, strict=True):
        assert_same(mine, theirs)


def test_sequences_that_end(model, ids, recorded, without):
    """Those that go on are read with a mask, recorded for itself."""
    stream = FracStream(model, batch_size=3).feed(ids)
    other = stream.fork()
    free = take(stream.fork(), 20)
    eos = int(free[0, 5])
    del recorded[:]
    expected = without(take, other, 20, eos=eos)
    assert torch.equal(take(stream, 20, eos=eos), expected)
    assert len(set(stream.lengths)) > 1 and len(recorded) == 4
    assert_same(stream, other)
    for part in ([[5], [], [6]], [[], [7], []], [[5], [6], [7]]):
        assert_same(stream.feed(part), without(other.feed, part))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("number", [2, 3, 6])
def test_interrupted(model, ids, without, monkeypatch, error, done, number):
    """In a recorded step, before its work or after it: the token was not read."""
    stream, call = FracStream(model).feed(ids[0]), Graph.__call__
    other = stream.fork()
    expected = without(take, other.fork(), 12)

    def interrupted(graph, *inputs):
        if stream.num_tokens < 40 + number:
            return call(graph, *inputs)
        if done:
            call(graph, *inputs)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "__call__", interrupted)
        with pytest.raises(error):
            take(stream, 12)
    without(take, other, number)
    assert_same(stream, other)
    assert torch.equal(take(stream, 12 - number), expected[:, number:])


def test_a_recording_that_fails(model, ids, without, monkeypatch):
    stream = FracStream(model).feed(ids[0])
    other = stream.fork()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "copy_states", fail)
        with pytest.raises(MemoryError):
            take(stream, 12)
    assert stream.num_tokens > 40
    without(take, other, stream.num_tokens - 40)
    assert_same(stream, other)
    assert torch.equal(take(stream, 6), without(take, other, 6))


@torch.no_grad()
def test_weights_that_change(model, ids, recorded, without):
    stream = FracStream(model).feed(ids[0])
    other = stream.fork()

    def assert_equal_steps(number):
        del recorded[:]
        assert torch.equal(take(stream, 6), without(take, other, 6))
        assert_same(stream, other)
        assert len(recorded) == number

    assert_equal_steps(2)
    projection = model.model.layers[1].mixer.in_proj
    projection.weight *= 1.5
    assert_equal_steps(0)
    projection.weight = torch.nn.Parameter(projection.weight * 0.5)
    assert_equal_steps(2)
    calls = []
    hook = projection.register_forward_hook(lambda *_: calls.append(None))
    assert_equal_steps(0)
    assert len(calls) == 12
    hook.remove()
    assert_equal_steps(2)
    # In the middle of a loop, too.
    tokens = stream.generate(eos=False)
    expected = without(take, other, 8)
    got = [next(tokens) for _ in range(4)]
    model.lm_head.weight.data = model.lm_head.weight.clone()
    got += [next(tokens) for _ in range(4)]
    assert torch.equal(torch.stack(got, 1), expected) and len(recorded) == 4
    with torch.autocast(model.device.type, torch.bfloat16):
        assert_equal_steps(0)
        take(stream.fork(), 6)
    assert not recorded


def test_the_mode_of_the_model(model, ids, recorded):
    """Training or not, with gradients or without: recorded once, for evaluation."""
    expected = take(FracStream(model).feed(ids[0]), 12)
    stream = FracStream(model).feed(ids[0, :9]).feed(ids[0, 9:])
    del recorded[:]
    got = []
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            got.append(take(stream, 4))
        model.train()
    assert torch.equal(torch.cat(got, 1), expected) and len(recorded) == 2
    assert all(module.training for module in model.modules())
    assert not stream.logits.requires_grad


def test_nothing_outlives_the_stream(model, ids, recorded):
    stream = FracStream(model).feed(ids[0])
    take(stream, 5)
    caches = [weakref.ref(x) for x in (stream._now.cache, stream._spare)]
    # Other memory, as after an interrupt: the old one goes with its graphs at the next step.
    stream._spare = None
    take(stream, 3)
    assert [x() is None for x in caches].count(True) == 1
    assert [x() is None for x in recorded] == [True, True, False, False]
    del stream
    assert all(x() is None for x in (*caches, *recorded))


def test_models_that_are_not_recorded(ids, recorded, monkeypatch):
    take(FracStream(make_model()).feed(ids[0]), 5)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    take(FracStream(make_model(attention_layers=[1])).feed(ids[0]), 5)
    assert not recorded
