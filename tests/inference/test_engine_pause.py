"""A paused engine runs no step; afterwards requests go on, and weights may have changed."""

import threading
import time

import pytest
import torch

from flash_frac.inference import Engine, EngineStopped, PrefixStates, Request
from tests.inference.engines import answers, expected, make, random_requests

LONG = Request(prompt=[5, 6, 7], max_new_tokens=10**6)


@pytest.fixture
def model():
    return make(None)


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@torch.no_grad()
def change(model):
    for weight in model.parameters():
        weight.add_(0.05 * torch.randn_like(weight))


def test_no_step_runs_inside(model):
    """From several threads at once; the engine goes on when the last has left."""
    engine = Engine(model, slots=2).start()
    engine.submit(LONG)
    wait_until(lambda: engine.stats().steps)
    entered, leave = threading.Barrier(3, timeout=30), threading.Event()

    def hold():
        with engine.pause():
            entered.wait()
            leave.wait(30)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    with engine.pause():
        leave.set()
        for thread in threads:
            thread.join(30)
        steps = engine.stats().steps
        time.sleep(0.05)
        assert engine.stats().steps == steps
    wait_until(lambda: engine.stats().steps > steps + 3)
    engine.stop(drain=False)


def test_requests_go_on(model):
    """With the tokens that they would have had; new ones wait."""
    requests = random_requests(9)
    engine, updates, ids = Engine(model, slots=4, piece=16).start(), [], []
    for request in requests:
        with engine.pause():
            ids.append(engine.submit(request, updates.append))
    engine.stop()
    found = answers(updates)
    assert [found[id] for id in ids] == [expected(model, request) for request in requests]


def test_changed_weights(model):
    """Later requests have those alone; states of requests that saw both are not kept."""
    prefixes = PrefixStates(device_bytes=2**24, spacing=8)
    request = Request(prompt=[*range(3, 43)], max_new_tokens=12)
    with Engine(model, slots=2, piece=8, prefixes=prefixes) as engine:
        updates = engine.stream(request)
        old = next(updates).tokens
        with engine.pause():
            change(model)
        mixed = [*old, *(token for update in updates for token in update.tokens)]
        assert len(mixed) == 12 and mixed != expected(model, request)
        # The next turn begins with everything that the request has read.
        turn = Request(prompt=[*request.prompt, *mixed, 44], max_new_tokens=12)
        for num_cached in (0, len(turn.prompt)):
            updates = list(engine.stream(turn))
            assert [x for update in updates for x in update.tokens] == expected(model, turn)
            assert updates[-1].num_cached == num_cached


def test_without_a_thread(model):
    engine = Engine(model, slots=1)
    engine.submit(LONG)
    engine.step()
    with engine.pause():
        for call in (engine.step, engine.stop):
            with pytest.raises(RuntimeError, match=r"leave the block of pause\(\) first"):
                call()
    assert engine.step()


def test_pauses_that_would_never_begin_or_end(model):
    engine = Engine(model, slots=1).start()
    with engine.pause():
        for call in (engine.stop, lambda: list(engine.stream(LONG))):
            with pytest.raises(RuntimeError, match="leave the block"):
                call()
    failed = []

    def pause(update):
        try:
            with engine.pause():
                pass
        except RuntimeError as error:
            failed.append(str(error))

    engine.submit(Request(prompt=[5], max_new_tokens=1), pause)
    engine.stop()
    assert failed == ["pause() would wait for itself; do not call it in on_update"]


def test_an_engine_that_failed(model, monkeypatch):
    engine = Engine(model, slots=1)
    monkeypatch.setattr(engine._runner, "launch", lambda: 1 / 0)
    engine.submit(LONG)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(EngineStopped, match="the engine has failed"), engine.pause():
        pass
