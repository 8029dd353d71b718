"""The engine returns the tokens of `generate`, whatever else is running."""

import threading

import pytest
import torch

from flash_frac.data.tokenizer import byte_tokenizer
from flash_frac.inference import Engine, EngineStopped, QueueFull, Request, SamplingSettings
from flash_frac.inference.scheduling import Job, next_piece
from tests.inference.engines import (
    ALL_KINDS,
    answers,
    expected,
    make,
    random_requests,
    run_at_random,
)
from tests.models.conftest import make_model


@pytest.fixture
def model():
    return make(None)


@pytest.fixture
def engine(model):
    return Engine(model, slots=4, piece=16)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_tokens_are_those_of_generate(kind, late):
    """With neighbours that come and go, prompts in pieces and side by side, and ends."""
    model = make(kind)
    requests = random_requests(18, eos_token_ids=(7, 9, 21, 33))
    engine = Engine(model, slots=6, max_length=64, piece=16, late=late)
    found = run_at_random(engine, requests)
    assert found == [expected(model, request) for request in requests]
    finished = engine.stats().finished
    assert finished["stop"] > 0 < finished["length"] and sum(finished.values()) == 18


def test_prompts_do_not_hold_up_streams(model):
    """Between two tokens of a stream at most one piece is read."""
    engine = Engine(model, slots=4, piece=16)
    first = engine.submit(Request(prompt=[5], max_new_tokens=40))
    engine.step()
    engine.submit(Request(prompt=[6] * 200, max_new_tokens=1))
    for _ in range(13):
        before = engine.stats().prompt_tokens
        assert first in [update.id for update in engine.step() if update.tokens]
        assert engine.stats().prompt_tokens - before <= 16
    assert engine.stats().prompt_tokens == 201


def test_requests_are_answered_in_order(engine):
    """And wait for a slot."""
    ids = [engine.submit(Request(prompt=[5] * 3, max_new_tokens=2)) for _ in range(9)]
    assert engine.stats().waiting == 9
    ends = [update.id for update in engine.run_until_idle() if update.finished]
    assert ends == ids


def jobs_of(*lengths):
    made = [Request(prompt=[5] * n, max_new_tokens=1) for n in lengths]
    return [Job(n, request, None, None) for n, request in enumerate(made)]


@pytest.mark.parametrize(
    ("lengths", "room", "taken"),
    [
        ([100], None, [16]),
        ([3, 5, 4, 1], None, [3, 5, 4]),
        ([8, 8, 1], None, [8, 8]),
        ([2, 20, 1], None, [2]),
        ([3, 5], 4, [3]),
    ],
)
def test_pieces(lengths, room, taken):
    """In order, at most 16 tokens with padding, and no column that is not there."""
    jobs = jobs_of(*lengths)
    assert next_piece(jobs, 16, room) == (jobs[: len(taken)], taken, max(taken))
    assert next_piece([], 16, room) is None


@pytest.mark.parametrize(
    ("lengths", "room", "taken", "length"),
    [
        ([1000], None, [256], 256),
        ([3, 5, 4, 1, 2], None, [3, 5, 4, 1], 32),
        ([60, 49, 40], None, [60, 49], 64),
        ([40, 30, 65], None, [40, 30], 48),
        ([60, 50, 9], 62, [60, 50], 60),
        ([5, 5, 90], None, [5, 5], 32),
    ],
)
def test_pieces_for_graphs(lengths, room, taken, length):
    """Of few shapes: 1, 2, 4 or 8 rows of 32, 48, 64, 96, ... tokens."""
    jobs = jobs_of(*lengths)
    assert next_piece(jobs, 256, room, rounds=True) == (jobs[: len(taken)], taken, length)


def test_pieces_end_at_cuts():
    (job,) = jobs_of(30)
    job.cut_at([5, 7, 30, 99])
    assert next_piece([job], 16, None) == ([job], [5], 5)
    job.num_read = 5
    job.cuts.pop()
    assert job.cuts == [30, 7] and job.num_unread == 25


