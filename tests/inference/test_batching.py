"""transformers' continuous-batching interface on our engine."""

import asyncio
from unittest import mock

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from flash_frac.inference.batching import EngineManager
from flash_frac.inference.generation_settings import settings_of
from flash_frac.inference.scheduling import EngineStopped, QueueFull
from flash_frac.models import FracForCausalLM
from tests.tiny import tiny_config

PROMPTS = [[5, 6, 7], [9] * 30, [100, 3, 4, 8], [11]]
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False)


@pytest.fixture(scope="module", params=["frac", "hybrid"])
def model(request):
    torch.manual_seed(0)
    types = ["delta", "attention"] if request.param == "hybrid" else None
    config = tiny_config(initializer_range=0.6, eos_token_id=None, mixer_types=types)
    return FracForCausalLM(config).eval()


@pytest.fixture
def manager(model):
    with model.init_continuous_batching(GREEDY) as manager:
        yield manager


def expected(model, prompt, **options):
    options = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def test_generate_batch_is_generate(model):
    results = model.generate_batch(PROMPTS, GREEDY, record_timestamps=True)
    assert [*results] == [f"req_{n}" for n in range(4)]
    for prompt, result in zip(PROMPTS, results.values(), strict=True):
        assert type(result) is GenerationOutput and result.status == RequestStatus.FINISHED
        assert result.prompt_ids == prompt and result.error is None
        assert result.generated_tokens == expected(model, prompt)
        assert len(result.timestamps) == 12 and result.lifespan[0] <= result.lifespan[1]
    short = model.generate_batch(PROMPTS[:1], GREEDY, max_new_tokens=3)
    assert short["req_0"].generated_tokens == expected(model, PROMPTS[0])[:3]


def test_a_refused_prompt_ends_alone(model):
    prompts = [PROMPTS[0], [99999], [], PROMPTS[1]]
    results = [*model.generate_batch(prompts, GREEDY).values()]
    for prompt, result in zip(prompts, results, strict=True):
        if prompt in PROMPTS:
            assert result.generated_tokens == expected(model, prompt)
        else:
            assert result.status == RequestStatus.FAILED and "prompt must" in result.error
            assert result.prompt_ids == prompt and result.generated_tokens == []


def test_generate_batch_names_what_it_cannot_do(model):
    with pytest.raises(ValueError, match="max_new_tokens must be given"):
        model.generate_batch(PROMPTS)
    with pytest.raises(ValueError, match="generate_batch has no argument temperature; pass"):
        model.generate_batch(PROMPTS, GREEDY, temperature=0.5)
    assert model.generate_batch([]) == {}
    # Of prompt and answer together, as in `generate`.
    whole = len(PROMPTS[0]) + 3
    results = model.generate_batch(PROMPTS[:1], GenerationConfig(max_length=whole))
    assert results["req_0"].generated_tokens == expected(model, PROMPTS[0])[:3]


def test_generate_batch_loses_no_answer_in_silence(model):
    with (
        mock.patch.object(EngineManager, "add_requests", side_effect=QueueFull("full")),
        pytest.raises(RuntimeError, match="4 of 4 answers are missing"),
    ):
        model.generate_batch(PROMPTS, GREEDY)


def test_a_refused_request_keeps_no_handler(manager, model):
    async def ask(prompt):
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("asked", done.set_result)
        manager.add_request(prompt, "asked")
        return await asyncio.wait_for(done, 20)

    assert "vocabulary" in asyncio.run(ask([99999])).error
    assert manager._handlers == manager._ids == {}
    # Its name is free again.
    assert asyncio.run(ask(PROMPTS[0])).generated_tokens == expected(model, PROMPTS[0])
    manager.stop()
    with pytest.raises(EngineStopped):
        asyncio.run(ask(PROMPTS[0]))
    assert manager._handlers == {}


