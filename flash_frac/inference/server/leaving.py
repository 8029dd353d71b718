"""Stop an answer at the next token when its client leaves, in transformers' server.

That server stops only streams by itself. An answer sent whole would block all others to its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

# Set as soon as the client of the current request has left.
_gone: ContextVar[threading.Event | None] = ContextVar("gone", default=None)


class NoticeLeaving:
    """ASGI middleware that tells `stop_when_gone` when a client has left.

    Example: `app.add_middleware(NoticeLeaving)`
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gone = threading.Event()
        watch: asyncio.Task[None] | None = None

        async def notice() -> None:
            await wait_until_gone(receive)
            gone.set()

        async def watched() -> Any:
            """Receive for the app: after the request, only the client's disconnect."""
            nonlocal watch
            if watch is not None:
                await asyncio.shield(watch)
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body"):
                watch = asyncio.create_task(notice())
            return message

        _gone.set(gone)
        try:
            await self.app(scope, watched, send)
        finally:
            if watch is not None:
                watch.cancel()


async def wait_until_gone(receive: Any) -> None:
    """Wait until a client leaves; its whole request must have been received."""
    while (await receive())["type"] != "http.disconnect":
        pass


def stop_when_gone(submit: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `GenerateManager.async_submit`: `model.generate` ends when the client has left."""
    import torch
    from transformers import StoppingCriteriaList

    def submit_stoppable(self: Any, generate: Any, *args: Any, **options: Any) -> Any:
        gone = _gone.get()

        def has_left(ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
            return torch.full(ids.shape[:1], gone is not None and gone.is_set(), device=ids.device)

        criteria = StoppingCriteriaList([has_left])  # pyright: ignore[reportArgumentType]
        return submit(self, generate, *args, stopping_criteria=criteria, **options)

    return submit_stoppable
