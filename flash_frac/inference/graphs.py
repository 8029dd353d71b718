"""One token more, recorded: on a GPU, a step from one cache into another is a CUDA graph.

A stream works on a second copy of its state and swaps the two, so that there are two graphs: there
and back. Weights are read where they lie: changing them in place is seen, and a model that was
moved, cast or taken apart is recorded anew.
Letters: B sequences, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flash_frac.inference.state import StreamMark, copy_states, read_tokens
from flash_frac.models import FracCache, FracForCausalLM

# Kinds of devices on which steps are recorded.
DEVICES = ("cuda",)


class Graph:
    """A function of tensors, recorded and not run; its inputs and output are memory of its own."""

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        # What is made in inference mode can be written to in no other.
        with torch.inference_mode(False):
            self._inputs = [x.clone() for x in inputs]
        self._output = self._record(function)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._replay()
        # The next replay writes there again.
        return self._output.clone()

    def _record(self, function: Callable[..., Tensor]) -> Tensor:
        place, graph = self._inputs[0].device, torch.cuda.CUDAGraph()
        # By thread, because others may go on with their work, and ask for memory, meanwhile.
        recording = torch.cuda.graph(
            graph, stream=_side_stream(place), capture_error_mode="thread_local"
        )
        # The stream in use is set again after a recording that fails, which torch leaves out.
        with torch.cuda.stream(torch.cuda.current_stream(place)), recording:
            output = function(*self._inputs)
        self._replay = graph.replay
        return output


@cache
def _side_stream(place: torch.device) -> torch.cuda.Stream:
    """Where to record: one for a device, as torch's own is on the device that came first."""
    return torch.cuda.Stream(place)


class Steps:
    """Reads tokens from the state of one moment into the memory of another, for one stream."""

    def __init__(self) -> None:
        self._bound: Any = None
        self._forget()

    def _forget(self) -> None:
        self._caches: tuple[FracCache, ...] = ()
        self._graphs: dict[Any, Graph] = {}
        # Whether with a mask, without: steps that were run, and have compiled what was missing.
        self._run: set[bool] = set()

    def look(self, model: FracForCausalLM) -> None:
        """See whether the model is still what was recorded, which takes too long for each token."""
        bound = _bindings(model)
        if bound != self._bound:
            self._forget()
            self._bound = bound

    def read(
        self,
        model: FracForCausalLM,
        before: StreamMark,
        spare: FracCache | None,
        ids: Tensor,
        mask: Tensor | None,
    ) -> tuple[FracCache, Tensor]:
        """The cache after ids (B, T), in the memory of `spare` if there is one, and logits (B, V).

        Nothing is written to `before`; what a call that fails leaves in `spare` is no state.

        Args:
            mask: (B, T), False at padding, on the left; None if there is none.
        """
        masked, records = mask is not None, ids.shape[1] == 1 and self._holds(model)
        if records and masked in self._run and spare is not None:
            graph = self._graph(model, before.cache, spare, ids, mask)
            return spare, graph(*(x for x in (ids, mask) if x is not None))
        after = before.copy(model, spare).cache
        logits = read_tokens(model, after, ids, mask)
        if records:
            self._run.add(masked)
        return after, logits

    def _holds(self, model: FracForCausalLM) -> bool:
        """Whether a graph of this model may be replayed here, as far as a glance can tell."""
        weight = model.lm_head.weight
        if self._bound and self._bound[0] != _place(weight):
            self.look(model)
        return bool(self._bound) and not torch.is_autocast_enabled(weight.device.type)

    def _graph(
        self,
        model: FracForCausalLM,
        source: FracCache,
        target: FracCache,
        ids: Tensor,
        mask: Tensor | None,
    ) -> Graph:
        if not all(any(x is y for y in self._caches) for x in (source, target)):
            # An interrupt, or the first tokens, have brought other memory. What graphs are bound to
            # is held here, as long as they are.
            self._graphs, self._caches = {}, (source, target)
        key = (source is self._caches[0], mask is not None)
        if key not in self._graphs:

            def step(ids: Tensor, mask: Tensor | None = None) -> Tensor:
                copy_states(source, target)
                return read_tokens(model, target, ids, mask)

            place = model.lm_head.weight.device
            inputs = [x.to(place) for x in (ids, mask) if x is not None]
            self._graphs[key] = Graph(step, inputs)
        return self._graphs[key]


def _place(weight: Tensor) -> Any:
    return weight.data_ptr(), weight.dtype, weight.device


def _bindings(model: FracForCausalLM) -> list[Any] | None:
    """Where all weights are, that of the head first; None if a step cannot be recorded."""
    head = model.lm_head.weight
    # Keys and values of attention grow, and are never twice at the same place.
    if head.device.type not in DEVICES or model.config.attention_layers:
        return None
    places = [_place(head)]
    for module in model.modules():
        # Who hooks on wants to be called for every token.
        if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in module.__dict__:
            return None
        tensors = [*module._parameters.values(), *module._buffers.values()]
        tensors = [x for x in tensors if x is not None]
        # Other kinds, quantised ones for instance, may lie at several places.
        if not all(type(x) in (Tensor, Parameter) for x in tensors):
            return None
        places += map(_place, tensors)
    return places if all(place[2] == head.device for place in places) else None
