"""CUDA graphs: the kernels of a function, recorded once and launched again by one call.

The state of a Frac model has a fixed size, and keys and values of attention layers have buffers of
a chosen one, so that a token costs the same kernels at the same addresses. A graph reads weights
where they were when it was recorded: weights that change in place are seen, and a model that was
moved, cast or taken apart is recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from flash_frac.models import FracForCausalLM

# Kinds of devices on which functions are recorded.
DEVICES = ("cuda",)
# Graphs that are kept by default; then the one that was not used for longest goes.
MOST_GRAPHS = 32
# Modules of these packages compute the same as long as their tensors stay where they are. Others,
# such as adapters, may decide otherwise at any time.
PACKAGES = ("torch.nn.modules.", "flash_frac.")


class Graph:
    """A function of tensors, recorded and not run; inputs and output have fixed addresses.

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
        # The next replay, of this graph or one that shares its memory, may write there.
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
            # Other threads may go on with their work, and allocate memory, meanwhile.
            capture_error_mode="thread_local",
        )
        # Sets the stream in use again after a recording that fails, which torch leaves out.
        with torch.cuda.stream(torch.cuda.current_stream(device)), recording:
            return function(*self._inputs)

    def _replay(self) -> None:
        self._graph.replay()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to record on, one for a device; torch's own is on the device that came first."""
    return torch.cuda.Stream(device)


class Recorder:
    """Runs functions of a model's tensors, from CUDA graphs wherever that gives the same.

    A function is run as written the first time, which compiles and loads what it needs, so that
    there is no warm-up to undo. It is recorded the second time, and replayed from then on.

    A model on a CPU, on several devices, with hooks, adapters, tensors of other kinds or rotary
    positions that depend on the length, and any model under autocast, is run as written every time.

    Args:
        most_graphs: that are kept; None: MOST_GRAPHS.

    Example:
        >>> recorder = Recorder(model)
        >>> recorder.look()  # once for many tokens
        >>> logits = recorder.run("step", step, [token])
    """

    def __init__(self, model: FracForCausalLM, *, most_graphs: int | None = None) -> None:
        self.model, self.most_graphs = model, most_graphs
        # What graphs depend on in the model; None as long as it is not recorded.
        self.bindings: list[Any] | None = None
        self._run: set[Hashable] = set()
        self._graphs: dict[Hashable, Graph] = {}
        self._memory: tuple[object, ...] = ()

    def look(self) -> None:
        """Compare the whole model with what was recorded, and drop all graphs if it has changed.

        This takes too long for each token; `run` looks at the weight of the head alone.
        """
        bindings = _bindings(self.model)
        if bindings != self.bindings:
            self.bindings, self._graphs = bindings, {}
            self._run.clear()

    def bind(self, *memory: object) -> None:
        """Name the objects whose memory functions use; graphs of other objects are dropped.

        They are kept as long as the graphs, in whatever order they are named.
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
        """What `function(*inputs)` returns.

        Args:
            kind: names the function and the shapes of its inputs.
            function: reads and writes tensors of the model, of the objects that were bound and of
                its inputs; waits for no device and draws from no generator of torch's.
            variant: tells functions of one kind apart that differ in addresses alone.
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
        # Last in order: the first is then the one that was not used for longest.
        self._graphs[key] = graph
        return graph(*inputs)

    def _holds(self) -> bool:
        """Whether a graph of the model may be replayed now, as far as a glance can tell."""
        head = self.model.lm_head.weight
        if self.bindings is not None and self.bindings[0] != _binding(head):
            self.look()
        return self.bindings is not None and not torch.is_autocast_enabled(head.device.type)


def _binding(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.device


def _bindings(model: FracForCausalLM) -> list[Any] | None:
    """All that a graph depends on, first the head's weight; None if nothing may be recorded.

    Lists of one thing each, because every call waits for it.
    """
    head = model.lm_head.weight
    if head.device.type not in DEVICES or _has_moving_positions(model):
        return None
    modules = _modules(model, [])
    kinds = [type(module) for module in modules]
    if not all(kind.__module__.startswith(PACKAGES) for kind in set(kinds)):
        return None
    # Who hooks on to a module, or replaces its forward, wants to be called for every token.
    if nn.modules.module._has_any_global_hook() or any(
        x._forward_hooks or x._forward_pre_hooks or "forward" in vars(x) or "_hf_hook" in vars(x)
        for x in modules
    ):
        return None
    tensors = [x for y in modules for x in y._parameters.values() if x is not None]
    tensors += [x for y in modules for x in y._buffers.values() if x is not None]
    # Other types of tensors, quantised ones for instance, may lie at several addresses.
    if not {*map(type, tensors)} <= {Tensor, nn.Parameter}:
        return None
    if {x.device for x in tensors} != {head.device}:
        return None
    addresses = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors]
    settings = [(y.get("backend"), y.get("settings")) for y in map(vars, modules)]
    config = model.config
    settings.append((config.attention_temperature_length, config.attention_temperature_slope))
    return [_binding(head), kinds, addresses, settings]


def _has_moving_positions(model: FracForCausalLM) -> bool:
    """Whether rotary frequencies change with the length, for which the host waits every time."""
    rotary: Any = model.model.rotary_emb
    return rotary is not None and rotary.rope_type in ("dynamic", "longrope")


def _modules(module: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    """`module.modules()` without names, which take most of its time."""
    found.append(module)
    for child in module._modules.values():
        if child is not None:
            _modules(child, found)
    return found
