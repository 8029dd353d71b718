"""The server as an ASGI application: OpenAI's endpoints, /health and /metrics, on one engine."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from transformers.utils import logging

from flash_frac.inference.scheduling import EngineStopped, QueueFull, Request, in_words
from flash_frac.inference.server.answers import Answer, Answers
from flash_frac.inference.server.bodies import BODIES, Token, Usage, error_fields, event
from flash_frac.inference.server.leaving import wait_until_gone
from flash_frac.inference.server.metrics import Metrics
from flash_frac.inference.server.prompts import Defaults, make_request, read_prompt
from flash_frac.inference.server.requests import is_callers_mistake, request_problem, unanswerable
from flash_frac.inference.server.shown_text import ShownText, named_token
from flash_frac.models.loading import one_line

logger = logging.get_logger(__name__)

PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
}
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass
class Service:
    """One model and the engine that serves it.

    Attributes:
        name: name of the model in the API.
        engine: a running Engine.
        defaults: settings for fields that a request leaves out.
        template_options: for the chat template, unless a request has its own.
    """

    name: str
    engine: Any
    tokenizer: Any
    defaults: Defaults
    created: int = 0
    template_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.answers = Answers(self.engine, self.metrics)

    def check_name(self, name: Any) -> None:
        """404 for a model that this server does not have, as OpenAI's answers."""
        # `frac serve out/` serves the model out.
        if not isinstance(name, str) or name.rstrip("/") != self.name.rstrip("/"):
            raise HTTPException(404, f"this server only has the model {self.name}, got {name!r}")

    def about(self) -> dict[str, Any]:
        """The served model, as /v1/models shows it."""
        model = {"id": self.name, "object": "model", "created": self.created}
        return model | {"owned_by": "flash-frac"}


def build_app(service: Service, *, cors: bool = False, on_end: Callable[[], None]) -> Starlette:
    """Build the application.

    Args:
        cors: allow requests from pages of other sites.
        on_end: called when the last request has been answered and the server stops.

    Example: `uvicorn.run(build_app(service, on_end=engine.stop))`
    """

    async def health(_: HttpRequest) -> Response:
        failed = service.engine.failed
        if failed is None:
            ready = service.engine.warmed_up
            return JSONResponse({"status": "ok" if ready else "starting"}, 200 if ready else 503)
        reason = one_line(in_words(failed))
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [service.about()]})

    async def one_model(http: HttpRequest) -> Response:
        if not http.path_params["name"]:
            return await models(http)
        service.check_name(http.path_params["name"])
        return JSONResponse(service.about())

    async def metrics(_: HttpRequest) -> Response:
        return PlainTextResponse(service.metrics.text(service.engine))

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(on_end)

    routes = [
        Route(path, _handler(service, kind), methods=["POST"]) for path, kind in PATHS.items()
    ]
    routes += [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models, methods=["GET", "OPTIONS"]),
        # Names of checkpoints contain slashes.
        Route("/v1/models/{name:path}", one_model, methods=["GET", "OPTIONS"]),
    ]
    everyone = Middleware(
        CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]
    )
    app = Starlette(
        routes=routes,
        middleware=[everyone] if cors else [],
        exception_handlers={HTTPException: _refuse, Exception: _refuse},
        lifespan=lifespan,
    )
    app.state.service = service
    return app


async def _refuse(_: HttpRequest, error: Any) -> Response:
    """An error as OpenAI's clients expect it."""
    status = getattr(error, "status_code", 500)
    message = getattr(error, "detail", None) or f"{type(error).__name__}: {error}"
    later = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse(error_fields(one_line(message), status), status, later)


def _handler(service: Service, kind: str) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def handle(http: HttpRequest) -> Response:
        try:
            return await answer(http)
        except RecursionError as error:
            raise HTTPException(400, "the body must not be nested so deeply") from error

    async def answer(http: HttpRequest) -> Response:
        body = await _read_body(http)
        problem = request_problem(kind, body, service.tokenizer) or unanswerable(kind, body)
        if problem is not None:
            raise HTTPException(400, problem)
        if body.get("model") is not None:
            service.check_name(body["model"])
        request = await asyncio.to_thread(_translate, service, kind, body)
        options = body.get("stream_options") or {}
        name = http.headers.get("x-request-id") or uuid.uuid4().hex
        written = BODIES[kind](name, service.name, with_usage=bool(options.get("include_usage")))
        return _Reply(service, request, written, streams=bool(body.get("stream")))

    return handle


