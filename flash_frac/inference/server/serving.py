"""OpenAI's API over HTTP for one Frac model: many concurrent clients on one engine."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flash_frac.extras import require
from flash_frac.inference.engine import Engine
from flash_frac.inference.generation_settings import settings_of
from flash_frac.inference.prefixes import PrefixStates
from flash_frac.inference.server.prompts import DEFAULT_NEW_TOKENS, Defaults
from flash_frac.models.loading import (
    find_checkpoint,
    find_device,
    find_tokenizer,
    load_model,
)

GIB = 2**30
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Those of uvicorn.
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_BUDGETS = ("prefix_device_gib", "prefix_host_gib", "prefix_disk_gib")
# Maximum seconds that the engine's thread waits for the GIL while the event loop is busy. Python's
# default, 5 ms, is as long as a step.
SWITCH_SECONDS = 1e-4


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server; docs/serving.md gives the cost of each.

    Attributes:
        host, port: address to listen on.
        device: auto, cpu, cuda or cuda:1; auto uses a GPU if there is one.
        served_model_name: name of the model in the API; by default, the checkpoint as given.
        dtype: dtype of the weights; auto keeps that of the checkpoint.
        quantize: int8 or fp8 for 8-bit weights; None keeps them as they are.
        slots, max_length, piece, max_waiting: as in `Engine`.
        prefix_device_gib, prefix_host_gib, prefix_disk_gib: budgets of the prefix cache, as in
            `PrefixStates`; without any budget there is none.
        prefix_folder: folder of the prefix cache on disk, which the next server reuses.
        prefix_spacing: tokens between cached states of a prompt.
        shutdown_timeout: seconds for running requests to finish when the server is told to stop;
            then they are cancelled.
        cors: allow requests from pages of other sites.
        log_level: log level of the HTTP server.

    Example: `ServerOptions(port=9000, slots=256)`
    """

    host: str = "localhost"
    port: int = 8000
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    slots: int = 64
    max_length: int | None = None
    piece: int = 2048
    max_waiting: int = 1024
    prefix_device_gib: float = 1.0
    prefix_host_gib: float = 0.0
    prefix_disk_gib: float = 0.0
    prefix_folder: Path | None = None
    prefix_spacing: int = 512
    shutdown_timeout: int = 300
    cors: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(
                f"dtype must be auto or one of {', '.join(DTYPES)}, got {self.dtype!r}; for "
                "weights of 8 bits use quantize"
            )
        if self.log_level.lower() not in LOG_LEVELS:
            raise ValueError(
                f"log_level must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}"
            )
        for name in (*_BUDGETS, "shutdown_timeout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


def serve(checkpoint: str, options: ServerOptions | None = None, *, tokenizer: Any = None) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish running requests and stop.

    Requests that run longer than `options.shutdown_timeout` are cancelled.

    Args:
        checkpoint: folder or hub id of a model; NAME@REVISION selects a revision.
        tokenizer: replaces the checkpoint's own.

    Example: `serve("my-frac", ServerOptions(host="0.0.0.0", slots=256))`
    """
    for module in ("starlette", "uvicorn"):
        require(module, "serve", "frac serve")
    import uvicorn

    options = ServerOptions() if options is None else options
    app = make_app(checkpoint, options, tokenizer=tokenizer)
    sys.setswitchinterval(SWITCH_SECONDS)
    # uvicorn raises the signal again after it has shut down; with the default handler, the process
    # would end as if it had been killed.
    signal.signal(signal.SIGTERM, lambda *unused: None)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level=options.log_level.lower(),
        timeout_graceful_shutdown=options.shutdown_timeout,
    )
    uvicorn.Server(config).run()


def make_app(checkpoint: str, options: ServerOptions, *, tokenizer: Any = None) -> Any:
    """Build the application of a server, and start its engine.

    Example: `make_app("my-frac", ServerOptions(device="cpu"))`
    """
    from flash_frac.inference.server.app import Service, build_app

    device = find_device(options.device)
    name, _, revision = checkpoint.partition("@")
    found = find_checkpoint(name, revision=revision or None)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    model = load_model(found, dtype=dtype, quantize=options.quantize).to(device).eval()
    engine = make_engine(model, tokenizer, options)
    settings = settings_of(model.generation_config)
    lengths = [engine.max_length, None if settings.max_new_tokens else settings.max_length]
    defaults = Defaults(
        sampling=settings.sampling,
        eos_token_ids=settings.eos_token_ids,
        max_new_tokens=settings.max_new_tokens or DEFAULT_NEW_TOKENS,
        max_length=min((length for length in lengths if length is not None), default=None),
        stop=settings.stop,
    )
    served = options.served_model_name or checkpoint.rstrip("/")
    service = Service(served, engine, tokenizer, defaults, created=int(time.time()))
    engine.start()

    def end() -> None:
        engine.stop()
        if engine.prefixes is not None and options.prefix_folder is not None:
            engine.prefixes.save()
            engine.prefixes.close()

    return build_app(service, cors=options.cors, on_end=end)


def make_engine(model: Any, tokenizer: Any, options: ServerOptions) -> Engine:
    """Build the engine of a server, without starting it."""
    device_bytes, host_bytes, disk_bytes = (int(GIB * getattr(options, x)) for x in _BUDGETS)
    prefixes = None
    if device_bytes or host_bytes or disk_bytes or options.prefix_folder is not None:
        prefixes = PrefixStates(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            folder=options.prefix_folder,
            spacing=options.prefix_spacing,
        )
    return Engine(
        model,
        slots=options.slots,
        max_length=options.max_length,
        piece=options.piece,
        max_waiting=options.max_waiting,
        tokenizer=tokenizer,
        prefixes=prefixes,
    )
