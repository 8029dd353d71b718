"""Servers to measure, each in its own process on loopback, with random weights.

Each token of the tokenizer is one word, so a prompt of n words has n tokens, and the words of an
answer can be counted.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flash_frac.bench import clients
from flash_frac.bench.parts import build

# The `transformers` command, which may not be on the PATH.
TRANSFORMERS = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
FRAC = [sys.executable, "-m", "flash_frac.cli"]
START_SECONDS = 600
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def words_tokenizer(vocab_size: int) -> Any:
    """One token for each word w0, w1, ..., and a chat template that adds no tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{n}": n for n in range(vocab_size)}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE)


def write_checkpoint(config: Any, folder: Path, dtype: torch.dtype) -> Path:
    """Write a model with random weights that never ends an answer by itself, and its tokenizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(config, dtype, device)
    model.generation_config.pad_token_id = None
    model.save_pretrained(folder)
    words_tokenizer(config.vocab_size).save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


@dataclass
class Server:
    """A running server: its address and memory."""

    name: str
    port: int
    process: subprocess.Popen
    used_before: int

    def held(self) -> int:
        """Bytes used: on a GPU all since the start, on a CPU those of the process."""
        if torch.cuda.is_available():
            return _gpu_bytes() - self.used_before
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return 1024 * int(line.split()[1])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def send(
        self, path: str, asked: Sequence[Sequence[dict]], *, processes: int, seconds: float = 0
    ) -> list[dict[str, Any]]:
        """Results of concurrent clients that each send their requests in sequence.

        Args:
            asked: the requests of each client.
            processes: number of client processes.
            seconds: how long they repeat them, see `clients.Load`.
        """
        shares = [asked[n::processes] for n in range(min(processes, len(asked)))]
        with ThreadPoolExecutor(len(shares)) as pool:
            load = {"port": self.port, "path": path, "seconds": seconds}
            done = list(pool.map(lambda share: _run_clients(load | {"clients": share}), shares))
        results: list[Any] = [None] * sum(map(len, done))
        if seconds == 0:
            # Restore the order of the clients; each has as many results as requests.
            sizes = [len(requests) for requests in asked]
            starts = [sum(sizes[:n]) for n in range(len(sizes))]
            for n, found in enumerate(done):
                rest = iter(found)
                for place in range(n, len(asked), processes):
                    for k in range(sizes[place]):
                        results[starts[place] + k] = next(rest)
        else:
            results = [result for found in done for result in found]
        failed = [result for result in results if result["status"] != 200]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]['error'][:300]}")
        return results


def _run_clients(load: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(clients.__file__))]
    done = subprocess.run(command, input=json.dumps(load), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"clients failed: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def _gpu_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@contextmanager
def running(name: str, command: Sequence[str], log: Path) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and stop it with SIGTERM.

    Args:
        command: its command without the port.
        log: file for its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    used = _gpu_bytes() if torch.cuda.is_available() else 0
    typed = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            typed, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    server = Server(name, port, process, used)
    try:
        _wait(server, log)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{server.name} did not start: {log.read_text()[-1500:]}")