async def _read_body(http: HttpRequest) -> dict[str, Any]:
    try:
        content = (await http.body()).decode("utf-8-sig")
        body = json.loads(content)
        # JSON can contain a lone surrogate, which is not valid text and which no tokenizer accepts.
        if "\\ud" in content.lower():
            json.dumps(body, ensure_ascii=False).encode()
    except ValueError as error:
        raise HTTPException(400, f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise HTTPException(400, f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _translate(service: Service, kind: str, body: dict[str, Any]) -> Request:
    """Translate a body into an engine request; runs in a thread, because a prompt may be long."""
    try:
        prompt = read_prompt(kind, body, service.tokenizer, service.template_options)
        return make_request(body, prompt, service.defaults)
    except Exception as error:
        if not is_callers_mistake(error):
            raise
        raise HTTPException(400, one_line(error)) from error


class _Reply(Response):
    """The answer to one request, whole or as events.

    It implements ASGI directly, for speed and to notice when a client leaves.
    """

    def __init__(self, service: Service, request: Request, body: Any, *, streams: bool) -> None:
        self.service, self.request, self.body_of, self.streams = service, request, body, streams
        self.shown = ShownText(service.tokenizer, request.stop)
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service = self.service
        try:
            asked = service.answers.ask(self.request, streams=self.streams)
            async with asked as answer:
                gone = asyncio.ensure_future(wait_until_gone(receive))
                gone.add_done_callback(answer.leave)
                try:
                    await (self._stream if self.streams else self._whole)(answer, send)
                finally:
                    gone.cancel()
        except QueueFull as error:
            service.metrics.refused += 1
            raise HTTPException(429, str(error)) from error
        except EngineStopped as error:
            raise HTTPException(503, str(error)) from error
        except ValueError as error:
            raise HTTPException(400, one_line(error)) from error

    async def _whole(self, answer: Answer, send: Any) -> None:
        await answer.wait_for_end()
        if answer.finished == "gone":
            return
        status = 500 if self.service.engine.failed is None else 503
        fields = error_fields(answer.error or "", status)
        if answer.error is None:
            status, taken = 200, answer.take()
            text = self.shown.add(taken[0]) + self.shown.end()
            tokens = self._logprobs(*taken)
            fields = self.body_of.whole(text, *self._end(answer), tokens)
        data = json.dumps(fields).encode()
        headers = [(b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(data)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, answer: Answer, send: Any) -> None:
        async def write(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        try:
            await self._write_events(answer, write)
        except Exception as error:
            # The status is sent, so only an event can still say it.
            logger.exception("a streamed answer failed")
            await write(event(error_fields(one_line(in_words(error)), 500)), more=False)

    async def _write_events(self, answer: Answer, write: Callable[..., Awaitable[None]]) -> None:
        if opening := self.body_of.opening():
            await write(opening)
        async for taken in answer.parts():
            text = self.shown.add(taken[0])
            if text or (taken[1] and taken[0]):
                await write(self.body_of.piece(text, self._logprobs(*taken)))
        if answer.finished == "gone":
            return
        if answer.error is not None:
            await write(event(error_fields(answer.error, 500)), more=False)
            return
        rest = self.shown.end()
        last = self.body_of.piece(rest, None) if rest else ""
        await write(last + self.body_of.closing(*self._end(answer)), more=False)

    def _end(self, answer: Answer) -> tuple[str, Usage]:
        usage = Usage(len(self.request.prompt), answer.num_tokens, answer.num_cached)
        return "length" if answer.finished == "length" else "stop", usage

    def _logprobs(self, ids: list[int], values: list[float], top: list[Any]) -> list[Token] | None:
        """Each token as text with its logprob and the likeliest tokens, if requested."""
        if self.request.logprobs is None:
            return None
        named = partial(named_token, self.service.tokenizer)
        return [
            Token(*named(id), value, [(*named(other), x) for other, x in others])
            for id, value, others in zip(ids, values, top, strict=True)
        ]
