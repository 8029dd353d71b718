"""Clients of a server with OpenAI's API, in a separate process: `python clients.py < JSON`.

Only Python's standard library is imported, so the process starts fast, runs on any machine and
spends microseconds per event. Standard input is one object (see `Load`), and standard output is a
list with one object per request (see `ask`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, TypedDict


class Load(TypedDict):
    """Requests of one process: each client sends its own in sequence, all clients concurrently.

    seconds: a client repeats its requests until this time has passed; with 0 it sends each once.
    """

    port: int
    path: str
    clients: list[list[dict[str, Any]]]
    seconds: float


async def run(load: Load) -> list[dict[str, Any]]:
    """Run all clients of a process; return results in the order of the clients."""
    done = await asyncio.gather(*(_client(load, requests) for requests in load["clients"]))
    return [result for results in done for result in results]


async def _client(load: Load, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results, begin = [], time.monotonic()
    while True:
        for body in requests:
            results.append(await ask(load["port"], load["path"], body))
        if time.monotonic() - begin >= load["seconds"]:
            return results


async def ask(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one streaming request; return its timing and text.

    Returns:
        status; start, times: when it was sent and its events came, in seconds of the monotonic
        clock, which all processes share; counts: words (tokens) of each event; text: all of them.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    start = time.monotonic()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    texts, times = [], []
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        status, error = int(lines[0].split()[1]), ""
        if status != 200:
            error = (await reader.read(1000)).decode(errors="replace")
        else:
            async for event in _events(reader):
                if "error" in event:
                    status, error = 500, json.dumps(event["error"])
                elif text := text_of(event):
                    texts.append(text)
                    times.append(time.monotonic())
    finally:
        writer.close()
    counts = [len(text.split()) for text in texts]
    found = {"status": status, "error": error, "start": start, "end": time.monotonic()}
    return found | {"times": times, "counts": counts, "text": "".join(texts)}


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The objects of an event stream with chunked encoding."""
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            data = event.partition(b"data: ")[2]
            if data and data != b"[DONE]":
                yield json.loads(data)


def text_of(event: dict[str, Any]) -> str:
    """The text of an event of a chat or a completion.

    Example: `text_of({"choices": [{"text": "Hello"}]}) == "Hello"`
    """
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return choices[0].get("text") or delta.get("content") or ""


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
