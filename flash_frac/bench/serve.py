"""Load tests of servers with OpenAI's API: tokens/s, time to first token, latency, memory.

Every row has the columns below. first_ms is the time from a request to its first text; between_ms
is the time between events of a stream, which may bring several tokens; tokens_per_s counts all
tokens of all clients from the first request to the last token. held_mib is the memory of the
server's process on the GPU, or its resident memory on a CPU.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_frac.bench.peers import qwen3
from flash_frac.bench.rows import MADE_WITH
from flash_frac.bench.servers import FRAC, TRANSFORMERS, Server, running, write_checkpoint
from flash_frac.bench.timing import OURS, attempt, exit_if_ours_failed
from flash_frac.models import FracConfig

SERVE_COLUMNS = (
    *("implementation", "scenario", "clients", "prompt_tokens", "new_tokens", "requests", "dtype"),
    *("tokens_per_s", "first_ms_p50", "first_ms_p95", "between_ms_p50", "between_ms_p95"),
    "held_mib",
    *MADE_WITH,
)
SERVERS = ("ours", "qwen3", "sequential")
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sizes of the load.

    Attributes:
        clients: numbers of concurrent clients of the plain load.
        sequential: the same for the sequential server.
        prompt, new: tokens of a request and of its answer.
        rounds: requests per client.
        shared, question: tokens of a shared system prompt, and of the question after it.
        long: tokens of prompts that arrive while others decode, for `seconds`.
        conversations: number of conversations; each has `turn` tokens and continues by as many.
        processes: number of client processes.
        device_gib: prefix cache on the device, for all scenarios that use one.
    """

    clients: Sequence[int] = (1, 8, 64, 256)
    sequential: Sequence[int] = (1, 8)
    prompt: int = 1024
    new: int = 256
    rounds: int = 2
    shared: int = 4096
    question: int = 64
    long: int = 16384
    seconds: float = 10
    conversations: int = 4096
    turn: int = 64
    processes: int = 8
    device_gib: float = 64


SMOKE = Load(
    clients=(1, 3),
    sequential=(1,),
    prompt=12,
    new=4,
    shared=40,
    question=4,
    long=64,
    seconds=0.5,
    conversations=4,
    turn=8,
    processes=2,
    device_gib=0.01,
)


SMOKE_CONFIG = FracConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    frac_num_modes=4,
)