@pytest.mark.parametrize("late", [False, True])
def test_sampling_does_not_depend_on_neighbours(model, late):
    """A seed gives the same tokens alone and in a crowd, and another seed gives others."""
    sampling = SamplingSettings(temperature=1.5, top_k=40, top_p=0.95, repetition_penalty=1.2)
    request = Request(prompt=[5, 6, 7], max_new_tokens=12, sampling=sampling, seed=3)
    other = Request(prompt=[5, 6, 7], max_new_tokens=12, sampling=sampling, seed=4)
    alone = answers(submit_all(Engine(model, slots=1), [request]))[0]
    crowd = Engine(model, slots=8, piece=16, late=late)
    found = run_at_random(
        crowd, [*random_requests(5), request, other, *random_requests(9), request]
    )
    assert found[5] == alone == found[-1] and found[6] != alone
    assert len(set(alone)) > 3
    free = Request(prompt=[5, 6, 7], max_new_tokens=12, sampling=sampling)
    first, second = answers(submit_all(crowd, [free, free])).values()
    assert first != second


def submit_all(engine, requests):
    for request in requests:
        engine.submit(request)
    return engine.run_until_idle()


def test_the_penalty_applies_to_the_prompt(model):
    """As in `generate`, and to nobody else."""
    prompts = [[5, 6, 7, 8] * 5, [9, 10, 11] * 6]
    sampling = SamplingSettings(repetition_penalty=5.0)
    requests = [Request(prompt=x, max_new_tokens=12, sampling=sampling) for x in prompts]
    plain = [Request(prompt=x, max_new_tokens=12) for x in prompts]
    found = run_at_random(Engine(model, slots=4, piece=7), [*requests, *plain, *requests])
    for request, got in zip(requests, found, strict=False):
        ids = torch.tensor([request.prompt])
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        made = model.generate(ids, repetition_penalty=5.0, **options)
        assert got == made[0, ids.shape[1] :].tolist()
    assert found[2:4] == [expected(model, request) for request in plain] != found[:2]
    assert found[4:] == found[:2]


