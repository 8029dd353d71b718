"""Servers on loopback: what a client gets is what `model.generate` gives.

`frac serve` for a Frac and a hybrid model; `transformers serve` for a model that was exported.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from flash_frac.inference.serving import serve
from flash_frac.models import FracForCausalLM
from flash_frac.models.export import export
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[2]
SECONDS = 120
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def letters_tokenizer():
    """One token for each letter of ASCII, so that any tokens are a text."""
    vocabulary = {name: n for n, name in enumerate(["<pad>", "<bos>", "<eos>"])}
    vocabulary |= {chr(n): len(vocabulary) + n - 32 for n in range(32, 127)} | {"\n": 98}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module", params=["frac", "hybrid", "exported"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=99,
        hidden_size=32,
        frac_num_modes=8,
        initializer_range=0.6,
        # Slow steps, or an answer would not depend on words before the last.
        frac_dt_max=0.05,
        mixer_types=["delta", "attention"] if request.param == "hybrid" else None,
        eos_token_id=None,
    )
    FracForCausalLM(config).save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return export(folder, folder / "copy") if request.param == "exported" else folder


@pytest.fixture(scope="module")
def url(checkpoint, tmp_path_factory):
    """The address of a server that runs until the last test is done."""
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason="pip install 'flash-frac[serve]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command = [sys.executable, "-m", "flash_frac.cli", "serve"]
    if checkpoint.name == "copy":
        command = [str(Path(sys.executable).with_name("transformers")), "serve"]
        options.append("--trust-remote-code")
    # Code of checkpoints is copied there.
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home"))}
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, str(checkpoint), *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | home,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, server, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(address, server, log):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert json.load(answer) == {"status": "ok"}
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"no server at {address}: {log.read_text()[-2000:]}")


def post(address, body):
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


@cache
def load(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    return AutoTokenizer.from_pretrained(checkpoint), model


def expected(checkpoint, prompt, num):
    """The text that follows a prompt, or messages, greedily."""
    tokenizer, model = load(checkpoint)
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=num, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(url, messages, num=20):
    answer = post(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": num})
    return answer["choices"][0]["message"]["content"]


def test_chat_with_several_turns(url, checkpoint):
    """Each request by itself: nothing of another one is left in the model."""
    messages = list(HELLO)
    for _ in range(3):
        answer = chat(url, messages)
        assert len(answer) > 5 and answer == expected(checkpoint, messages, 20)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    assert chat(url, HELLO) == expected(checkpoint, HELLO, 20)


def test_requests_at_once(url, checkpoint):
    questions = ["Hello", "Who are you?", "Sing a song of sixpence!", "12 + 30 ="]
    talks = [[{"role": "user", "content": question}] for question in questions]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda talk: chat(url, talk), talks))
    assert answers == [expected(checkpoint, talk, 20) for talk in talks]
    assert len(set(answers)) == 4


def test_completions(url, checkpoint):
    answer = post(f"{url}/v1/completions", {"prompt": "Once upon", "max_tokens": 20})
    assert answer["choices"][0]["text"] == expected(checkpoint, "Once upon", 20)


def test_responses(url, checkpoint):
    body = {"input": "Hello", "max_output_tokens": 20, "stream": False}
    answer = post(f"{url}/v1/responses", body)
    text = answer["output"][0]["content"][0]["text"]
    assert text == expected(checkpoint, HELLO, 20)


def test_the_client_of_the_document(url, checkpoint):
    """docs/serving.md, as a reader would type it: OpenAI's client, token by token."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
    block = block.replace("http://localhost:8000", url).replace("my-frac", str(checkpoint))
    names: dict = {}
    exec(compile(block, "docs/serving.md", "exec"), names)
    assert names["answer"] == expected(checkpoint, HELLO, 20)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of the server's application, without a server; one with a chat template, one not."""
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason="pip install 'flash-frac[serve]'")
    from fastapi.testclient import TestClient

    folder, clients = tmp_path_factory.mktemp("asked"), {}
    FracForCausalLM(tiny_config(vocab_size=99, eos_token_id=None)).save_pretrained(folder)
    tokenizer = letters_tokenizer()
    for kind in ("chat", "plain"):
        if kind == "plain":
            tokenizer.chat_template = None
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").unlink() if kind == "plain" else None
        with mock.patch("uvicorn.Server.run", autospec=True) as run:
            serve(str(folder), ["--device", "cpu"])
        app = run.call_args.args[0].config.app
        clients[kind] = TestClient(app, raise_server_exceptions=False)
    return clients


def test_the_model_is_listed(client):
    answer = client["chat"].get("/v1/models")
    (model,) = answer.json()["data"]
    assert answer.status_code == 200 and model["object"] == "model" and "asked" in model["id"]


CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
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
    (CHAT, {"messages": HELLO, "model": "other"}, "pinned"),
    (CHAT, {"messages": HELLO, "unheard_of": 1}, "Unexpected fields"),
    (TEXT, {}, "the field prompt is missing"),
    (TEXT, {"prompt": ""}, "prompt must be a text that is not empty"),
    (TEXT, {"prompt": ["a"]}, "prompt must be a text that is not empty"),
    (RESPONSE, {}, "the field input is missing"),
    (RESPONSE, {"input": 5}, "input must be a text or a list of messages"),
    (RESPONSE, {"input": [{"role": "user"}]}, "input[0].content must be a text"),
    ("/v1/audio/transcriptions", {}, "no model of speech"),
    ("/load_model", {"model": "some/other"}, "only"),
    ("/nowhere", {}, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "message"), MISTAKES, ids=str)
def test_a_mistake_of_the_client_is_named(client, path, body, message):
    answer = client["chat"].post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", answer.status_code)


def test_a_body_that_is_no_json(client):
    answer = client["chat"].post(CHAT, content=b"{", headers={"Content-Type": "application/json"})
    assert answer.status_code == 422 and "JSON" in answer.json()["error"]["message"]


def test_chat_without_a_template(client):
    for path, body in ((CHAT, {"messages": HELLO}), (RESPONSE, {"input": "Hello"})):
        answer = client["plain"].post(path, json=body)
        assert answer.status_code == 400
        assert "has no chat template" in answer.json()["error"]["message"]
    answer = client["plain"].post(TEXT, json={"prompt": "Once", "max_tokens": 3})
    assert answer.status_code == 200 and len(answer.json()["choices"][0]["text"]) == 3


def test_an_error_of_the_server_is_json_too(client):
    with mock.patch.object(FracForCausalLM, "generate", side_effect=RuntimeError("out of luck")):
        answer = client["plain"].post(TEXT, json={"prompt": "Once", "max_tokens": 3})
    error = {"message": "RuntimeError: out of luck", "type": "server_error", "code": 500}
    assert (answer.status_code, answer.json()) == (500, {"error": error})


def test_continuous_batching_is_refused(checkpoint):
    with pytest.raises(ValueError, match="--continuous-batching pages keys and values"):
        serve(str(checkpoint), ["--continuous-batching"])


def test_the_extra_is_named(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(ImportError, match=r"frac serve needs fastapi: .*flash-frac\[serve\]"):
        serve(str(checkpoint))


def test_exporting_names_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint must be a folder with a config\.json"):
        export(tmp_path, tmp_path / "new")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="must be of a Frac model, got model_type 'llama'"):
        export(tmp_path, tmp_path / "new")
    (tmp_path / "config.json").write_text('{"model_type": "frac"}')
    with pytest.raises(ValueError, match="folder must not exist yet"):
        export(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
