"""Servers on loopback: a client gets what `model.generate` returns.

`frac serve` for a Frac and a hybrid model, and with --sequential; `transformers serve`, with
continuous batching on our engine, for an exported model.
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
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from flash_frac.models import FracForCausalLM
from flash_frac.models.export import export
from tests.commands import start
from tests.inference.servers import HELLO, SECONDS, asking, expected, letters_tokenizer, until
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[2]
TRANSFORMERS = "from transformers.cli.transformers import main; main()"


@pytest.fixture(scope="module", params=["frac", "hybrid", "sequential", "exported"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
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
def server(checkpoint, tmp_path_factory):
    """The process of a server that runs until the last test is done, and its address."""
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason="pip install 'flash-frac[serve]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    if checkpoint.name == "copy":
        process = TransformersServer(checkpoint, options, tmp_path_factory.mktemp("transformers"))
    elif "sequential" in str(checkpoint):
        process = start("serve", checkpoint, *options, "--sequential")
    else:
        process = start("serve", checkpoint, *options)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process)
        yield process, address
    finally:
        process.terminate()
        process.join(20)
        process.kill()


class TransformersServer:
    """Transformers' own server in a new process, with the interface of `start`'s."""

    def __init__(self, checkpoint, options, folder):
        self.output = folder / "server.log"
        command = [sys.executable, "-c", TRANSFORMERS, "serve", str(checkpoint), *options]
        with self.output.open("w") as file:
            self._process = subprocess.Popen(
                [*command, "--trust-remote-code", "--continuous-batching"],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                # Code of checkpoints is copied there.
                env=os.environ | {"HF_HOME": str(folder)},
            )
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def exitcode(self):
        return self._process.poll()

    def join(self, seconds):
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


@pytest.fixture
def url(server):
    return server[1]


def is_ours(checkpoint):
    """Whether our own server answers."""
    return checkpoint.name != "copy" and "sequential" not in str(checkpoint)


def wait_for(address, server):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.exitcode is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert json.load(answer) == {"status": "ok"}
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"no server at {address}: {server.output.read_text()[-2000:]}")


def post(address, body):
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


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


def test_a_client_that_leaves_frees_its_slot(url, checkpoint):
    if not is_ours(checkpoint):
        pytest.skip("transformers' server has no metrics")
    for stream in (True, False):
        with asking(url, {"prompt": "Once", "max_tokens": 3000, "stream": stream}):
            until(lambda: metric(url, "frac_requests_running") == 1)
        until(lambda: metric(url, "frac_requests_running") == 0)
    assert metric(url, 'frac_requests_total{reason="cancelled"}') == 2


def test_a_client_that_leaves_holds_nobody_up(url, checkpoint):
    """Where one answer follows another, the next begins at once."""
    if "sequential" not in str(checkpoint):
        pytest.skip("the engine's metrics show it, and transformers batches what it is asked")
    began = time.monotonic()
    for stream in (True, False):
        # An hour of tokens.
        with asking(url, {"prompt": "Once", "max_tokens": 5_000_000, "stream": stream}):
            time.sleep(1)
        answer = post(f"{url}/v1/completions", {"prompt": "Once upon", "max_tokens": 20})
        assert answer["choices"][0]["text"] == expected(checkpoint, "Once upon", 20)
    assert time.monotonic() - began < 30


def metric(url, name):
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name} "))
    return float(line.split()[-1])


def test_the_client_of_the_document(url, checkpoint):
    """docs/serving.md, as a reader would type it: OpenAI's client, token by token."""
    page = (ROOT / "docs/serving.md").read_text()
    text, chat = re.findall(r"```python[^\n]*\n(from openai.*?)```", page, re.DOTALL)
    prompts = {text: "The memory of", chat: HELLO} if is_ours(checkpoint) else {chat: HELLO}
    for block, prompt in prompts.items():
        for name in ("my-frac", "my-chat"):
            block = block.replace(name, str(checkpoint))
        names: dict = {}
        code = block.replace("http://localhost:8000", url)
        exec(compile(code, "docs/serving.md", "exec"), names)
        assert names["answer"] == expected(checkpoint, prompt, 20)


def test_sigterm_lets_requests_end(server, checkpoint):
    """The last test of a server."""
    if not is_ours(checkpoint):
        pytest.skip("transformers' server ends otherwise")
    process, url = server
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": "Once", "max_tokens": 400}
        answers = [pool.submit(post, f"{url}/v1/completions", body) for _ in range(2)]
        until(lambda: metric(url, "frac_requests_running") == 2)
        process.terminate()
        lengths = [answer.result(SECONDS)["usage"]["completion_tokens"] for answer in answers]
    process.join(SECONDS)
    assert lengths == [400, 400] and process.exitcode == 0
    with pytest.raises(urllib.error.URLError):
        post(f"{url}/v1/completions", body)