def test_a_running_request_keeps_its_name(manager):
    manager.add_request(PROMPTS[0], "mine", max_new_tokens=3000)
    with pytest.raises(ValueError, match=r"request_id must not be that .*running.*, got 'mine'"):
        manager.add_request(PROMPTS[1], "mine")
    manager.cancel_request("mine")
    assert manager.get_result("mine", 20).prompt_ids == PROMPTS[0]
    manager.add_request(PROMPTS[1], "mine")
    assert manager.get_result("mine", 20).prompt_ids == PROMPTS[1]


def test_eos_ends_an_answer_and_is_its_last_token(model):
    whole = expected(model, PROMPTS[0])
    config = GenerationConfig(max_new_tokens=12, eos_token_id=[whole[4], 258])
    (result,) = model.generate_batch(PROMPTS[:1], config).values()
    assert result.generated_tokens == whole[: whole.index(whole[4]) + 1]


def test_results_by_name_and_streams(manager, model):
    names = manager.add_requests(PROMPTS[:2])
    assert manager.get_result(names[1], timeout=20).generated_tokens == expected(model, PROMPTS[1])
    assert manager.get_result(names[0], timeout=20).request_id == names[0]
    assert manager.get_result(timeout=0.01) is None
    manager.add_request(PROMPTS[2], "mine", streaming=True)
    outputs = list(manager.request_id_iter("mine"))
    whole = expected(model, PROMPTS[2])
    # All tokens so far, as they come.
    assert [output.generated_tokens for output in outputs] == [whole[: n + 1] for n in range(12)]
    assert {output.status for output in outputs[:-1]} == {RequestStatus.DECODING}
    names = set(manager.add_requests(PROMPTS))
    for output in manager:
        names.remove(output.request_id)
        if not names:
            break


def test_handlers_are_called_in_their_loop(manager, model):
    async def ask(early):
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        seen = []

        def take(output):
            assert asyncio.get_running_loop() is loop
            seen.append(output)
            if output.status >= RequestStatus.FINISHED:
                done.set()

        name = f"handled {early}"
        if early:
            manager.register_result_handler(name, take)
        manager.add_request(PROMPTS[0], name, streaming=True)
        if not early:
            # What came before there was a handler is not lost.
            await asyncio.sleep(0.1)
            manager.register_result_handler(name, take)
        await asyncio.wait_for(done.wait(), 20)
        return seen

    for early in (True, False):
        seen = asyncio.run(ask(early))
        assert len(seen) == 12 and seen[-1].generated_tokens == expected(model, PROMPTS[0])
    assert manager.get_result(timeout=0.01) is None


def test_settings_of_one_request(manager, model):
    manager.add_request(PROMPTS[0], "greedy", eos_token_id=-1)
    manager.add_request(PROMPTS[0], "one", temperature=3.0, top_k=1)
    manager.add_request(PROMPTS[0], "seeded", temperature=3.0, seed=1)
    manager.add_request(PROMPTS[0], "again", temperature=3.0, seed=1)
    found = {name: manager.get_result(name, 20) for name in ("greedy", "one", "seeded", "again")}
    tokens = {name: output.generated_tokens for name, output in found.items()}
    assert tokens["greedy"] == tokens["one"] == expected(model, PROMPTS[0])
    assert tokens["seeded"] == tokens["again"] != tokens["greedy"]
    with pytest.raises(ValueError, match=r"accepts the settings .*top_p and seed, got typical_p"):
        manager.add_request(PROMPTS[0], typical_p=0.3)


def test_several_answers_to_a_prompt(model):
    config = GenerationConfig(
        max_new_tokens=6, do_sample=True, temperature=2.0, num_return_sequences=3
    )
    batching = ContinuousBatchingConfig(seed=3, return_logprobs=True)
    names = ["req_0", "req_0__child#0", "req_0__child#1"]
    runs = []
    for _ in range(2):
        # generate_batch itself returns one of them in older releases.
        with model.init_continuous_batching(config, batching) as manager:
            manager.add_request(PROMPTS[0])
            runs.append([manager.get_result(name, 20) for name in names])
    assert all(len(result.logprobs) == 6 for results in runs for result in results)
    first, second = ([x.generated_tokens for x in results] for results in runs)
    assert first == second and len({*map(tuple, first)}) > 1


