"""The server's application without a server: fields of requests, answers, errors and limits."""

import asyncio
import json
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from shutil import copytree
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

from flash_frac.inference.runner import Runner
from flash_frac.inference.server.sequential import options_for, serve_sequentially
from flash_frac.inference.server.serving import ServerOptions, make_app, serve
from flash_frac.models import FracForCausalLM
from flash_frac.models.loading import find_device
from flash_frac.models.quantizing import is_quantized
from tests.inference.servers import HELLO, SECONDS, asking, expected, letters_tokenizer, until
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A model and its tokenizer, with which the application of a server is made."""
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason="pip install 'flash-frac[serve]'")
    folder = tmp_path_factory.mktemp("asked")
    torch.manual_seed(2)
    # With this bank no answer of these tests has a special token, which would not be shown.
    sizes = {"vocab_size": 99, "frac_tau_max": 65536.0}
    config = tiny_config(**sizes, initializer_range=0.6, eos_token_id=None)
    FracForCausalLM(config).save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return folder


def client_of(app):
    from starlette.testclient import TestClient

    return TestClient(app, raise_server_exceptions=False)


OPTIONS = ServerOptions(device="cpu", slots=4, max_waiting=4)


@pytest.fixture(scope="module")
def client(asked):
    """A client of the server's application, without a server."""
    with client_of(make_app(str(asked), OPTIONS)) as found:
        yield found


@pytest.fixture(scope="module")
def plain_client(asked):
    """The same, without a chat template."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = None
    with client_of(make_app(str(asked), OPTIONS, tokenizer=tokenizer)) as found:
        yield found


@pytest.fixture(scope="module")
def sequential_client(asked):
    with mock.patch("uvicorn.Server.run", autospec=True) as run:
        serve_sequentially(str(asked), ["--device", "cpu"])
    return client_of(run.call_args.args[0].config.app)


CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def test_the_model_is_listed(client, sequential_client):
    for known in (client, sequential_client):
        answer = known.get("/v1/models")
        (model,) = answer.json()["data"]
        assert answer.status_code == 200 and model["object"] == "model" and "asked" in model["id"]


def test_the_model_by_its_name(asked):
    """As OpenAI's client retrieves it; a shell adds a slash to the name of a folder."""
    with client_of(make_app(f"{asked}/", OPTIONS)) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == str(asked)
        assert client.get(f"/v1/models/{model['id']}").json() == model
        body = {"prompt": "Once", "max_tokens": 1}
        for name in (model["id"], f"{asked}/"):
            assert client.post(TEXT, json=body | {"model": name}).status_code == 200
    with client_of(make_app(str(asked), replace(OPTIONS, served_model_name="mine"))) as client:
        assert client.get("/v1/models/mine").json()["id"] == "mine"
        assert client.get("/v1/models/").json() == client.get("/v1/models").json()
        assert client.post(TEXT, json=body | {"model": "mine"}).json()["model"] == "mine"
        for answer in (
            client.get("/v1/models/other"),
            client.post(TEXT, json=body | {"model": "other"}),
        ):
            message = "this server only has the model mine, got 'other'"
            assert answer.status_code == 404 and answer.json()["error"]["message"] == message


def test_pages_of_other_sites_may_ask(asked):
    """Browsers first ask whether OpenAI's headers are allowed."""
    wanted = {"Origin": "http://a.page", "Access-Control-Request-Method": "POST"}
    wanted["Access-Control-Request-Headers"] = "authorization,content-type"
    with client_of(make_app(str(asked), replace(OPTIONS, cors=True))) as client:
        answer = client.options(CHAT, headers=wanted)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("field", ["prompt", "pr\ud800"])
