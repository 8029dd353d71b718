"""OpenAI's API over HTTP for one Frac model: many clients at once on one engine."""

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
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

GIB = 2**30
_BUDGETS = ("prefix_device_gib", "prefix_host_gib", "prefix_disk_gib")
# The engine's thread waits this long at most for Python's lock while the event loop is busy; by
# default 5 ms, which is as long as a step.
SWITCH_SECONDS = 1e-4


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server runs; docs/serving.md says what each costs.

    Attributes:
        host, port: where it listens.
        device: auto, cpu, cuda or cuda:1; auto takes a GPU if there is one.
        dtype: of the weights, auto for that of the checkpoint.
        slots, max_length, piece, max_waiting: as in `Engine`.
        prefix_device_gib, prefix_host_gib, prefix_disk_gib: budgets of prefix states, as in
            `PrefixStates`; without any budget there are none.
        prefix_folder: for those on disk, which the next server finds there.
        prefix_spacing: tokens between those of a prompt.
        cors: whether pages of other sites may ask.
        log_level: of the HTTP server.

    Example: `ServerOptions(port=9000, slots=256)`
    """

    host: str = "localhost"
    port: int = 8000
    device: str = "auto"
    dtype: str = "auto"
    slots: int = 64
    max_length: int | None = None
    piece: int = 2048
    max_waiting: int = 1024
    prefix_device_gib: float = 1.0
    prefix_host_gib: float = 0.0
    prefix_disk_gib: float = 0.0
    prefix_folder: Path | None = None
    prefix_spacing: int = 512
    cors: bool = False
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.dtype != "auto" and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be auto or a dtype of torch, got {self.dtype!r}")
        for name in _BUDGETS:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


def serve(checkpoint: str, options: ServerOptions | None = None, *, tokenizer: Any = None) -> None:
    """Answer requests until SIGTERM or Ctrl-C; those under way are answered before it ends.

    Args:
        checkpoint: folder or hub id of a model, NAME@REVISION for one of its revisions.
        tokenizer: instead of the checkpoint's own.

    Example: `serve("my-frac", ServerOptions(host="0.0.0.0", slots=256))`
    """
    for module in ("starlette", "uvicorn"):
        require(module, "serve", "frac serve")
    import uvicorn

    options = ServerOptions() if options is None else options
    app = make_app(checkpoint, options, tokenizer=tokenizer)
    sys.setswitchinterval(SWITCH_SECONDS)
    # uvicorn raises a signal again once it has ended because of it; the default would then make the
    # process end as if it had been killed.
    signal.signal(signal.SIGTERM, lambda *unused: None)
    config = uvicorn.Config(
        app, host=options.host, port=options.port, log_level=options.log_level.lower()
    )
    uvicorn.Server(config).run()


def make_app(checkpoint: str, options: ServerOptions, *, tokenizer: Any = None) -> Any:
    """The application of a server, with its engine started.

    Example: `make_app("my-frac", ServerOptions(device="cpu"))`
    """
    from flash_frac.inference.server.app import Service, build_app

    name, _, revision = checkpoint.partition("@")
    found = find_checkpoint(name, revision=revision or None)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    model = load_model(found, dtype=dtype).to(device).eval()
    engine = make_engine(model, tokenizer, options)
    settings = settings_of(model.generation_config)
    defaults = Defaults(
        sampling=settings.sampling,
        eos_token_ids=settings.eos_token_ids,
        max_new_tokens=settings.max_new_tokens or DEFAULT_NEW_TOKENS,
        max_length=engine.max_length,
    )
    service = Service(checkpoint, engine, tokenizer, defaults, created=int(time.time()))
    engine.start()

    def end() -> None:
        engine.stop()
        if engine.prefixes is not None and options.prefix_folder is not None:
            engine.prefixes.save()

    return build_app(service, cors=options.cors, on_end=end)


def make_engine(model: Any, tokenizer: Any, options: ServerOptions) -> Engine:
    """The engine of a server, not started yet."""
    device_bytes, host_bytes, disk_bytes = (int(GIB * getattr(options, x)) for x in _BUDGETS)
    prefixes = None
    if device_bytes or host_bytes or disk_bytes:
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
