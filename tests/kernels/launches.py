"""Record a launcher's launches on CPU tensors, without a GPU, and compile them for one."""

from collections.abc import Callable
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature


class KernelLaunch(NamedTuple):
    """A kernel, and what it is specialised on: types, alignments, constants, options, GPU."""

    kernel: JITFunction
    signature: dict
    constants: dict
    attributes: dict
    options: object
    target: GPUTarget

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def key(self) -> str:
        """Launches with the same key share one compilation."""
        return f"{self.name} {self[1:]}"

    def compile(self):
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=self.target, options=vars(self.options))


def record(monkeypatch, function: Callable[[], object], arch: int = 90) -> list[KernelLaunch]:
    """The launches of a call, none of which runs: results are memory that nobody has written."""
    found = []
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)

    def run(kernel, *args, grid, warmup, **kwargs):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        kwargs = {"debug": False} | kwargs
        bound, specialization, options = bind(*args, **kwargs)
        options, *rest = kernel._pack_args(backend, kwargs, bound, specialization, options)
        found.append(KernelLaunch(kernel, *rest, options, target))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        function()
    return found


def watch(monkeypatch, before: Callable[[str], object]) -> None:
    """Call `before` with the name of every kernel that is launched, in the interpreter too."""
    for kind in (JITFunction, InterpretedFunction):

        def run(kernel, *args, launch=kind.run, **kwargs):
            before(kernel.__name__)
            return launch(kernel, *args, **kwargs)

        monkeypatch.setattr(kind, "run", run)
