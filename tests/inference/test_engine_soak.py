"""The engine after thousands of requests: as it was, and every answer right."""

import gc
import random
import time
from pathlib import Path

import pytest

from flash_frac.inference import Engine, PrefixStates, QueueFull
from flash_frac.inference.scheduling import Job
from tests.inference.engines import expected, make, random_requests

MIB = 2**20


def resident():
    """Bytes of memory that the process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


class Clients:
    """Ask an engine that runs in its own thread, cancel some, leave some, and check the rest."""

    def __init__(self, model, engine):
        self.engine, self.rng = engine, random.Random(0)
        self.pool = random_requests(40, longest=30)
        self.right = [expected(model, request) for request in self.pool]
        # Written by one thread each: the engine's, and that of the clients.
        self.wrong, self.checked, self.left = [], 0, 0

    def ask(self, num):
        for _ in range(num):
            number = self.rng.randrange(len(self.pool))
            if self.rng.random() < 0.01:
                # Somebody who does not wait for the end.
                stream = self.submit(lambda n=number: self.engine.stream(self.pool[n]))
                update = next(stream)
                assert update.tokens == (self.right[number][0],)
                stream.close()
                self.left += 1
                continue
            take = self.taker(number)
            id = self.submit(lambda n=number, take=take: self.engine.submit(self.pool[n], take))
            if self.rng.random() < 0.1:
                self.engine.cancel(id)

    def submit(self, call):
        while True:
            try:
                return call()
            except QueueFull:
                time.sleep(0.001)

    def taker(self, number):
        tokens = []

        def take(update):
            tokens.extend(update.tokens)
            whole = update.finished == "length"
            if tokens != self.right[number][: None if whole else len(tokens)]:
                self.wrong.append(number)
            self.checked += whole

        return take

    def wait(self):
        while self.engine._has_work():
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("kind", "num"),
    [(None, 1000), ("all", 500), pytest.param(None, 10_000, marks=pytest.mark.soak)],
)
def test_many_requests(kind, num):
    """Random lengths, cancels and disconnects: memory and slots at the end as at the start."""
    model = make(kind)
    prefixes = PrefixStates(device_bytes=MIB // 4, spacing=8)
    engine = Engine(model, slots=32, max_length=64, max_waiting=64, piece=256, prefixes=prefixes)
    with engine:
        clients = Clients(model, engine)
        clients.ask(num // 2)
        clients.wait()
        before, bytes_before = resident(), engine.stats().nbytes
        clients.ask(num // 2)
        clients.wait()
        after = resident()
    stats = engine.stats()
    assert engine.failed is None and (stats.running, stats.reading, stats.waiting) == (0, 0, 0)
    assert sum(stats.finished.values()) == num and stats.finished["error"] == 0
    assert not clients.wrong and clients.checked > 0.7 * num
    assert stats.finished["cancelled"] > 0.02 * num and clients.left > 0
    # Those who have left may have got their last token meanwhile.
    assert 0 <= stats.finished["length"] - clients.checked <= clients.left
    assert stats.nbytes == bytes_before and stats.prefixes.device_bytes <= MIB // 4
    # Half a kilobyte for each request would show.
    assert after - before < max(2 * MIB, 512 * num // 2)
    assert not any(type(x) is Job for x in gc.get_objects())
