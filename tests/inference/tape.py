"""A CUDA graph for CPUs: record what a function does to memory, and replay it.

Like a CUDA graph, a tape holds addresses, not tensors: it reads and writes the memory that existed
at recording, whatever has become of the objects. Recording leaves other memory unchanged, and
garbage in the tape's own. A replay runs none of the function's Python.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from flash_frac.inference.graphs import Graph


class Tape(Graph):
    """A `Graph` on the CPU."""

    def _record(self, function, device, other):
        with torch.inference_mode(False), _Recording() as recording:
            output = function(*self._inputs)
        recording.undo()
        self._steps = recording.steps
        return output

    def _replay(self):
        for operator, args, kwargs, outputs in self._steps:
            again = _tensors(operator(*args, **kwargs))
            for old, new in zip(outputs, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps, self.before = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [
            argument
            for formal, argument in zip(func._schema.arguments, args, strict=False)
            if formal.alias_info is not None and formal.alias_info.is_write
        ]
        self.before += [(_alias(x), x.clone()) for x in _tensors(written)]
        output = func(*args, **kwargs)
        step = tree_map_only(Tensor, _alias, (args, kwargs))
        self.steps.append((func, *step, [_alias(x) for x in _tensors(output)]))
        return output

    def undo(self):
        """Leave garbage in memory that is the tape's own, and give back the rest as it was."""
        known = {x.untyped_storage().data_ptr() for x, _ in self.before}
        for func, _, _, outputs in self.steps:
            fresh = not any(x.alias_info for x in func._schema.returns)
            for x in outputs if fresh else []:
                if x.untyped_storage().data_ptr() not in known and x.is_floating_point():
                    x.fill_(torch.nan)
        for x, before in reversed(self.before):
            x.copy_(before)


def _alias(x):
    """The same memory, even after the tensor was given other memory (x.data = y)."""
    return x.detach()


def _tensors(tree):
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]