def test_bytes_that_are_no_text(client, field):
    body = json.dumps({field: "\ud800"}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    answer = client.post(TEXT, content=body)
    assert answer.status_code == 400
    assert "the body must be JSON: 'utf-8' codec can't decode" in answer.text


def test_a_failure_in_a_stream_is_its_last_event(client, monkeypatch):
    def broken(self, ids):
        raise RuntimeError("no text")

    monkeypatch.setattr("flash_frac.inference.server.app.ShownText.add", broken)
    body = {"prompt": "Once", "max_tokens": 3, "stream": True}
    *_, last = events(client.post(TEXT, json=body))
    assert last["error"]["message"] == "RuntimeError: no text"


def test_answers_are_what_openai_describes(client, asked):
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    given = {"temperature": 0, "max_tokens": 8}
    chat = client.post(CHAT, json={"messages": HELLO, "logprobs": True, "top_logprobs": 2} | given)
    found = ChatCompletion.model_validate(chat.json(), strict=True)
    assert found.choices[0].message.content == expected(asked, HELLO, 8)
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 8)
    for token in found.choices[0].logprobs.content:
        # The likeliest token is the one that was taken; both numbers are float32.
        first, second = token.top_logprobs
        assert (first.token, first.logprob) == (token.token, pytest.approx(token.logprob, 1e-5))
        assert first.logprob >= second.logprob
    text = client.post(TEXT, json={"prompt": "Once", "logprobs": 0} | given)
    found = Completion.model_validate(text.json())
    assert found.choices[0].text == expected(asked, "Once", 8)
    assert "".join(found.choices[0].logprobs.tokens) == found.choices[0].text
    body = {"input": "Hello", "max_output_tokens": 8, "temperature": 0}
    found = Response.model_validate(client.post(RESPONSE, json=body).json())
    assert found.output_text == expected(asked, HELLO, 8)
    assert found.incomplete_details.reason == "max_output_tokens"


