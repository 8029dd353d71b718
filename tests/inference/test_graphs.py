"""Recorded steps: streams and generators give bit-identical results with and without them.

On a CPU a tape replaces the CUDA graph; it reads the memory that existed at recording.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from flash_frac.inference import FracStream, Generator, SamplingSettings, generator, graphs
from flash_frac.inference.graphs import Graph
from flash_frac.models import buffers
from flash_frac.ops.sample import reference
from tests.inference.conftest import assert_same, take
from tests.inference.tape import Tape
from tests.models.conftest import make_model
from tests.models.hybrids import OWN_LOOP, make_kind

# Of KINDS: with shared heads, with a temperature, with rings, and with all mixers.
MIXED = ["attention", "no positions", "sliding", "all"]
DEVICES = {"tape": [], "cuda": [pytest.mark.gpu]}


def made_of(kinds):
    """Models by name in KINDS, None for the paper's, on all devices."""
    return [
        pytest.param((device, kind), id=f"{device}-{kind or 'frac'}", marks=marks)
        for device, marks in DEVICES.items()
        for kind in kinds
    ]


@pytest.fixture(params=made_of([None]))
def model(request, monkeypatch):
    device, kind = request.param
    made = make_model(torch.float32) if kind is None else make_kind(kind, torch.float32)
    # Mixed models go through several sizes of buffers.
    monkeypatch.setattr(buffers, "LEAST_ROOM", 8)
    if device == "cuda":
        # A fixture sets it back; memory that nobody has written stays NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        return made.cuda()
    monkeypatch.setattr(graphs, "Graph", Tape)
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    # As on a GPU: what settings leave out is computed, because a graph serves all settings.
    monkeypatch.setattr(reference, "_may_hold", lambda condition: True)
    return made


def over(*kinds):
    """Run a test for models of these kinds."""
    return pytest.mark.parametrize("model", made_of(kinds), indirect=True)


@pytest.fixture
def recorded(monkeypatch):
    """Graphs that were made since, by weak references."""
    made, make = [], Graph.__init__

    def counted(graph, *arguments, **options):
        make(graph, *arguments, **options)
        made.append(weakref.ref(graph))

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


def by_generator(model, ids):
    """A function that generates (3, 8) tokens after ids, always with the same generator."""
    ids, made = ids.to(model.device), Generator(model)
    return lambda: made.generate(ids, max_new_tokens=8)[:, ids.shape[1] :]


def by_stream(model, ids):
    """The same with a stream that forgets what it has read."""
    stream = FracStream(model, batch_size=3)
    empty = stream.mark()
    return lambda: take(stream.rollback(empty).feed(ids), 8)


both = pytest.mark.parametrize("make", [by_generator, by_stream])


def expected(model, ids):
    ids = ids.to(model.device)
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 8}
    return model.generate(ids, **options, **OWN_LOOP)[:, ids.shape[1] :]


