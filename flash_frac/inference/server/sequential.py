"""OpenAI's API over HTTP with `transformers serve`, which answers one request after another.

It has features that our own server lacks: weights of bitsandbytes, and tool calls as answer fields.

Three of its parts are replaced. Models are loaded by `flash_frac.models.loading`, which rejects
broken checkpoints. Requests are checked: a client's mistake gets status 4xx and
{"error": {"message": ..., "type": "invalid_request_error", "code": 4xx}}. An answer stops early
if its client has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import typer

from flash_frac.extras import require
from flash_frac.inference.server.leaving import NoticeLeaving, stop_when_gone
from flash_frac.inference.server.requests import INPUTS, is_callers_mistake, request_problem
from flash_frac.models.loading import (
    Found,
    find_checkpoint,
    find_device,
    find_tokenizer,
    load_model,
    one_line,
)

# The kind of request that each handler serves.
_KINDS = {
    "ChatCompletionHandler": "chat",
    "CompletionHandler": "completion",
    "ResponseHandler": "response",
    "TranscriptionHandler": "transcription",
}


# Options that both servers have, by our names.
_SHARED = {
    **{name: f"--{name}" for name in ("host", "port", "device", "dtype")},
    "log_level": "--log-level",
}


def options_for(given: Mapping[str, Any]) -> list[str]:
    """Our options as those of `transformers serve`; a ValueError names those it does not have.

    Example: `options_for({"port": 9000}) == ["--port", "9000"]`
    """
    unknown = [f"--{name.replace('_', '-')}" for name in given if name not in _SHARED]
    if unknown:
        raise ValueError(f"--sequential has no engine to configure: omit {', '.join(unknown)}")
    find_device(str(given.get("device", "auto")))
    return [word for name, value in given.items() for word in (_SHARED[name], str(value))]


def serve_sequentially(
    checkpoint: str, options: Sequence[str] = (), *, tokenizer: Any = None
) -> None:
    """Answer requests until interrupted.

    Args:
        checkpoint: folder or hub id of the model to serve.
        options: options of `transformers serve`, such as ["--port", "9000"].
        tokenizer: replaces the checkpoint's own.

    Example: `serve_sequentially("my-frac", ["--host", "0.0.0.0"])`
    """
    if any(option == "--continuous-batching" for option in options):
        raise ValueError(
            "--continuous-batching and --sequential cannot be combined; pass one: without "
            "--sequential, frac serve always batches requests"
        )
    for module in ("fastapi", "uvicorn", "openai"):
        require(module, "serve", "frac serve --sequential")
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager, server, utils

    name, _, revision = checkpoint.partition("@")
    trusted = "--trust-remote-code" in options
    found = find_checkpoint(name, revision=revision or None, trust_remote_code=trusted)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(Serve)
    manager = _manager_of(model_manager.ModelManager, found, tokenizer)
    generating = utils.GenerateManager
    with (
        patch.object(generating, "async_submit", stop_when_gone(generating.async_submit)),
        # Patch these modules, because Serve imports from both when it is called.
        patch.object(model_manager, "ModelManager", manager),
        patch.object(server, "build_server", _checked(server.build_server, tokenizer)),
    ):
        command([checkpoint, *options], prog_name="frac serve --sequential", standalone_mode=False)


def _manager_of(base: type[Any], found: Found, tokenizer: Any) -> type[Any]:
    """A subclass of the server's model manager that holds one checkpoint."""
    from fastapi import HTTPException

    started = int(time.time())

    class Manager(base):
        def _load_processor(self, *unused: Any, **options: Any) -> Any:
            return tokenizer

        def _load_model(self, *unused: Any, **options: Any) -> Any:
            quantization = self.get_quantization_config()
            return load_model(
                found,
                dtype=self.dtype,
                device_map=self.device,
                attn_implementation=self.attn_implementation,
                **({} if quantization is None else {"quantization_config": quantization}),
            )

        def load_model_streaming(self, model: str, *unused: Any, **options: Any) -> Any:
            """Reject another model before the answer begins."""
            if model != self.process_model_name(self.force_model):
                raise HTTPException(400, f"this server only has the model {self.force_model}")
            return super().load_model_streaming(model, *unused, **options)

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            """List only the served model, whatever the hub's cache holds."""
            return [{"id": self.force_model, "object": "model", "created": started, "owned_by": ""}]

    return Manager


def _checked(build_server: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
    """`build_server` with checks around its handlers, and errors as JSON."""
    from fastapi import HTTPException
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException as StarletteException

    def guard(kind: str, handle: Callable[..., Any]) -> Callable[..., Any]:
        async def checked(body: Any, *rest: Any) -> Any:
            if kind == "transcription":
                raise HTTPException(404, "this server has no speech model")
            if kind in INPUTS and (problem := request_problem(kind, body, tokenizer)):
                raise HTTPException(400, problem)
            try:
                return await handle(body, *rest)
            except Exception as error:
                if not is_callers_mistake(error):
                    raise
                raise HTTPException(400, one_line(error)) from error

        return checked

    def build(*given: Any, **named: Any) -> Any:
        for part in (*given, *named.values()):
            if hasattr(part, "handle_request"):
                kind = _KINDS.get(type(part).__name__, "")
                part.handle_request = guard(kind, part.handle_request)
        app = build_server(*given, **named)
        for kind in (StarletteException, RequestValidationError, Exception):
            app.add_exception_handler(kind, _answer)
        app.add_middleware(NoticeLeaving)
        return app

    return build


async def _answer(request: Any, error: Any) -> Any:
    """An error as OpenAI's clients expect it. Errors that are not the client's are logged."""
    from fastapi.responses import JSONResponse

    if hasattr(error, "errors"):
        parts = (f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        status, message = 422, "; ".join(parts)
    else:
        status = getattr(error, "status_code", 500)
        message = one_line(getattr(error, "detail", None) or f"{type(error).__name__}: {error}")
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
