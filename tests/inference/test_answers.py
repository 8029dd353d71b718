"""Between the engine's thread and an event loop: nothing is lost, and events are few."""

import asyncio
import threading
import time
from unittest import mock

import pytest

from flash_frac.inference.scheduling import Request, Update
from flash_frac.inference.server import answers as module
from flash_frac.inference.server.answers import Answers
from flash_frac.inference.server.metrics import Metrics

REQUEST = Request(prompt=[1], max_new_tokens=2000)


class FakeEngine:
    """Gives every request its tokens from a thread, as fast as it can."""

    def __init__(self, num_tokens):
        self.num_tokens, self.asked, self.cancelled = num_tokens, [], []

    def submit(self, request, on_update):
        self.asked.append(on_update)
        return len(self.asked) - 1

    def cancel(self, id):
        self.cancelled.append(id)

    def run(self):
        for n in range(self.num_tokens):
            finished = "length" if n == self.num_tokens - 1 else None
            for id, on_update in enumerate(self.asked):
                on_update(Update(id, (n,), finished=finished))


async def read(answers, barrier):
    """All tokens of an answer, and how often some came."""
    async with answers.ask(REQUEST) as answer:
        barrier.release()
        found, times = [], 0
        async for tokens, _, _ in answer.parts():
            found += tokens
            times += 1
    return found, times


@pytest.mark.parametrize("clients", [1, 40])
def test_nothing_is_lost_and_a_loop_that_is_late_takes_more_at_once(clients):
    engine, metrics = FakeEngine(2000), Metrics()

    async def main():
        answers, ready = Answers(engine, metrics), threading.Semaphore(0)
        tasks = [asyncio.create_task(read(answers, ready)) for _ in range(clients)]
        while len(engine.asked) < clients:
            await asyncio.sleep(0)
        thread = threading.Thread(target=engine.run)
        thread.start()
        results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        thread.join()
        return results

    results = asyncio.run(main())
    for found, times in results:
        assert found == list(range(2000)) and times < 2000
    assert engine.cancelled == []
    # Tokens that are taken together count once, as do events.
    assert sum(metrics.first.counts) == clients
    assert sum(metrics.between.counts) >= sum(times for _, times in results) - clients
    assert sum(metrics.between.counts) < 1999 * clients


@pytest.mark.parametrize("first", [(), (1,)], ids=["before the first part", "after it"])
def test_an_answer_that_ends_while_a_client_is_slow_is_whole(first):
    engine, rest = FakeEngine(1), Update(0, (2, 3), (-0.5, -0.25), finished="length")

    async def main():
        found = []
        async with Answers(engine, Metrics()).ask(REQUEST) as answer:
            engine.asked[0](Update(0, first, first) if first else rest)
            await asyncio.sleep(0.01)
            async for tokens, logprobs, _ in answer.parts():
                found += zip(tokens, logprobs, strict=True)
                if answer.finished is None:
                    engine.asked[0](rest)
                    while answer.finished is None:
                        await asyncio.sleep(0)
        return found

    known = [(n, n) for n in first]
    assert asyncio.run(main()) == [*known, (2, -0.5), (3, -0.25)]


def test_the_loop_looks_less_often_for_many_clients(monkeypatch):
    monkeypatch.setattr(module, "SECONDS_PER_EVENT", 0.05)
    engine = FakeEngine(1)

    async def main():
        answers = Answers(engine, Metrics())
        async with answers.ask(REQUEST) as answer:
            times = []
            for n in range(3):
                engine.asked[0](Update(0, (n,)))
                await answer.wait()
                times.append(time.monotonic())
            return times

    first, second, third = asyncio.run(main())
    # One client, of whose events the loop may have half the time.
    assert second - first > 0.09 and third - second > 0.09


def test_only_events_make_the_loop_look_later():
    """Neither a request that waits nor one that is answered whole slows a stream down."""
    engine = FakeEngine(1)

    async def main():
        answers, loop = Answers(engine, Metrics()), asyncio.get_running_loop()
        asked = [answers.ask(REQUEST, streams=n < 5) for n in range(1000)]
        opened = [await one.__aenter__() for one in asked]
        pauses = []
        for clients in ([0, 0], [0, 1, 2], [4, 999]):
            for client in clients:
                engine.asked[client](Update(client, (7,)))
            with mock.patch.object(loop, "time", return_value=100.0):
                answers._take(loop)
            pauses.append(answers._next_look - 100.0)
        # A handler of a whole answer is woken once, at its end.
        assert opened[0]._news.is_set() and not opened[999]._news.is_set()
        engine.asked[999](Update(999, finished="length"))
        await asyncio.wait_for(opened[999].wait_for_end(), 20)
        return pauses

    one = module.SECONDS_PER_EVENT / module.LOOP_SHARE
    assert asyncio.run(main()) == pytest.approx([one, 3 * one, one])


def test_leaving_early_cancels():
    engine = FakeEngine(1)

    async def main():
        answers = Answers(engine, Metrics())
        async with answers.ask(REQUEST) as answer:
            answer.leave()
            await answer.wait_for_end()
            assert answer.finished == "gone"

    asyncio.run(main())
    assert engine.cancelled == [0]