class Flipped(nn.Module):
    """A part that somebody has wrapped."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args).flip(-1)


def replaced_parameter(model):
    projection = model.model.layers[1].mixer.in_proj
    projection.weight = nn.Parameter(0.5 * projection.weight)


def other_data(model):
    projection = model.model.layers[1].mixer.in_proj
    projection.weight.data = 0.5 * projection.weight


def assigned_state(model):
    name = "model.layers.1.mixer.out_proj.weight"
    model.load_state_dict({name: 0.5 * model.state_dict()[name]}, strict=False, assign=True)


def other_order(model):
    layers = model.model.layers
    layers[0].mixer, layers[1].mixer = layers[1].mixer, layers[0].mixer


def more_modules(model):
    """The same tensors, in a module more."""
    model.model.norm = nn.Sequential(model.model.norm, nn.Tanh())


def other_settings(model):
    for layer in model.model.layers:
        layer.mixer.settings = replace(layer.mixer.settings, dt_max=0.1)


def written_in_place(model):
    model.model.layers[1].mixer.in_proj.weight *= 0.5


def other_dtype(model):
    written_in_place(model.to(torch.bfloat16))


def other_dtype_of_a_part(model):
    model.model.norm.to(torch.bfloat16).weight[::2] *= 0.5


def added_hook(model):
    model.model.layers[1].mixer.register_forward_hook(lambda _, __, out: (0.5 * out[0], out[1]))


def global_hook(model):
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: out.flip(-1) if module is model.model.norm else None
    )
    return hook.remove


def other_forward(model):
    norm = model.model.norm
    norm.forward = lambda x: type(norm).forward(norm, x).flip(-1)


def added_wrapper(model):
    model.model.norm = Flipped(model.model.norm)


# What changes, and whether it is recorded again: what was written in place is in the graphs that
# are there, and the last ones run as written.
CHANGES = {
    replaced_parameter: True,
    other_data: True,
    assigned_state: True,
    other_order: True,
    more_modules: True,
    other_settings: True,
    other_dtype: True,
    other_dtype_of_a_part: True,
    written_in_place: False,
    added_hook: False,
    global_hook: False,
    other_forward: False,
    added_wrapper: False,
}


@torch.no_grad()
@both
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes(model, ids, recorded, make, change):
    """Tokens are those of the model as it is now, and it is recorded again where it can be."""
    run = make(model, ids)
    before = [run() for _ in range(3)][-1]
    assert torch.equal(before, expected(model, ids)) and recorded
    del recorded[:]
    undo = change(model)
    try:
        after = expected(model, ids)
        assert not torch.equal(after, before)
        for _ in range(3):
            assert torch.equal(run(), after)
        assert bool(recorded) == CHANGES[change]
    finally:
        if undo:
            undo()


@torch.no_grad()
@both
def test_a_hook_that_goes_again(model, ids, recorded, make):
    run, calls = make(model, ids), []
    before = [run() for _ in range(3)][-1]
    part = model.model.layers[1].mixer.in_proj
    for register in (part.register_forward_hook, part.register_forward_pre_hook):
        hook = register(lambda *_: calls.append(None))
        del recorded[:]
        assert torch.equal(run(), before)
        # The prompt, and every token but the last that was chosen.
        assert len(calls) >= 8 and not recorded
        hook.remove()
        calls.clear()
        for _ in range(3):
            assert torch.equal(run(), before)
        assert recorded and not calls


@torch.no_grad()
@both
def test_adapters(model, ids, recorded, make):
    """Added, switched off and on, merged into the weights, and taken out: never a stale graph."""
    peft = pytest.importorskip("peft")
    run = make(model, ids)
    before = [run() for _ in range(3)][-1]
    config = peft.LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    del recorded[:]
    layers = adapted.base_model
    for step in (
        lambda: None,
        layers.disable_adapter_layers,
        layers.enable_adapter_layers,
        layers.merge_adapter,
        layers.unmerge_adapter,
    ):
        step()
        after = expected(model, ids)
        assert torch.equal(after, before) == (step == layers.disable_adapter_layers)
        for _ in range(3):
            assert torch.equal(run(), after)
    assert not recorded
    layers.merge_and_unload()
    after = expected(model, ids)
    for _ in range(3):
        assert torch.equal(run(), after)
    assert recorded


@torch.no_grad()
@both
def test_the_model_is_looked_at_once_a_call(model, ids, monkeypatch, make):
    """Not for every token, which would take longer than the token."""
    looks, look = [], graphs._bindings
    monkeypatch.setattr(graphs, "_bindings", lambda model: looks.append(None) or look(model))
    run = make(model, ids)
    for _ in range(3):
        run()
    # The stream is fed and generates: two calls.
    assert len(looks) == (3 if make is by_generator else 6)


@torch.no_grad()
@both
def test_autocast(model, ids, recorded, without, make):
    """Not recorded, and not what was recorded without it."""
    run, plain = make(model, ids), make(model, ids)
    before = [run() for _ in range(3)][-1]
    del recorded[:]
    with torch.autocast(model.device.type, torch.bfloat16):
        for _ in range(3):
            assert torch.equal(run(), without(plain))
    assert not recorded
    assert torch.equal(run(), before)


@both
def test_inference_mode(model, ids, recorded, make):
    """Whatever mode a call is made in, the next may be made in another."""
    after = expected(model, ids)
    run = make(model, ids)
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(run(), after)
    assert recorded


@both
def test_the_number_of_graphs_is_bounded(model, ids, recorded, monkeypatch, make):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    after, run = expected(model, ids), make(model, ids)
    for _ in range(4):
        assert torch.equal(run(), after)
    assert len(recorded) > 2
    assert sum(graph() is not None for graph in recorded) == 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}])
@pytest.mark.parametrize("ending", [False, True])
def test_generator(model, ids, recorded, without, sampling, ending):
    """Settings, lengths, masks and batches in turn: all as without graphs."""
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    free = Generator(model).generate(ids, max_new_tokens=10)
    options = {"sampling": SamplingSettings(**sampling), "seed": 3}
    if ending:
        options |= {"eos_token_id": int(free[0, 43]), "pad_token_id": 0}
    calls = [
        {"input_ids": ids, "max_new_tokens": 6},
        {"input_ids": ids, "max_new_tokens": 8, **options},
        {"input_ids": ids[:, :7], "max_new_tokens": 3, **options},
        {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, **options},
        {"input_ids": ids, "max_new_tokens": 10, **options},
    ]
    plain = without(lambda: [Generator(model).generate(**call) for call in calls])
    del recorded[:]
    made = Generator(model)
    for _ in range(3):
        for call, tokens in zip(calls, plain, strict=True):
            assert torch.equal(made.generate(**call), tokens)
    # Prompts of 40 tokens with a mask and without, of 7, and one step for all settings.
    number = len(recorded)
    assert number == 4
    for call, tokens in zip(calls, plain, strict=True):
        assert torch.equal(made.generate(**call), tokens)
    # Nothing is recorded twice as long as the batch stays.
    assert len(recorded) == number
    assert torch.equal(made.generate(ids[:1], max_new_tokens=10), free[:1])


@over(*MIXED)
def test_generator_of_mixed_models(model, ids, recorded, without, monkeypatch):
    """Prompts in pieces, padded and not, and buffers that grow: all as without graphs."""
    monkeypatch.setattr(generator, "PIECE", 32)
    ids = ids.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :17], mask[2, :39] = 0, 0
    calls = [
        {"input_ids": ids, "max_new_tokens": 3},
        {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 3},
        {"input_ids": ids, "max_new_tokens": 10},
    ]
    plain = without(lambda: [Generator(model).generate(**call) for call in calls])
    del recorded[:]
    made, numbers = Generator(model), []
    for _ in range(3):
        for call, tokens in zip(calls, plain, strict=True):
            assert torch.equal(made.generate(**call), tokens)
        numbers.append(len(recorded))
    # Two pieces of prompts, with a mask and without, and one step for all lengths.
    assert numbers[0] < numbers[1] == numbers[2]
    assert sum(graph() is not None for graph in recorded) == 5


def test_long_prompts_are_not_recorded(model, ids, recorded, monkeypatch):
    monkeypatch.setattr(generator, "LONGEST_RECORDED", 20)
    made = Generator(model)
    for _ in range(3):
        made.prefill(ids.to(model.device))
    assert not recorded
    for _ in range(3):
        made.prefill(ids[:, :20].to(model.device))
    assert len(recorded) == 1


def test_a_model_that_changes_while_tokens_come(model, ids, recorded):
    """The weight of the head is looked at for every token."""
    ids = ids.to(model.device)
    whole = Generator(model).generate(ids, max_new_tokens=12)[:, ids.shape[1] :]
    tokens = Generator(model).stream(ids, max_new_tokens=12)
    got = [next(tokens) for _ in range(6)]
    number = len(recorded)
    model.lm_head.weight.data = 1 * model.lm_head.weight.data
    got += list(tokens)
    assert torch.equal(torch.stack(got, 1), whole)
    assert len(recorded) == number + 1


def test_nothing_outlives_the_generator(model, ids, recorded):
    made = Generator(model)
    for _ in range(3):
        made.generate(ids.to(model.device), max_new_tokens=5)
    cache = weakref.ref(made._slots.cache)
    made.generate(ids[:1].to(model.device), max_new_tokens=5)
    assert cache() is None and [graph() is None for graph in recorded] == [True, True, False]
    gc.disable()
    try:
        del made
        assert all(graph() is None for graph in recorded)
    finally:
        gc.enable()


@over(None, "all")
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "seed": 1}])
def test_generate(model, ids, recorded, without, monkeypatch, options):
    monkeypatch.setattr(buffers, "LEAST_ROOM", 256)
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


@over(None, *MIXED)
def test_all_ways_through(model, ids, without, tmp_path):
    one = list(moments(FracStream(model, batch_size=3), ids, tmp_path / "one"))
    stream = FracStream(model, batch_size=3)
    other = without(lambda: list(moments(stream, ids, tmp_path / "other")))
    assert len(one) == 7
    for mine, theirs in zip(one, other, strict=True):
        assert_same(mine, theirs)


@over(None, "attention")
def test_sequences_that_end(model, ids, recorded, without, monkeypatch):
    """Those that go on are read with a mask, recorded for itself."""
    monkeypatch.setattr(buffers, "LEAST_ROOM", 256)
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


@over(None, "all")
@pytest.mark.parametrize(
    ("error", "done", "number"),
    [(KeyboardInterrupt, False, 2), (KeyboardInterrupt, True, 3), (MemoryError, True, 6)],
)
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

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(graphs.Graph, "_record", fail)
        with pytest.raises(MemoryError):
            take(stream, 12)
    assert stream.num_tokens > 40
    without(take, other, stream.num_tokens - 40)
    assert_same(stream, other)
    assert torch.equal(take(stream, 6), without(take, other, 6))


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


@both
def test_models_that_are_not_recorded(ids, recorded, monkeypatch, make):
    """On a CPU, with tensors of other kinds, with positions that depend on the length."""

    class Kind(nn.Parameter):
        pass

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    hybrid = make_model(attention_layers=[1], attention_rope_parameters=rope)
    plain, kind = make_model(), make_model()
    kind.model.norm.weight.__class__ = Kind
    runs = [make(plain, ids)]
    monkeypatch.setattr(graphs, "Graph", Tape)
    for _ in range(3):
        runs[0]()
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    for model in (hybrid, kind):
        run = make(model, ids)
        for _ in range(3):
            assert torch.equal(run(), expected(model, ids))
    assert not recorded
