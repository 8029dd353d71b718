"""CUDA graphs: the kernels of a function, recorded once and replayed by one call.

The state of a Frac model has a fixed size, and the KV cache has buffers of a chosen size, so every
token launches the same kernels at the same addresses. A graph reads weights at their recorded
addresses: it sees in-place updates, and a model that was moved, cast or restructured is recorded
again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from flash_frac.layers.plain import parts_of, stored
from flash_frac.models import FracForCausalLM

logger = logging.get_logger(__name__)

# Device types on which functions are recorded.
DEVICES = ("cuda",)
# Default number of graphs to keep; beyond it, the least recently used one is dropped.
MOST_GRAPHS = 32
# Modules of these packages compute the same function as long as their tensors stay in place.
# Others, such as adapters, may change at any time.
PACKAGES = ("torch.nn.modules.", "flash_frac.")


class Graph:
    """A function of tensors, recorded but not run; inputs and output have fixed addresses.

    Args:
        other: a graph to share memory with; the two must never run at the same time.
    """

    def __init__(
        self,
        function: Callable[..., Tensor | None],
        inputs: Sequence[Tensor],
        device: torch.device,
        *,
        other: Graph | None = None,
    ) -> None:
        # Tensors made in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            self._inputs = [x.to(device, copy=True) for x in inputs]
        self._output = self._record(function, device, other)

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        self._replay()
        # The next replay of this graph, or of one that shares its memory, may overwrite the output.
        return None if self._output is None else self._output.clone()

    def _record(
        self,
        function: Callable[..., Tensor | None],
        device: torch.device,
        other: Graph | None,
    ) -> Tensor | None:
        self._graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            self._graph,
            pool=None if other is None else other._graph.pool(),
            stream=_side_stream(device),
            # Other threads may keep working and allocate memory meanwhile.
            capture_error_mode="thread_local",
        )
        # Restores the current stream after a failed recording, which torch does not.
        with torch.cuda.stream(torch.cuda.current_stream(device)), recording:
            return function(*self._inputs)

    def _replay(self) -> None:
        self._graph.replay()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to record on, one per device; torch's own stays on the first device used."""
    return torch.cuda.Stream(device)


class Recorder:
    """Runs functions of a model's tensors, from CUDA graphs wherever the result is the same.

    The first call runs the function eagerly, which compiles and loads its kernels, so there is no
    warm-up to undo. The second call records it, and later calls replay it.

    A model always runs eagerly on a CPU, on several devices, with hooks, adapters, tensor
    subclasses or rotary positions that depend on the length, and under autocast. The exceptions
    among tensor subclasses are quantised weights that our kernels read (`layers.plain.stored`); a
    warning names the first weight that they cannot read.

    Args:
        most_graphs: maximum number of graphs to keep; None means MOST_GRAPHS.

    Example:
        >>> recorder = Recorder(model)
        >>> recorder.look()  # once for many tokens
        >>> logits = recorder.run("step", step, [token])
    """

    def __init__(self, model: FracForCausalLM, *, most_graphs: int | None = None) -> None:
        self.model, self.most_graphs = model, most_graphs
        # Everything in the model that graphs depend on; None while it is not recorded.
        self.bindings: list[Any] | None = None
        # Why the model was not recorded when it was last looked at, or None.
        self.obstacle: str | None = None
        self._run: set[Hashable] = set()
        self._graphs: dict[Hashable, Graph] = {}
        self._memory: tuple[object, ...] = ()

    def look(self) -> None:
        """Drop all graphs if any part of the model has changed since it was recorded.

        This is too slow to do for each token; `run` checks only the weight of the head.
        """
        found = _bindings(self.model)
        bindings, self.obstacle = (None, found) if isinstance(found, str) else (found, None)
        if bindings != self.bindings:
            self.bindings, self._graphs = bindings, {}
            self._run.clear()

    def bind(self, *memory: object) -> None:
        """Name the objects whose memory functions use; drop the graphs of other objects.

        The objects stay alive as long as the graphs. Their order does not matter.
        """
        if {id(x) for x in memory} != {id(x) for x in self._memory}:
            self._memory, self._graphs = memory, {}

    def run(
        self,
        kind: Hashable,
        function: Callable[..., Tensor | None],
        inputs: Sequence[Tensor] = (),
        *,
        variant: Hashable = None,
    ) -> Tensor | None:
        """Return `function(*inputs)`.

        Args:
            kind: names the function and the shapes of its inputs.
            function: reads and writes only tensors of the model, of bound objects and of its
                inputs; must not synchronise with a device or use torch's random generators.
            variant: distinguishes functions of one kind that differ only in addresses.
        """
        if not self._holds():
            return function(*inputs)
        if kind not in self._run:
            output = function(*inputs)
            self._run.add(kind)
            return output
        key = (kind, variant)
        graph = self._graphs.pop(key, None)
        if graph is None:
            while len(self._graphs) >= (self.most_graphs or MOST_GRAPHS):
                del self._graphs[next(iter(self._graphs))]
            device, others = self.model.lm_head.weight.device, iter(self._graphs.values())
            graph = Graph(function, inputs, device, other=next(others, None))
        # Move it to the end, so that the first is the least recently used.
        self._graphs[key] = graph
        return graph(*inputs)

    def _holds(self) -> bool:
        """Whether graphs may be replayed now, by a quick check."""
        head = self.model.lm_head.weight
        if self.bindings is not None and self.bindings[0] != _binding(head):
            self.look()
        return self.bindings is not None and not torch.is_autocast_enabled(head.device.type)


