"""Run independent functions as parallel branches of the CUDA graph that is being recorded.

Small kernels leave most of a GPU idle, and in sequence each waits for the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def in_branches(*functions: Callable[[], Any]) -> list[Any]:
    """Return the functions' results; in a recording without gradients, each is its own branch.

    Outside a recording they run in sequence: events between streams would cost the host more time
    than the GPU gains. The functions' inputs must stay alive until this returns.

    Example: `q, k = in_branches(lambda: q_proj(x), lambda: k_proj(x))`
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        # torch without CUDA has no streams.
        or not torch.cuda.is_initialized()
        or not torch.cuda.is_current_stream_capturing()
    ):
        return [function() for function in functions]
    main = torch.cuda.current_stream()
    streams = [main, *(_stream(main.device, n) for n in range(1, len(functions)))]
    for stream in streams[1:]:
        stream.wait_stream(main)
    found = []
    for function, stream in zip(functions, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(function())
    for stream in streams[1:]:
        main.wait_stream(stream)
    return found


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
