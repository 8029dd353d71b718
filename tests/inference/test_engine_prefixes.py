"""The engine with a prefix cache: shared prefixes are not read again, and tokens do not change."""

import pytest
import torch

from flash_frac.inference import Engine, PrefixStates, Request
from flash_frac.inference.prefixes import levels, snapshots
from flash_frac.inference.server import serving
from tests.inference.engines import ALL_KINDS, answers, expected, make, random_requests

SYSTEM = [*range(3, 30)]


def ask(engine, *requests):
    """Answers, and how many tokens of prompts were read for them."""
    before = engine.stats().prompt_tokens
    ids = [engine.submit(request) for request in requests]
    found = answers(engine.run_until_idle())
    return [found[id] for id in ids], engine.stats().prompt_tokens - before


def make_engine(model, **options):
    prefixes = PrefixStates(device_bytes=2**24, spacing=None)
    return Engine(model, slots=4, max_length=128, piece=16, prefixes=prefixes, **options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_only_new_tokens_are_read(kind, late):
    """A system prompt, the next turn of a chat, and the same prompt again."""
    model = make(kind)
    engine = make_engine(model, late=late)
    first = Request(prompt=[*SYSTEM, 40, 41], max_new_tokens=9, boundaries=[len(SYSTEM)])
    (answer,), num_read = ask(engine, first)
    assert answer == expected(model, first) and num_read == len(first.prompt)
    # Another question after the same system prompt.
    other = Request(prompt=[*SYSTEM, 50, 51, 52], max_new_tokens=9)
    assert ask(engine, other) == ([expected(model, other)], 3)
    # The next turn: all of the answer but its last token has been read.
    turn = Request(prompt=[*first.prompt, *answer, 33, 34], max_new_tokens=9)
    assert ask(engine, turn) == ([expected(model, turn)], 2 if late else 3)
    # The same again, of which the logits are known.
    assert ask(engine, first) == ([answer], 0)
    assert engine.stats().prefixes.hits == 3


@pytest.mark.parametrize("kind", [None, "all"])
def test_prompts_that_share_beginnings(kind):
    """Many at once, in pieces that end at branches and boundaries: tokens of `generate`."""
    model = make(kind)
    prefixes = PrefixStates(device_bytes=2**24, spacing=5)
    engine = Engine(model, slots=4, max_length=128, piece=16, prefixes=prefixes)
    tails = random_requests(20, longest=12)
    requests = [
        Request(
            prompt=[*SYSTEM[: 7 * (n % 4)], *x.prompt],
            max_new_tokens=x.max_new_tokens,
            boundaries=[7 * (n % 4)],
        )
        for n, x in enumerate(tails)
    ]
    found, num_read = ask(engine, *requests)
    assert found == [expected(model, x) for x in requests]
    assert num_read < sum(len(x.prompt) for x in requests)
    again, num_read = ask(engine, *requests)
    assert again == found and num_read == 0


def test_little_room(model):
    """States that do not fit are not kept, and nothing else changes."""
    model = model.float()
    engine = Engine(model, slots=2, prefixes=PrefixStates(device_bytes=100))
    request = Request(prompt=SYSTEM, max_new_tokens=5)
    for _ in range(2):
        assert ask(engine, request) == ([expected(model, request)], len(SYSTEM))
    assert engine.stats().prefixes.refused > 0


@pytest.mark.parametrize("kind", [None, "all"])
def test_memory_runs_out(kind, monkeypatch):
    """States are not kept while there is no memory, and requests go on."""
    model = make(kind)
    engine, request = make_engine(model), Request(prompt=SYSTEM, max_new_tokens=5)
    with monkeypatch.context() as patch:

        def fail(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(snapshots, "new_memory", fail)
        for _ in range(2):
            assert ask(engine, request) == ([expected(model, request)], len(SYSTEM))
    assert engine.stats().prefixes.refused > 0
    for num_read in (len(SYSTEM), 0):
        assert ask(engine, request) == ([expected(model, request)], num_read)
    monkeypatch.setattr(levels, "free_bytes", lambda device: 0)
    with pytest.raises(ValueError, match=r"device_bytes .* must be at most 0.00 GiB"):
        make_engine(model)


@pytest.mark.parametrize("late", [False, True])
def test_one_new_token(model, late):
    """Read late, it is found two steps after its end: that state is not kept."""
    engine = make_engine(model.float(), late=late)
    request = Request(prompt=SYSTEM, max_new_tokens=1)
    (answer,), _ = ask(engine, request)
    turn = Request(prompt=[*SYSTEM, *answer, 33], max_new_tokens=5)
    assert ask(engine, turn) == ([expected(model, turn)], 2 if late else 1)


def test_a_folder_of_a_server_needs_a_budget(model, tmp_path):
    """Without any budget there is no prefix cache, and the folder would be ignored."""
    options = serving.ServerOptions(prefix_device_gib=0, prefix_folder=tmp_path)
    with pytest.raises(ValueError, match=r"\(--prefix-disk-gib\) and folder .* got 0 and"):
        serving.make_engine(model, None, options)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["parameters", "buffers"])
def test_changed_weights_drop_states(kind):
    """In place, as training does; states of the old weights would give other tokens."""
    model = make(None)
    engine, request = make_engine(model), Request(prompt=SYSTEM, max_new_tokens=9)
    ask(engine, request)
    for weight in getattr(model, kind)():
        weight.add_(0.05 * torch.randn_like(weight))
    assert ask(engine, request) == ([expected(model, request)], len(SYSTEM))
    assert ask(engine, request) == ([expected(model, request)], 0)
