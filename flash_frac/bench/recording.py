"""CUDA graphs of models, ours and peers', and the bytes of their states.

A prefill is recorded as it is called. All decode steps are one graph: then a peer that allocates a
new state at every step needs no copies, and no step waits for the host.
Letters: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flash_frac.inference import graphs
from flash_frac.models import FracForCausalLM


def can_record(model: Any) -> bool:
    """Whether the model's device supports CUDA graphs."""
    return model.device.type in graphs.DEVICES


def is_recorded(model: FracForCausalLM) -> bool:
    """Whether `generate`, `Generator` and streams replay graphs of our model."""
    recorder = graphs.Recorder(model)
    recorder.look()
    return recorder.bindings is not None


class Recording:
    """A function of one tensor as a graph; a call replays it.

    Args:
        function: is run once first, to compile and tune its kernels.
        given: its input.
        cache: the cache that the function starts from, updated in place or not.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], given: Tensor, cache: object = None
    ) -> None:
        with torch.no_grad():
            function(given)
            # Keep these tensors: every replay starts from them, but the cache may replace them.
            self._first = list(tensors_of(cache))
            self._given, self._graph = given, graphs.Graph(function, [given], given.device)

    def __call__(self) -> Tensor | None:
        return self._graph(self._given)


def record_prefill(model: Any, ids: Tensor, options: Mapping[str, Any]) -> Recording:
    """Record the backbone with its cache on prompts (B, T); it returns the last state (B, E).

    Args:
        options: other arguments of the backbone.
    """

    def prefill(ids: Tensor) -> Tensor:
        return model.base_model(input_ids=ids, use_cache=True, **options)[0][:, -1]

    return Recording(prefill, ids)


def record_decoding(
    model: Any, ids: Tensor, steps: int, make_cache: Callable[[int], Any] | None
) -> Recording:
    """Record greedy decoding of `steps` tokens after prompts (B, T); it returns (B, steps).

    Args:
        make_cache: builds an empty cache for a number of tokens; None uses the model's own.
    """
    num_read = ids.shape[1]
    with torch.no_grad():
        cache = None if make_cache is None else make_cache(num_read + steps)
        logits, cache = read(model, ids, cache)

    def decode(token: Tensor) -> Tensor:
        rewind(cache, num_read)
        tokens, state = [], cache
        for _ in range(steps):
            logits, state = read(model, token, state)
            token = logits.argmax(-1)
            tokens.append(token)
        return torch.cat(tokens, 1)

    return Recording(decode, logits.argmax(-1), cache)


def read(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits (B, 1, V) after tokens (B, T) that follow those in the cache, and the cache."""
    # transformers' Mamba models use another name for it.
    names = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
    return output.logits[:, -1:], getattr(output, name)


def rewind(cache: Any, num_tokens: int) -> None:
    """Reset the length of transformers' StaticCache, which it counts on the device.

    Otherwise every replay would write further, and finally beyond the cache's memory.
    """
    for layer in getattr(cache, "layers", ()):
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, Tensor):
            length.fill_(num_tokens)


def state_bytes(cache: object) -> int:
    """Bytes of all tensors in a cache."""
    return sum(x.numel() * x.element_size() for x in tensors_of(cache))


def tensors_of(cache: object) -> Iterator[Tensor]:
    """The tensors in a cache of any library: in attributes, lists and dictionaries, each once."""
    waiting, seen = [cache], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, (list, tuple)):
            waiting += found
        elif not isinstance(found, type):
            waiting += getattr(found, "__dict__", {}).values()