def events(answer):
    lines = [line for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_streams_have_the_text_and_the_usage(client, asked):
    body = {"max_tokens": 8, "temperature": 0, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    *parts, end, last = events(client.post(CHAT, json=body | usage | {"messages": HELLO}))
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == expected(asked, HELLO, 8) and last["usage"]["completion_tokens"] == 8
    assert end["choices"][0]["finish_reason"] == "length"
    parts = events(client.post(TEXT, json=body | {"prompt": "Once"}))
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text == expected(asked, "Once", 8)
    body = {"input": "Hello", "max_output_tokens": 8, "temperature": 0, "stream": True}
    parts = events(client.post(RESPONSE, json=body))
    assert [part["sequence_number"] for part in parts] == list(range(len(parts)))
    text = "".join(part["delta"] for part in parts if part["type"].endswith("text.delta"))
    assert (
        text
        == expected(asked, HELLO, 8)
        == parts[-1]["response"]["output"][0]["content"][0]["text"]
    )


def test_a_client_that_reads_slowly_gets_the_whole_answer(client, asked):
    """The answer ends while its first event is being sent."""
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0, "stream": True}
    request = {"type": "http.request", "body": json.dumps(body).encode()}
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    sent = []

    async def talk():
        messages = iter([request])

        async def receive():
            # Then the client listens, and does not leave.
            return next(messages, None) or await asyncio.Event().wait()

        async def send(message):
            sent.append(message.get("body", b"").decode())
            await asyncio.sleep(0.3)

        await client.app(scope, receive, send)

    asyncio.run(asyncio.wait_for(talk(), SECONDS))
    pieces = [json.loads(line[6:]) for line in "".join(sent).split("\n") if "delta" in line]
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == expected(asked, HELLO, 8)


def test_stop_texts_end_an_answer_and_are_not_in_it(client, asked):
    whole = expected(asked, "Once", 20)
    stop = whole[6:8]
    for stream in (False, True):
        body = {"prompt": "Once", "max_tokens": 20, "temperature": 0, "stop": [stop, "never"]}
        answer = client.post(TEXT, json=body | {"stream": stream})
        parts = events(answer) if stream else [answer.json()]
        assert "".join(part["choices"][0]["text"] for part in parts) == whole[: whole.find(stop)]
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_settings_reach_the_engine(client):
    def ask(**settings):
        body = {"prompt": "Once upon a time", "max_tokens": 12, **settings}
        return client.post(TEXT, json=body).json()["choices"][0]["text"]

    hot = {"temperature": 1.5, "seed": 3}
    assert ask(**hot) == ask(**hot) != ask(**hot | {"seed": 4})
    greedy = ask(temperature=0)
    assert ask(**hot, top_k=1) == ask(**hot, top_p=1e-6) == ask(**hot, min_p=0.999) == greedy
    assert ask(temperature=0, repetition_penalty=5.0) != greedy
    assert ask(generation_config=json.dumps({"max_new_tokens": 3}), max_tokens=None) == greedy[:3]
    ids = letters_tokenizer()("Once upon a time").input_ids
    assert ask(prompt=ids, temperature=0) == greedy


def test_a_models_generation_config_is_honoured(asked, tmp_path):
    whole = expected(asked, "Once", 12)
    (eos,) = letters_tokenizer()(whole[5]).input_ids
    copytree(asked, tmp_path, dirs_exist_ok=True)
    config = GenerationConfig(stop_strings=[whole[3:5]], eos_token_id=eos, max_new_tokens=12)
    config.save_pretrained(tmp_path)
    with client_of(make_app(str(tmp_path), OPTIONS)) as client:

        def ask(**settings):
            body = {"prompt": "Once", "temperature": 0, **settings}
            return client.post(TEXT, json=body).json()["choices"][0]["text"]

        assert ask() == whole[: whole.find(whole[3:5])]
        # What a request says itself comes first.
        assert ask(stop=[]) == whole[: whole.index(whole[5]) + 1]
        assert ask(stop=[whole[1:3]]) == whole[: whole.find(whole[1:3])]
        assert ask(stop=[], ignore_eos=True) == whole
        own = json.dumps({"eos_token_id": letters_tokenizer()(whole[1]).input_ids})
        assert ask(stop=[], generation_config=own) == whole[: whole.index(whole[1]) + 1]


MISTAKES = [
    (CHAT, {}, "the field messages is missing"),
    (CHAT, {"messages": []}, "messages must be a list with at least one message"),
    (CHAT, {"messages": "Hello"}, "messages must be a list with at least one message"),
    (CHAT, {"messages": ["Hello"]}, "messages[0] must be an object"),
    (CHAT, {"messages": [{"content": "Hello"}]}, "messages[0].role must be a text"),
    (CHAT, {"messages": [*HELLO, {"role": "user"}]}, "messages[1].content must be a text"),
    (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature must be a number"),
    (CHAT, {"messages": HELLO, "temperature": -1}, "temperature must be a number of at least 0"),
    (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens must be a whole number"),
    (CHAT, {"messages": HELLO, "max_tokens": -1, "stream": True}, "max_tokens must be"),
    (CHAT, {"messages": HELLO, "top_p": 2}, "top_p must be a number above 0 and at most 1"),
    (CHAT, {"messages": HELLO, "seed": "a"}, "seed must be a whole number"),
    (CHAT, {"messages": HELLO, "stop": 5}, "stop must be a text or a list of texts"),
    (CHAT, {"messages": HELLO, "logit_bias": {"a": 1}}, "logit_bias must be an object"),
    (CHAT, {"messages": HELLO, "tools": "x"}, "tools must be a list"),
    (CHAT, {"messages": HELLO, "generation_config": "{"}, "generation_config must be"),
    (CHAT, {"messages": HELLO, "generation_config": '{"max_new_tokens": -3}'}, "max_new_tokens"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": 3}, "chat_template_kwargs must be"),
    (CHAT, {"messages": HELLO, "temperature": 10**400}, "temperature must be a number of at"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 10**400}}, "logit_bias must be an object"),
    (CHAT, {"messages": HELLO, "repetition_penalty": 1e-60}, "repetition_penalty must be a number"),
    (CHAT, {"messages": [{"role": "a", "tool_calls": [5]}]}, "messages[0].tool_calls must be"),
    (CHAT, {"messages": [{"role": "a", "tool_calls": "x"}]}, "messages[0].tool_calls must be"),
    (CHAT, {"messages": [{"role": "a", "tool_calls": [{"function": "x"}]}]}, "tool_calls must be"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "not set tokenize"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "not set messages"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"conversation": 1}}, "not set conversat"),
    (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"chat_template": "a"}},
        "set chat_template",
    ),
    (TEXT, {}, "the field prompt is missing"),
    (TEXT, {"prompt": ""}, "prompt must be a non-empty text"),
    (TEXT, {"prompt": ["a"]}, "prompt must be a non-empty text"),
    (TEXT, {"prompt": []}, "prompt must be a non-empty text"),
    (TEXT, {"prompt": "", "stream": True}, "prompt must be a non-empty text"),
    (TEXT, {"prompt": "Once", "max_tokens": -1}, "max_tokens must be a whole number of at least 1"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens must be"),
    (RESPONSE, {"input": "Once", "max_output_tokens": -1}, "max_output_tokens must be"),
    (RESPONSE, {"input": ""}, "input must be a text or a list of messages"),
    (RESPONSE, {"input": []}, "input must be a text or a list of messages"),
    (RESPONSE, {}, "the field input is missing"),
    (RESPONSE, {"input": 5}, "input must be a text or a list of messages"),
    (RESPONSE, {"input": [{"role": "user"}]}, "input[0].content must be a text"),
    ("/nowhere", {}, "Not Found"),
]
OF_THE_ENGINE = [
    (CHAT, {"messages": HELLO, "model": "other"}, ", got 'other'"),
    (CHAT, {"messages": HELLO, "unheard_of": 1}, "unexpected field"),
    (CHAT, {"messages": HELLO, "n": 2}, "this server supports n only as 1"),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1}}, "supports logit_bias only as"),
    (CHAT, {"messages": HELLO, "frequency_penalty": 0.5}, "use repetition_penalty"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": HELLO, "generation_config": '{"num_beams": 3}'}, "num_beams=3"),
    (CHAT, {"messages": HELLO, "top_logprobs": 99, "logprobs": True}, "top_logprobs must be"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
    (CHAT, {"messages": HELLO, "generation_config": '{"max_length": -3}'}, "max_length must be"),
    (CHAT, {"messages": HELLO, "generation_config": '{"max_new_tokens": "a"}'}, "wrong type"),
    (CHAT, {"messages": HELLO, "generation_config": '{"max_new_tokens": 2.5}'}, "a whole number"),
    (
        TEXT,
        {"prompt": "a", "generation_config": '{"do_sample": true, "num_return_sequences": 3}'},
        "generation_config must not set num_return_sequences",
    ),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs needs logprobs: true"),
    (CHAT, {"messages": HELLO, "stream_options": {"usage": True}}, "got usage: True"),
    (CHAT, {"messages": HELLO, "stream_options": {"include_usage": "yes"}}, "include_usage: 'yes'"),
    (
        CHAT,
        {"messages": HELLO, "chat_template_kwargs": {"documents": 5}},
        "the chat template fails",
    ),
    (
        CHAT,
        {"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "message 0 must have tool_calls with arguments in JSON",
    ),
    (TEXT, {"prompt": "\ud800"}, "surrogates not allowed"),
    (TEXT, {"prompt": [5, 99]}, "prompt must be in [0, 99), the vocabulary"),
    (TEXT, {"prompt": "Once", "echo": True}, "supports echo only as"),
    (RESPONSE, {"input": "Hello", "background": True}, "supports background only as"),
    (RESPONSE, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0] must have a role"),
]
OF_TRANSFORMERS = [
    (CHAT, {"messages": HELLO, "model": "other"}, "pinned"),
    (CHAT, {"messages": HELLO, "unheard_of": 1}, "Unexpected fields"),
    ("/v1/audio/transcriptions", {}, "no speech model"),
    ("/load_model", {"model": "some/other"}, "only"),
]


def check_mistake(client, path, body, message):
    # Not by the client's own encoder, which refuses half a pair of surrogates.
    kind = {"content-type": "application/json"}
    answer = client.post(path, content=json.dumps(body), headers=kind)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", answer.status_code)


@pytest.mark.parametrize(("path", "body", "message"), MISTAKES + OF_THE_ENGINE, ids=str)
def test_a_mistake_of_the_client_is_named(client, path, body, message):
    check_mistake(client, path, body, message)


@pytest.mark.parametrize(("path", "body", "message"), MISTAKES + OF_TRANSFORMERS, ids=str)
def test_a_mistake_is_named_by_the_sequential_server(sequential_client, path, body, message):
    check_mistake(sequential_client, path, body, message)


def test_a_body_that_is_no_json(client, sequential_client):
    for known in (client, sequential_client):
        answer = known.post(CHAT, content=b"{", headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422) and "JSON" in answer.json()["error"]["message"]
    answer = client.post(CHAT, content=b"[]")
    assert "must be a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("field", ["messages", "tools", "generation_config"])
def test_a_body_that_is_nested_too_deeply(client, field, depth):
    nested = '{"a":' * depth + "1" + "}" * depth
    if field == "generation_config":
        nested = json.dumps(nested)
    body = json.dumps({"messages": HELLO})[:-1] + f', "{field}": {nested}}}'
    answer = client.post(CHAT, content=body.encode())
    # Every field has its rule, or the whole is refused.
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert numbers(client)["frac_healthy"] == 1


def test_a_template_that_writes_nothing(asked):
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{{ '' }}"
    with client_of(make_app(str(asked), OPTIONS, tokenizer=tokenizer)) as client:
        for stream in (True, False):
            body = {"messages": HELLO, "stream": stream}
            check_mistake(client, CHAT, body, "prompt must be ids of tokens, at least one")


def test_chat_without_a_template(plain_client):
    for path, body in ((CHAT, {"messages": HELLO}), (RESPONSE, {"input": "Hello"})):
        answer = plain_client.post(path, json=body)
        assert answer.status_code == 400
        assert "has no chat template" in answer.json()["error"]["message"]
    answer = plain_client.post(TEXT, json={"prompt": "Once", "max_tokens": 3})
    assert answer.status_code == 200 and len(answer.json()["choices"][0]["text"]) == 3


def test_an_error_of_the_sequential_server_is_json_too(sequential_client):
    with mock.patch.object(FracForCausalLM, "generate", side_effect=RuntimeError("out of luck")):
        answer = sequential_client.post(TEXT, json={"prompt": "Once", "max_tokens": 3})
    error = {"message": "RuntimeError: out of luck", "type": "server_error", "code": 500}
    assert (answer.status_code, answer.json()) == (500, {"error": error})


def numbers(client):
    lines = client.get("/metrics").text.splitlines()
    return {name: float(x) for name, x in (s.rsplit(" ", 1) for s in lines if s[0] != "#")}


def test_metrics(asked):
    with client_of(make_app(str(asked), OPTIONS)) as client:
        before = numbers(client)
        body = {"messages": [*HELLO, *HELLO], "max_tokens": 5, "temperature": 0}
        usages = [client.post(CHAT, json=body).json()["usage"] for _ in range(2)]
        after = numbers(client)
    assert before["frac_generated_tokens_total"] == 0 and before["frac_slots"] == 4
    assert after["frac_generated_tokens_total"] == 10
    assert after['frac_requests_total{reason="length"}'] == 2
    assert after["frac_time_to_first_token_seconds_count"] == 2
    assert after["frac_requests_running"] == 0 and after["frac_slot_bytes"] > 0
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert after["frac_prefix_hits_total"] == 1
    # The second time, the whole prompt.
    assert cached == [0, usages[1]["prompt_tokens"]]
    assert after["frac_prefix_tokens_reused_total"] == cached[1]


def test_prefix_states_outlast_a_server(asked, tmp_path):
    body = {"messages": [*HELLO, *HELLO], "max_tokens": 5, "temperature": 0}
    options = replace(OPTIONS, prefix_disk_gib=0.01, prefix_folder=tmp_path)
    answers = []
    for hits in range(2):
        with client_of(make_app(str(asked), options)) as client:
            answers.append(client.post(CHAT, json=body).json()["choices"][0]["message"])
            assert numbers(client)["frac_prefix_hits_total"] == hits
    assert answers[0] == answers[1]


def test_chats_share_the_states_of_their_messages(asked):
    """Ends of messages are boundaries, whatever the spacing."""
    system = {"role": "system", "content": "Be brief."}
    with client_of(make_app(str(asked), replace(OPTIONS, prefix_spacing=1000))) as client:
        for question in ("Who?", "Where?"):
            body = {"messages": [system, {"role": "user", "content": question}], "max_tokens": 2}
            assert client.post(CHAT, json=body).status_code == 200
        found = numbers(client)
    begun = letters_tokenizer().apply_chat_template([system], tokenize=False)
    assert found["frac_prefix_tokens_reused_total"] == len(begun) == len("system: Be brief.\n")


def test_a_full_queue_is_429(asked):
    options = ServerOptions(device="cpu", slots=1, max_waiting=1)
    with client_of(make_app(str(asked), options)) as client, ThreadPoolExecutor(8) as pool:
        body = {"prompt": "Once", "max_tokens": 400, "temperature": 0}
        answers = list(pool.map(lambda _: client.post(TEXT, json=body), range(8)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert 0 < len(refused) == numbers(client)["frac_requests_refused_total"] < 8
    assert {answer.status_code for answer in answers} == {200, 429}
    error = refused[0].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", 429)
    assert "waiting" in error["message"] and refused[0].headers["retry-after"]


def test_the_death_of_the_worker_is_told_to_all(asked):
    app = make_app(str(asked), OPTIONS)
    with client_of(app) as client, ThreadPoolExecutor(4) as pool:
        engine = app.state.service.engine
        until(lambda: client.get("/health").json() == {"status": "ok"})
        long = {"prompt": "Once", "max_tokens": 100_000, "temperature": 0}
        waiting = [pool.submit(client.post, TEXT, json=long | {"stream": n > 2}) for n in range(4)]
        until(lambda: engine.stats().running == 4)
        with mock.patch.object(engine.model, "forward", side_effect=RuntimeError("out of luck")):
            answers = [found.result(timeout=SECONDS) for found in waiting]
        for answer in answers[:3]:
            assert answer.status_code == 503 and "out of luck" in answer.json()["error"]["message"]
        assert "out of luck" in events(answers[3])[-1]["error"]["message"]
        health = client.get("/health")
        assert health.status_code == 503 and "out of luck" in health.json()["reason"]
        assert client.post(TEXT, json={"prompt": "Once"}).status_code == 503


def test_a_server_that_warms_up_is_not_healthy_yet(asked):
    recorded = threading.Event()
    waiting = mock.patch.object(Runner, "warm_up", lambda self: recorded.wait(20))
    with waiting, client_of(make_app(str(asked), OPTIONS)) as client:
        health = client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        recorded.set()
        until(lambda: client.get("/health").status_code == 200)


def test_weights_can_be_quantised(asked):
    app = make_app(str(asked), replace(OPTIONS, quantize="int8"))
    assert is_quantized(app.state.service.engine.model)
    with client_of(app) as client:
        answer = client.post(TEXT, json={"prompt": "Once", "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200


def test_an_unknown_option_is_refused(asked):
    from typer.testing import CliRunner

    from flash_frac.cli import app

    result = CliRunner().invoke(app, ["serve", str(asked), "--quantization", "bnb-4bit"])
    assert "no option --quantization; with --sequential" in str(result.exception)
    with pytest.raises(ValueError, match="omit --slots"):
        options_for({"port": 1, "slots": 3})
    with pytest.raises(ValueError, match="cannot be combined; pass one"):
        serve_sequentially(str(asked), ["--continuous-batching"])
    with pytest.raises(ValueError, match="omit --quantize"):
        options_for({"quantize": "int8"})
    result = CliRunner().invoke(app, ["serve", str(asked), "--port", "70000"])
    assert result.exit_code == 2 and "65535" in result.output


@pytest.mark.parametrize("dtype", ["half4", "int8", "float8_e4m3fn", "Tensor"])
def test_a_dtype_must_be_floating(dtype):
    with pytest.raises(
        ValueError, match=f"auto or one of bfloat16, .* got '{dtype}'.* use quantize"
    ):
        ServerOptions(dtype=dtype)


@pytest.mark.parametrize("device", ["cuda:9", "foo", "mps", ""])
def test_a_device_must_exist(asked, device, monkeypatch):
    named = f"device must be auto or one of cpu.*, got '{device}'"
    with pytest.raises(ValueError, match=named):
        make_app(str(asked), replace(OPTIONS, device=device))
    with pytest.raises(ValueError, match=named):
        options_for({"device": device})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [find_device(name) for name in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match="one of cpu, cuda, cuda:0, cuda:1, got 'cuda:2'"):
        find_device("cuda:2")


def test_a_server_that_stops_does_not_wait_for_ever(asked, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *unused: None)
    interval = sys.getswitchinterval()
    with mock.patch("uvicorn.Server.run", autospec=True) as run:
        serve(str(asked), replace(OPTIONS, port=0, shutdown_timeout=0))
    sys.setswitchinterval(interval)
    (server,) = run.call_args.args
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until(lambda: server.started)
    engine = server.config.app.state.service.engine
    port = server.servers[0].sockets[0].getsockname()[1]
    # A client that reads nothing of an answer that has no end.
    with asking(f"http://localhost:{port}", {"prompt": "a", "max_tokens": 10**9, "stream": True}):
        until(lambda: engine.stats().running == 1)
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive() and engine.stats().finished["cancelled"] == 1


def test_the_extra_is_named(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(ImportError, match=r"frac serve needs starlette: .*flash-frac\[serve\]"):
        serve(str(asked))