def _binding(x: Tensor) -> tuple[Any, ...]:
    return *(part.data_ptr() for part in parts_of(x)), x.dtype, x.device


def _bindings(model: FracForCausalLM) -> list[Any] | str:
    """Everything that a graph depends on, the head's weight first; or why it cannot be recorded.

    Flat lists keep this fast, because every call waits for it.
    """
    head = model.lm_head.weight
    if head.device.type not in DEVICES:
        return f"it is on a {head.device.type}"
    if _has_moving_positions(model):
        return "its rotary positions depend on the length (rope type dynamic or longrope)"
    modules = _modules(model, [])
    kinds = [type(module) for module in modules]
    foreign = {kind for kind in set(kinds) if not kind.__module__.startswith(PACKAGES)}
    if foreign:
        names = sorted(kind.__name__ for kind in foreign)
        return f"it has modules of other packages ({', '.join(names)})"
    # A hook, or a replaced forward, must run for every token.
    if nn.modules.module._has_any_global_hook() or any(
        x._forward_hooks or x._forward_pre_hooks or "forward" in vars(x) or "_hf_hook" in vars(x)
        for x in modules
    ):
        return "it has hooks, or modules with a replaced forward"
    tensors = [x for y in modules for x in y._parameters.values() if x is not None]
    tensors += [x for y in modules for x in y._buffers.values() if x is not None]
    # Tensor subclasses may run any code when they are used.
    if not {*map(type, tensors)} <= {Tensor, nn.Parameter}:
        if any(stored(x) is None for x in tensors):
            _warn_of_weights(model)
            return "its weights are tensors of other packages"
        tensors = [part for x in tensors for part in parts_of(x)]
    if {x.device for x in tensors} != {head.device}:
        return "it is on several devices"
    addresses = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors]
    settings = [(y.get("backend"), y.get("settings")) for y in map(vars, modules)]
    config = model.config
    settings.append((config.attention_temperature_length, config.attention_temperature_slope))
    return [_binding(head), kinds, addresses, settings]


def _warn_of_weights(model: FracForCausalLM) -> None:
    """Warn about a torchao weight that our kernels cannot read."""
    named = ((n, x) for n, x in model.named_parameters() if stored(x) is None)
    for name, weight in named:
        if type(weight).__module__.startswith("torchao."):
            logger.warning_once(
                f"{name} is a {type(weight).__name__}, which our decoding kernels cannot read: "
                "torchao multiplies it more slowly, and steps do not use CUDA graphs. Supported "
                "are row-wise Int8WeightOnlyConfig() and, from sm_89 on, Float8WeightOnlyConfig()."
            )
            return


def _has_moving_positions(model: FracForCausalLM) -> bool:
    """Whether rotary frequencies depend on the length, which makes the host wait every time."""
    rotary: Any = model.model.rotary_emb
    return rotary is not None and rotary.rope_type in ("dynamic", "longrope")


def check_positions(model: FracForCausalLM) -> None:
    """ValueError if rotary frequencies depend on the longest sequence that was read."""
    if _has_moving_positions(model):
        rotary: Any = model.model.rotary_emb
        raise ValueError(
            f"attention_rope_parameters has rope_type {rotary.rope_type!r}, whose frequencies "
            "depend on the longest sequence, so requests would change each other's answers; use "
            "Generator or model.generate (frac serve --sequential), or another rope_type"
        )


def _modules(module: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    """`module.modules()` without building names, which takes most of its time."""
    found.append(module)
    for child in module._modules.values():
        if child is not None:
            _modules(child, found)
    return found