def test_cancelling_ends_a_request_with_what_it_has(manager):
    name = manager.add_request(PROMPTS[0], max_new_tokens=2000, streaming=True)
    manager.get_result(name, 20)
    manager.cancel_request(name)
    *_, last = manager.request_id_iter(name)
    assert last.status == RequestStatus.FAILED and "cancelled" in last.error
    assert 0 < len(last.generated_tokens) < 2000
    manager.cancel_request(name)


def test_stopping(model):
    manager = model.init_continuous_batching(GREEDY)
    assert not manager.is_running() and manager.get_result(timeout=0.01) is None
    manager.start()
    names = manager.add_requests(PROMPTS)
    manager.stop()
    assert not manager.is_running()
    assert {manager.get_result().request_id for _ in names} == set(names)
    with pytest.raises(EngineStopped, match="is stopped"):
        manager.add_request(PROMPTS[0])
    manager.start()
    name = manager.add_request(PROMPTS[0], max_new_tokens=2000)
    manager.stop(hard_stop=True)
    assert manager.get_result(name).status == RequestStatus.FAILED


def test_pausing(manager, model):
    """As in transformers: requests wait and go on."""
    with manager.pause():
        name = manager.add_request(PROMPTS[0], max_new_tokens=12)
        assert manager.get_result(name, timeout=0.05) is None
        waits = (manager.stop, manager.get_result, lambda: list(manager))
        for call in (*waits, lambda: list(manager.request_id_iter(name))):
            with pytest.raises(RuntimeError, match="leave the block"):
                call()
    assert manager.get_result(name).generated_tokens == expected(model, PROMPTS[0])
    manager.stop()
    with pytest.raises(RuntimeError, match=r"running; call start\(\)"), manager.pause():
        pass


def test_destroying_ends_what_a_stop_left_running(model):
    manager = model.init_continuous_batching(GREEDY)
    manager.start()
    manager.add_request(PROMPTS[0], "long", max_new_tokens=4000)
    manager.stop(timeout=0)
    manager.destroy()
    assert "cancelled" in manager.get_result("long").error
    assert not manager._ending.is_alive() and not manager.engine.stats().running


def test_a_manager_is_kept_for_another_session(model):
    model.generate_batch(PROMPTS[:1], GREEDY, persistent_manager=True)
    kept = model.init_continuous_batching()
    assert isinstance(kept, EngineManager) and kept is model.init_continuous_batching()
    results = model.generate_batch(PROMPTS[:1], GREEDY, persistent_manager=True)
    assert [x.generated_tokens for x in results.values()] == [expected(model, PROMPTS[0])]
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(GREEDY) is not kept


def test_a_kept_manager_takes_new_settings_and_sizes(model):
    sampled = {"do_sample": True, "temperature": 9.0}
    model.generate_batch(PROMPTS[:1], GREEDY, persistent_manager=True)
    kept = model.init_continuous_batching()
    assert model.init_continuous_batching(GenerationConfig(max_new_tokens=5, **sampled)) is kept
    assert (kept.settings.max_new_tokens, kept.settings.sampling.temperature) == (5, 9.0)
    with kept, pytest.raises(ValueError, match="the kept manager is running with other settings"):
        model.init_continuous_batching(GREEDY)
    # The sizes of an engine are fixed.
    batching = ContinuousBatchingConfig(max_requests_per_batch=2)
    other = model.init_continuous_batching(GREEDY, batching)
    assert other is not kept and other.engine.slots == 2
    for length in (50, 90):
        results = model.generate_batch([[7] * length], GREEDY, persistent_manager=True)
        assert [x.error for x in results.values()] == [None]
    # Nor is a dead one of any use.
    with mock.patch.object(model, "forward", side_effect=RuntimeError("out of luck")):
        model.generate_batch(PROMPTS[:1], GREEDY, persistent_manager=True)
    (result,) = model.generate_batch(PROMPTS[:1], GREEDY).values()
    assert result.generated_tokens == expected(model, PROMPTS[0])