@pytest.mark.parametrize("late", [False, True])
def test_logprobs(model, late):
    """Of the chosen tokens and the most likely ones, before all settings."""
    sampling = SamplingSettings(temperature=2.0)
    request = Request(prompt=[5, 6], max_new_tokens=6, sampling=sampling, seed=0, logprobs=3)
    chosen = Request(prompt=[8], max_new_tokens=9, logprobs=0)
    engine = Engine(model, slots=4, late=late)
    ids = [engine.submit(x) for x in (Request(prompt=[4], max_new_tokens=9), request, chosen)]
    updates = [x for x in engine.run_until_idle() if x.id == ids[1]]
    assert all(not x.logprobs and not x.top for x in engine.run_until_idle() if x.id == ids[0])
    tokens = [token for x in updates for token in x.tokens]
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, *tokens]])).logits[0, 1:-1]
    logprobs = logits.log_softmax(-1)
    got = torch.tensor([x for update in updates for x in update.logprobs])
    torch.testing.assert_close(got, logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    values, order = logprobs.topk(3)
    tops = [top for update in updates for top in update.top]
    assert [[token for token, _ in top] for top in tops] == order.tolist()
    torch.testing.assert_close(torch.tensor([[x for _, x in top] for top in tops]), values)


def test_a_full_queue(model):
    engine = Engine(model, slots=1, max_waiting=2)
    request = Request(prompt=[5], max_new_tokens=3)
    engine.submit(request)
    engine.step()
    engine.submit(request)
    engine.submit(request)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(request)
    assert len(answers(engine.run_until_idle())) == 3
    engine.submit(request)


@pytest.mark.parametrize("late", [False, True])
def test_free_slots_count(model, late):
    """A burst is not refused while slots are free, which are given at the next step."""
    engine = Engine(model, slots=4, max_waiting=2, piece=8, late=late)
    request = Request(prompt=[5] * 6, max_new_tokens=9)
    for _ in range(2):
        for _ in range(6):
            engine.submit(request)
        for _ in range(4):
            with pytest.raises(QueueFull, match="all 4 slots are taken and 2 requests are waiting"):
                engine.submit(request)
            engine.step()
        engine.run_until_idle()
    assert engine.stats().finished["length"] == 12


@pytest.mark.parametrize("late", [False, True])
def test_cancel(model, late):
    """Waiting, while the prompt is read, running, and after the end."""
    engine = Engine(model, slots=2, piece=8, late=late)
    requests = random_requests(8, longest=6)
    long = Request(prompt=[5] * 30, max_new_tokens=50)
    running = engine.submit(long)
    for _ in range(6):
        engine.step()
    reading, waiting = engine.submit(long), engine.submit(long)
    engine.step()
    assert (engine.stats().running, engine.stats().reading, engine.stats().waiting) == (1, 1, 1)
    for id in (running, reading, waiting, 999):
        engine.cancel(id)
    ends = engine.step()
    assert {(x.id, x.finished) for x in ends} == {
        (id, "cancelled") for id in (running, reading, waiting)
    }
    assert engine.stats().running == engine.stats().reading == 0
    assert run_at_random(engine, requests) == [expected(model, x) for x in requests]


def test_stop_texts():
    """The answer ends with the token that completes one."""
    model, tokenizer = make_model(torch.float32, vocab_size=259), byte_tokenizer()
    engine = Engine(model, slots=2, tokenizer=tokenizer)
    request = Request(prompt=[5, 6, 7], max_new_tokens=20)
    whole = answers(submit_all(engine, [request]))[0]
    letters = [tokenizer.decode([token]) for token in whole]
    end = next(n for n in range(2, 20) if letters[n].isascii() and letters[n] not in letters[:n])
    stopped = Request(prompt=[5, 6, 7], max_new_tokens=20, stop=[letters[end], "never"])
    updates = submit_all(engine, [stopped, request])
    found = list(answers(updates).values())
    assert found[0] == whole[: end + 1] and found[1] == whole
    assert [x.finished for x in updates if x.id == 1][-1] == "stop"


def test_slots_that_are_no_power_of_two(model):
    requests = random_requests(12, longest=4)
    engine = Engine(model, slots=3)
    assert run_at_random(engine, requests) == [expected(model, x) for x in requests]


def test_default_max_length():
    assert Engine(make("all"), slots=1).max_length == 4096
    assert Engine(make("sliding"), slots=1).max_length is None


def test_memory_is_claimed_once():
    engine = Engine(make("all"), slots=4, max_length=64, piece=16)
    before = engine.stats().nbytes
    row = engine._runner._slots.cache.claimed // 4
    assert before > 8 * row > 0
    run_at_random(engine, random_requests(9))
    assert engine.stats().nbytes == before


def test_a_stream_without_a_thread(model):
    """The caller's thread runs the steps; others are answered on the way."""
    engine, request = Engine(model, slots=2), Request(prompt=[5, 6], max_new_tokens=9)
    one, other = engine.stream(request), engine.stream(request)
    pairs = list(zip(one, other, strict=True))
    assert [x.tokens for x, _ in pairs] == [x.tokens for _, x in pairs]
    assert [token for x, _ in pairs for token in x.tokens] == expected(model, request)


def test_a_stream_that_is_left(model):
    engine = Engine(model, slots=1)
    stream = engine.stream(Request(prompt=[5], max_new_tokens=999))
    next(stream)
    stream.close()
    assert [x.finished for x in engine.run_until_idle()] == ["cancelled"]
    # Before its first update, too: the request is sent at once.
    stream = engine.stream(Request(prompt=[5], max_new_tokens=999))
    assert engine.stats().waiting == 1
    stream.close()
    assert [x.finished for x in engine.run_until_idle()] == ["cancelled"]
    with pytest.raises(ValueError, match="the vocabulary"):
        engine.stream(Request(prompt=[99], max_new_tokens=1))


@pytest.mark.parametrize("late", [False, True])
def test_a_thread(model, late):
    """Requests from several threads; `stop` answers all that are there."""
    requests = random_requests(24)
    engine, found = Engine(model, slots=4, piece=16, late=late).start(), {}

    def ask(part):
        for n in part:
            updates = list(engine.stream(requests[n]))
            found[n] = [token for update in updates for token in update.tokens]

    threads = [threading.Thread(target=ask, args=(range(n, 24, 3),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[n] for n in range(24)] == [expected(model, x) for x in requests]
    with pytest.raises(RuntimeError, match="its own thread"):
        engine.step()
    with pytest.raises(RuntimeError, match="already running"):
        engine.start()
    updates = []
    for request in requests[:6]:
        engine.submit(request, updates.append)
    engine.stop()
    assert sum(x.finished == "length" for x in updates) == 6
    with pytest.raises(EngineStopped, match="is stopped"):
        engine.submit(requests[0])
    with engine:
        assert len(list(engine.stream(requests[0]))) == requests[0].max_new_tokens


def test_stop_without_draining(model):
    engine, updates = Engine(model, slots=1).start(), []
    for _ in range(5):
        engine.submit(Request(prompt=[5], max_new_tokens=10**6), updates.append)
    engine.stop(drain=False)
    assert sum(x.finished == "cancelled" for x in updates) == 5
    assert engine.stats().running == engine.stats().waiting == 0
