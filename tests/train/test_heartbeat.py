"""Signs of life: silent ranks are named, and waiting for a busy one has no end.

The clock is not real: a pause moves it on.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from flash_frac.train import heartbeat
from flash_frac.train.heartbeat import Heartbeat
from flash_frac.train.parallel import LostRankError

TIMEOUT = 1800


class Clock:
    """Stands for the module time; `events` are functions to call at each pause."""

    def __init__(self):
        self.now, self.events = 1e6, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += 100
        for event in self.events:
            event()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(heartbeat.socket, "gethostname", lambda: "here")
    return clock


@pytest.fixture
def said(monkeypatch):
    said = []
    monkeypatch.setattr(heartbeat.logger, "warning", said.append)
    return said


def rank_of(store, rank, count=2, per_node=8):
    place = {"process_index": rank, "local_process_index": rank % per_node, "world_size": count}
    return Heartbeat(store, SimpleNamespace(**place, ddp_timeout=TIMEOUT))


def beat(store, rank, number=1):
    store.add(f"beats/{rank}", number)


def test_tokenising_may_take_longer_than_the_timeout(clock):
    store = dist.HashStore()
    work, began = rank_of(store, 1).in_turn, clock.now

    def tokenise():
        beat(store, 0)
        if clock.now - began > 10 * TIMEOUT:
            store.set("done/0", "")
            store.set("done/all", "")

    clock.events.append(tokenise)
    assert work(lambda: "tokens") == "tokens" and clock.now - began > 10 * TIMEOUT


@pytest.mark.parametrize(("ended", "state"), [(False, "been silent for 1900 s"), (True, "ended")])
def test_a_rank_that_dies_while_others_wait_is_named(clock, ended, state):
    store = dist.HashStore()
    rank_of(store, 0)
    if ended:
        clock.events.append(lambda: beat(store, 0, heartbeat._GONE))
    with pytest.raises(LostRankError, match=f"rank 0 on here has {state} while other ranks"):
        rank_of(store, 1).in_turn(lambda: None)


def test_the_first_of_each_node_follows_the_first_of_all():
    """With a cache that nodes share it finds the tokens; with its own it makes them once."""
    store, order = dist.HashStore(), []
    ranks = [rank_of(store, rank, count=6, per_node=2) for rank in range(6)]
    with ThreadPoolExecutor(6) as pool:
        # The last begin first.
        for rank in reversed(range(6)):
            pool.submit(ranks[rank].in_turn, partial(order.append, rank))
    assert sorted(order) == list(range(6)) and order[0] == 0
    assert order.index(2) < order.index(3) and order.index(4) < order.index(5)


def test_an_error_lets_the_others_find_it_too(clock):
    store = dist.HashStore()
    with pytest.raises(ValueError, match="line 3"):
        rank_of(store, 0).in_turn(lambda: int("line 3"))
    with pytest.raises(ValueError, match="line 3"):
        rank_of(store, 1).in_turn(lambda: int("line 3"))


def test_a_silent_rank_is_named_once(clock, said):
    store = dist.HashStore()
    ranks = [rank_of(store, rank, count=4) for rank in range(4)]
    for number in range(20):
        for rank in (0, 1, *((2, 3) if number < 5 else ())):
            beat(store, rank)
            ranks[rank].look(store)
        clock.now += 10
    assert said == [f"rank {rank} on here has been silent for 60 s" for rank in (2, 3)]


def test_a_rank_that_was_frozen_itself_names_nobody(clock, said):
    store = dist.HashStore()
    one = rank_of(store, 0)
    one.look(store)
    clock.now += 1000
    one.look(store)
    beat(store, 1)
    one.look(store)
    assert not said


def test_a_rank_that_has_left_is_not_watched(clock, said):
    store = dist.HashStore()
    ranks = [rank_of(store, rank, count=3) for rank in range(3)]
    beat(store, 1, heartbeat._GONE)
    for _ in range(9):
        ranks[0].look(store)
        clock.now += 10
    assert said == ["rank 2 on here has been silent for 60 s"]
