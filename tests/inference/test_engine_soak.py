"""The engine after thousands of requests: back in its initial state, and every answer right."""

import asyncio
import gc
import json
import random
import time
from pathlib import Path

import pytest

from flash_frac.inference import Engine, PrefixStates, QueueFull
from flash_frac.inference.sampling import GREEDY
from flash_frac.inference.scheduling import Job
from tests.inference.engines import expected, make, random_requests
from tests.inference.servers import letters_tokenizer
from tests.inference.test_server_app import TEXT

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
        self.pool = random_requests(40, longest=30, most_new=10)
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
    [(None, 1000), ("all", 500), pytest.param(None, 10_000, marks=pytest.mark.slow)],
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


class HttpClients:
    """Ask the application of a server; some leave in the middle of their answer."""

    def __init__(self, model, app):
        self.app, self.rng = app, random.Random(0)
        self.pool = random_requests(10, longest=20, most_new=6)
        decode = letters_tokenizer().decode
        self.right = [decode(expected(model, x), skip_special_tokens=True) for x in self.pool]
        self.wrong, self.whole, self.left = [], 0, 0

    async def ask(self):
        number, stream = self.rng.randrange(len(self.pool)), self.rng.random() < 0.5
        leaves = self.rng.random() < 0.2
        request, events, gone = self.pool[number], [], asyncio.Event()
        fields = {"prompt": request.prompt, "max_tokens": request.max_new_tokens, "stream": stream}
        # Long enough to be left, whatever the order of threads.
        fields |= {"temperature": 0} | ({"max_tokens": 10**5, "stream": True} if leaves else {})
        asked = [{"type": "http.request", "body": json.dumps(fields).encode()}]

        async def receive():
            if not asked:
                await gone.wait()
                return {"type": "http.disconnect"}
            return asked.pop()

        async def send(message):
            events.append(message)
            if leaves and len(events) == 2:
                gone.set()

        scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [], "query_string": b""}
        await self.app(scope, receive, send)
        assert events[0]["status"] == 200
        self.left += leaves
        if not leaves:
            self.whole += 1
            body = b"".join(event["body"] for event in events[1:]).decode()
            if text_of(body, stream) != self.right[number]:
                self.wrong.append(number)

    async def ask_many(self, num, at_once):
        free = asyncio.Semaphore(at_once)

        async def one():
            async with free:
                await self.ask()

        await asyncio.gather(*(one() for _ in range(num)))
        # Nobody waits for a client that has left.
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1


def text_of(body, stream):
    lines = [x.removeprefix("data: ") for x in body.split("\n") if x.startswith("data: {")]
    parts = [json.loads(x) for x in (lines if stream else [body])]
    return "".join(part["choices"][0]["text"] for part in parts)


def test_many_requests_over_http():
    """Whole answers, streams and disconnects: slots and open answers at the end as at the start."""
    pytest.importorskip("starlette", reason="pip install 'flash-frac[serve]'")
    from flash_frac.inference.server.answers import Answer
    from flash_frac.inference.server.app import Service, build_app
    from flash_frac.inference.server.prompts import Defaults

    model, tokenizer = make(None), letters_tokenizer()
    with Engine(model, slots=8, tokenizer=tokenizer) as engine:
        service = Service("tiny", engine, tokenizer, Defaults(GREEDY, (), 8, None))
        clients = HttpClients(model, build_app(service, on_end=engine.stop))
        asyncio.run(clients.ask_many(200, at_once=24))
    stats = engine.stats()
    assert engine.failed is None and (stats.running, stats.reading, stats.waiting) == (0, 0, 0)
    assert not clients.wrong and clients.whole + clients.left == 200 and clients.left > 20
    assert stats.finished["length"] == clients.whole
    assert stats.finished["cancelled"] == clients.left and not service.answers._updates
    gc.collect()
    assert not any(type(x) in (Answer, Job) for x in gc.get_objects())