class Words:
    """Random words of the benchmark's tokenizer, the same in every run."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.random = vocab_size, random.Random(seed)

    def __call__(self, number: int) -> str:
        return " ".join(f"w{self.random.randrange(self.vocab_size)}" for _ in range(number))


def completion(prompt: str, new: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": new, "temperature": 0}


def quantile(values: Sequence[float], percent: int) -> float | None:
    """A percentile of any number of values; None if there are none.

    Example: `quantile([1.0, 2.0, 3.0], 50) == 2.0`
    """
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def make_row(
    server: Server, scenario: str, clients: int, prompt: int, new: int, results: list[dict]
) -> dict[str, Any]:
    """The columns computed from results; an answer of another length is an error."""
    wrong = [sum(result["counts"]) for result in results if sum(result["counts"]) != new]
    if wrong:
        raise RuntimeError(f"{scenario}: answers must have {new} tokens, got {wrong[:5]}")
    first = [1e3 * (result["times"][0] - result["start"]) for result in results]
    gaps = [
        1e3 * (late - early)
        for result in results
        for early, late in zip(result["times"], result["times"][1:], strict=False)
    ]
    begin = min(result["start"] for result in results)
    seconds = max(result["times"][-1] for result in results) - begin
    row = {
        "implementation": server.name,
        "scenario": scenario,
        "clients": clients,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "requests": len(results),
        "tokens_per_s": len(results) * new / seconds,
        "held_mib": server.held() / 2**20,
    }
    for name, values in (("first", first), ("between", gaps)):
        row |= {f"{name}_ms_p{percent}": quantile(values, percent) for percent in (50, 95)}
    return {name: round(x, 2) if isinstance(x, float) else x for name, x in row.items()}


def plain(server: Server, load: Load, words: Words, numbers: Sequence[int]) -> Iterator[dict]:
    """Prompts without common prefixes, from more and more clients."""
    for number in numbers:
        for new, rounds in ((min(8, load.new), 1), (load.new, load.rounds)):
            asked = [
                [completion(words(load.prompt), new) for _ in range(rounds)] for _ in range(number)
            ]
            # The first round warms up the server, which records a graph per number of slots.
            results = server.send(COMPLETIONS, asked, processes=load.processes)
        yield make_row(server, "plain", number, load.prompt, load.new, results)


def shared(server: Server, load: Load, words: Words, scenario: str) -> Iterator[dict]:
    """Prompts with the same system prompt, from eight clients."""
    system = words(load.shared)

    def ask() -> dict[str, Any]:
        return completion(f"{system} {words(load.question)}", load.new)

    number = min(8, max(load.clients))
    server.send(COMPLETIONS, [[ask(), ask()]], processes=1)
    asked = [[ask() for _ in range(load.rounds)] for _ in range(number)]
    results = server.send(COMPLETIONS, asked, processes=load.processes)
    yield make_row(server, scenario, number, load.shared + load.question, load.new, results)


def beside_long(server: Server, load: Load, words: Words) -> Iterator[dict]:
    """Streams of many clients while another one keeps sending long prompts."""
    number = min(64, max(load.clients))
    asked = [[completion(words(load.prompt), load.new)] for _ in range(number)]
    long = [[completion(words(load.long), 1) for _ in range(4)]]
    server.send(COMPLETIONS, long[:1], processes=1)
    beside = threading.Thread(
        target=server.send,
        args=(COMPLETIONS, long),
        kwargs={"processes": 1, "seconds": load.seconds},
    )
    beside.start()
    results = server.send(
        COMPLETIONS, asked, processes=max(1, load.processes - 1), seconds=load.seconds
    )
    beside.join()
    scenario = f"beside prompts of {load.long}"
    yield make_row(server, scenario, number, load.prompt, load.new, results)


def conversations(server: Server, load: Load, words: Words) -> Iterator[dict]:
    """Start many conversations, then continue each once from one client."""
    prompts = [words(load.turn) for _ in range(load.conversations)]
    number = min(64, load.conversations)
    asked = [[completion(text, load.turn) for text in prompts[n::number]] for n in range(number)]
    begun = server.send(COMPLETIONS, asked, processes=load.processes)
    order = [n for first in range(number) for n in range(first, len(prompts), number)]
    said = dict(zip(order, (result["text"] for result in begun), strict=True))
    scenario = f"{load.conversations} conversations"
    yield make_row(server, f"{scenario}, begun", number, load.turn, load.turn, begun)
    # By index, which is not the order of last use.
    turns = [f"{prompts[n]} {said[n]} {words(load.turn)}" for n in range(len(prompts))]
    results = server.send(COMPLETIONS, [[completion(text, 2) for text in turns]], processes=1)
    yield make_row(server, f"{scenario}, continued", 1, 3 * load.turn, 2, results)


def measure(
    config: Any, load: Load, *, servers: Sequence[str] = SERVERS, logs: Path | None = None
) -> Iterator[dict]:
    """Yield the rows of all scenarios as they are measured.

    A server that fails is skipped; if it is ours, an error is raised at the end.

    Args:
        config: configuration of our model; Qwen3 is built in its size.
        servers: names in SERVERS.
        logs: folder for the servers' output, which is discarded by default.

    Example: `for row in measure(SMOKE_CONFIG, SMOKE): print(row)`
    """
    if unknown := set(servers) - set(SERVERS):
        raise ValueError(f"servers must be among {', '.join(SERVERS)}, got {', '.join(unknown)}")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), Path(folder) if logs is None else logs, dtype)
        place.logs.mkdir(parents=True, exist_ok=True)
        for name in servers:
            label = OURS if name == "ours" else name
            rows = {"ours": _ours, "qwen3": _qwen3, "sequential": _sequential}[name]
            for row in _until_failure(label, rows(config, load, place), failures):
                yield row | {"dtype": str(dtype).removeprefix("torch.")}
    exit_if_ours_failed(failures)


class Place(NamedTuple):
    """Folders for checkpoints and logs, and the dtype of weights."""

    folder: Path
    logs: Path
    dtype: torch.dtype

    def checkpoint(self, config: Any) -> str:
        """A checkpoint of this configuration, written once."""
        folder = self.folder / config.model_type
        return str(folder if folder.exists() else write_checkpoint(config, folder, self.dtype))


def _until_failure(label: str, rows: Iterator[dict], failures: list[str]) -> Iterator[dict]:
    """Yield rows as they come, up to the first that cannot be measured."""
    while found := attempt(label, lambda: next(rows, None), failures):
        if found[0] is None:
            return
        yield found[0]


def _ours(config: Any, load: Load, place: Place) -> Iterator[dict]:
    name, words = f"{OURS} frac serve", Words(config.vocab_size)
    slots = ["--slots", str(max(load.clients))]
    command = [*FRAC, "serve", place.checkpoint(config), *slots, "--prefix-device-gib"]
    with running(name, [*command, "0"], place.logs / "ours.log") as server:
        yield from plain(server, load, words, load.clients)
        yield from beside_long(server, load, words)
        yield from shared(server, load, words, "shared prompt, no prefix states")
    with running(name, [*command, str(load.device_gib)], place.logs / "prefixes.log") as server:
        yield from shared(server, load, words, "shared prompt")
        yield from conversations(server, load, words)


def _qwen3(config: Any, load: Load, place: Place) -> Iterator[dict]:
    """transformers' server with its own continuous batching and paged KV cache."""
    peer, words = qwen3(config), Words(config.vocab_size)
    command = [*TRANSFORMERS, "serve", place.checkpoint(peer.config), "--continuous-batching"]
    with running(f"{peer.name} transformers serve", command, place.logs / "qwen3.log") as server:
        yield from plain(server, load, words, load.clients)
        yield from beside_long(server, load, words)
        yield from shared(server, load, words, "shared prompt")


def _sequential(config: Any, load: Load, place: Place) -> Iterator[dict]:
    """transformers' server with our model, answering one request after another."""
    command = [*FRAC, "serve", place.checkpoint(config), "--sequential"]
    name, log = "frac serve --sequential", place.logs / "sequential.log"
    with running(name, command, log) as server:
        yield from plain(server, load, Words(config.vocab_size), load.sequential)