def test_a_full_queue(model):
    batching = ContinuousBatchingConfig(max_queue_size=2)
    with mock.patch("flash_frac.inference.batching.SLOTS", 1):
        manager = model.init_continuous_batching(GREEDY, batching)
    with mock.patch("flash_frac.inference.batching.PATIENCE", 0.05):
        manager.add_requests(PROMPTS[:3])
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            manager.add_request(PROMPTS[0])
    with manager:
        # There is room again before long.
        manager.add_requests(PROMPTS)


def test_the_death_of_the_worker_is_told(model):
    manager = model.init_continuous_batching(GREEDY)
    name = manager.add_request(PROMPTS[0])
    with mock.patch.object(model, "forward", side_effect=RuntimeError("out of luck")):
        manager.start()
        result = manager.get_result(name, timeout=20)
    assert result.status == RequestStatus.FAILED and "out of luck" in result.error
    assert "out of luck" in str(manager.background_thread_status.fatal_error)
    assert not manager.is_running() and manager.get_result() is None
    with pytest.raises(EngineStopped, match="out of luck"):
        manager.add_request(PROMPTS[0])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"no_repeat_ngram_size": 3, "typical_p": 0.5}, "no_repeat_ngram_size=3, typical_p=0.5"),
        ({"sequence_bias": [[[5], 1.0]]}, "sequence_bias"),
        ({"suppress_tokens": [4]}, "suppress_tokens"),
        ({"stop_strings": ["a"]}, "no stop_strings"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(model, fields, named):
    with pytest.raises(ValueError, match=named):
        model.init_continuous_batching(GenerationConfig(max_new_tokens=3, **fields))


def test_fields_that_ask_for_nothing_are_taken():
    config = GenerationConfig(num_beams=1, typical_p=1.0, no_repeat_ngram_size=0, min_length=0)
    assert settings_of(config) == settings_of(GenerationConfig())
    sampled = settings_of(GenerationConfig(do_sample=True, top_k=5, repetition_penalty=1.5))
    assert (sampled.sampling.temperature, sampled.sampling.top_k) == (1.0, 5)
    assert sampled.sampling.repetition_penalty == 1.5
    # As generate does: without do_sample, these have no effect.
    assert settings_of(GenerationConfig(temperature=0.5, top_k=5)).sampling.temperature == 0


def test_options_of_pages_are_refused(model):
    batching = ContinuousBatchingConfig(num_blocks=8, scheduler_type="prefill_first")
    with pytest.raises(ValueError, match="must leave num_blocks, scheduler_type at the default"):
        model.init_continuous_batching(GREEDY, batching)


def test_sizes_reach_the_engine(model):
    batching = ContinuousBatchingConfig(max_batch_tokens=16, max_queue_size=8)
    hints = mock.Mock(num_requests=3, max_prompt_length=20, max_generated_length=10)
    with mock.patch("flash_frac.inference.batching.Engine") as made:
        model.init_continuous_batching(GREEDY, batching, hints)
    sizes = made.call_args.kwargs
    # Without layers whose memory grows, a length needs no limit.
    assert sizes["max_length"] == (30 if model.config.mixer_types[-1] == "attention" else None)
    assert (sizes["piece"], sizes["max_waiting"], sizes["slots"]) == (16, 8, 3)


def test_a_length_must_be_given(model):
    with (
        model.init_continuous_batching(GenerationConfig()) as manager,
        pytest.raises(ValueError, match="max_new_tokens must be given"),
    ):
        manager.add_request(PROMPTS[0])
