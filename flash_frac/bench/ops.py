"""Time forward and backward of the scan against other formulations.

On a GPU: the Triton and torch backends in bfloat16, and the operators of `peers` that can be
imported, interleaved. Our read and write are float32, as in the layer. The kernels are checked
against float64 first.
On a CPU: the scan and the delta rule, each against a textbook form (`plain.py`). All are checked
against float64 first, then timed interleaved; peak memory is measured in a separate process.
Letters: B batch, T time, H heads, M modes, D head channels, C chunk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.bench.peers import OP_PEERS, Operation, available
from flash_frac.bench.plain import plain_chunk_delta, plain_chunk_scan
from flash_frac.bench.rows import make_row
from flash_frac.bench.timing import OURS, attempt, peak_mib, runnable, time_in_turns
from flash_frac.ops import delta_scan, frac_scan
from flash_frac.ops.testing import (
    ScanInputs,
    random_delta_inputs,
    random_inputs,
    relative_error,
)

Scan = Callable[[Any], tuple[Tensor, Tensor]]
# B, T, H, M, D of the 1.3B model, on a GPU.
GPU_SIZES = ([1, 16384, 16, 16, 256], [8, 4096, 16, 16, 256])


class OnCpu(NamedTuple):
    """An operator to measure on a CPU.

    Attributes:
        name: prefix of the pass in its rows, with a trailing space; "" for the scan.
        draw: draw(*sizes) returns inputs of B, T, H, M (or key channels) and D.
        specification: the reference loop over tokens.
        implementations: by name, functions of such inputs that return y and the state.
        sizes: H, M (or key channels) and D.
    """

    name: str
    draw: Callable[..., Any]
    specification: Scan
    implementations: Mapping[str, Scan]
    sizes: tuple[int, int, int]


PLAIN = "plain chunk-32 loop"
ON_CPU = {
    "scan": OnCpu(
        "",
        random_inputs,
        lambda inputs: frac_scan(*inputs, backend="recurrent"),
        {PLAIN: plain_chunk_scan, f"{OURS} torch": lambda x: frac_scan(*x, backend="torch")},
        (8, 16, 64),
    ),
    "delta": OnCpu(
        "delta ",
        random_delta_inputs,
        lambda inputs: delta_scan(*inputs, backend="recurrent"),
        {PLAIN: plain_chunk_delta, f"{OURS} torch": lambda x: delta_scan(*x, backend="torch")},
        (6, 64, 128),
    ),
}


def forward_backward(scan: Scan, inputs: Any) -> list[Tensor]:
    """Outputs, and gradients of all inputs, with y and state weighted by their cosines."""
    leaves = type(inputs)(*(x.detach().requires_grad_() for x in inputs))
    y, state = scan(leaves)
    torch.autograd.backward([y, state], [torch.cos(y.detach()), torch.cos(state.detach())])
    return [y.detach(), state.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(case: OnCpu, name: str) -> float:
    """Worst relative error against float64; exits above ten times that of the float32 loop.

    Ten and not two, because the textbook form is timed too, and subtracts larger sums.
    """
    options = {"rho_eps": 1e-6} if case.draw is random_inputs else {}
    inputs = case.draw(1, 200, 2, 16, 8, **options)
    exact = forward_backward(case.specification, inputs.to(torch.float64))

    def worst(scan: Scan) -> float:
        pairs = zip(forward_backward(scan, inputs), exact, strict=True)
        return max(relative_error(value, reference) for value, reference in pairs)

    error = worst(case.implementations[name])
    if not error < 10 * worst(case.specification):
        raise SystemExit(f"{case.name}{name} is wrong by {error:.1e}: not timed")
    return error


def process_peak_mib(operator: str, name: str, sizes: list[int]) -> float:
    """Memory that one forward and backward adds to a fresh process, in MiB."""
    arguments = f"{operator!r}, {name!r}, {sizes!r}"
    code = f"from flash_frac.bench.ops import print_peak; print_peak({arguments})"
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def print_peak(operator: str, name: str, sizes: list[int]) -> None:
    case = ON_CPU[operator]
    scan = case.implementations[name]
    forward_backward(scan, case.draw(1, 64, *sizes[2:]))
    inputs = case.draw(*sizes)
    # Linux: reset the high-water mark of resident memory.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mib("VmRSS")
    forward_backward(scan, inputs)
    print(json.dumps(memory_mib("VmHWM") - before))


def memory_mib(field: str) -> float:
    """Current (VmRSS) or peak (VmHWM) resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure_cpu(operator: str, num_tokens: int, repeats: int) -> list[dict]:
    """Two rows per implementation; calls are interleaved, so that noise affects all alike."""
    case = ON_CPU[operator]
    errors = {name: check(case, name) for name in case.implementations}
    sizes = [1, num_tokens, *case.sizes]
    inputs, rows = case.draw(*sizes), []
    passes = {"forward": torch.no_grad()(_call), "forward+backward": forward_backward}
    for passed, run in passes.items():
        functions = {
            name: partial(run, scan, inputs) for name, scan in case.implementations.items()
        }
        times = time_in_turns(functions, rounds=repeats, repeats=1)
        for name in functions:
            whole = passed == "forward+backward"
            peak = round(process_peak_mib(operator, name, sizes)) if whole else None
            rows.append(
                make_row(
                    name,
                    f"{case.name}{passed}",
                    dict(zip("BTHMD", sizes, strict=True)),
                    torch.float32,
                    times[name],
                    tokens=num_tokens,
                    peak=peak,
                    error=errors[name],
                )
            )
    return rows


def _call(scan: Scan, inputs: Any) -> Any:
    return scan(inputs)


def our_scan(inputs: ScanInputs, backend: str) -> Operation:
    """The scan of one backend, to be timed with its peers."""

    def scan(*arguments: Tensor) -> Tensor:
        return frac_scan(*arguments, backend=backend).y

    _, _, heads, channels = inputs.u.shape
    shape = {"H": heads, "M": inputs.read.shape[-1], "D": channels}
    return Operation(f"{OURS} {backend}", shape, scan, inputs, True)


class Subject(NamedTuple):
    """An operator to measure.

    Attributes:
        name: prefix of the pass in its rows, with a trailing space; "" for the scan.
        draw: draw(*sizes, dtype=, device=) returns inputs, which `.to(dtype)` converts.
        as_in_layer: converts float32 inputs to the dtypes of a bfloat16 layer.
        ours: ours(inputs, backend) returns the operation of one of our backends.
        peers: by name, functions that build an operation from inputs.
        sizes: sizes of the inputs on a GPU.
    """

    name: str
    draw: Callable[..., Any]
    as_in_layer: Callable[[Any], Any]
    ours: Callable[[Any, str], Operation]
    peers: Mapping[str, Callable[[Any], Operation]]
    sizes: Sequence[Sequence[int]]


SCAN = Subject(
    "",
    partial(random_inputs, rho_eps=1e-6),
    lambda inputs: inputs._replace(u=inputs.u.bfloat16()),
    our_scan,
    OP_PEERS,
    GPU_SIZES,
)


def check_operations(
    operations: Sequence[Operation],
    inputs: Any,
    ours: Callable[[Any, str], Operation] = our_scan,
) -> dict[str, float]:
    """Worst relative errors of y and its gradients against float64; ours at most twice torch's.

    Only operations that compute the same as ours are checked; a peer's error is only recorded.
    """
    exact = ours(inputs.to(torch.float64), "torch").backward()

    def errors(operation: Operation) -> Tensor:
        pairs = zip(operation.backward(), exact, strict=True)
        return torch.tensor([relative_error(value, reference) for value, reference in pairs])

    limits = 2 * (errors(ours(inputs, "torch")) + 2**-9)
    worst: dict[str, float] = {}

    def judge(operation: Operation) -> None:
        found = errors(operation)
        worst[operation.name] = found.max().item()
        # Not "any above", because comparisons with NaN are false.
        if operation.name.startswith(OURS) and not (found <= limits).all():
            raise SystemExit(f"{operation.name} is wrong by {found.max():.1e}: not timed")

    for operation in operations:
        if operation.is_scan and operation.name.startswith(OURS):
            judge(operation)
        elif operation.is_scan:
            attempt(f"error of {operation.name}", partial(judge, operation), [])
    return worst


def measure_operations(
    sizes: Sequence[int],
    failures: list[str],
    *,
    subject: Subject = SCAN,
    backends: Sequence[str] = ("triton", "torch"),
    peers: Iterable[str] = (),
    device: str = "cuda",
) -> list[dict]:
    """Rows of backends and peers, forward and forward+backward, at one shape."""

    def operations(inputs: Any) -> list[Operation]:
        ours = [subject.ours(inputs, backend) for backend in backends]
        return [*ours, *available(subject.peers, peers, inputs, failures)]

    tiny = [1, min(sizes[1], 4096), min(sizes[2], 2), *sizes[3:]]
    inputs = subject.draw(*tiny, dtype=torch.bfloat16, device=device)
    errors = check_operations(operations(inputs), inputs, subject.ours)
    timed = operations(subject.as_in_layer(subject.draw(*sizes, device=device)))
    rows = []
    for passed in ("forward", "forward+backward"):
        functions = {o.name: o.forward if passed == "forward" else o.backward for o in timed}
        times = time_in_turns(runnable(functions, failures))
        rows += [
            make_row(
                operation.name,
                f"{subject.name}{passed}",
                {"B": sizes[0], "T": sizes[1], **operation.shape},
                torch.bfloat16,
                times[operation.name],
                tokens=sizes[0] * sizes[1],
                peak=peak_mib(functions[operation.name]),
                error=errors.get(operation.name),
            )
            for operation in timed
            if operation.name in times
        ]
    return rows


def print_profile(sizes: Sequence[int], subject: Subject = SCAN) -> None:
    """Mean time of every kernel of a forward and backward pass on a GPU, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    inputs = subject.draw(*sizes, device="cuda")
    operation = subject.ours(subject.as_in_layer(inputs), "triton")
    operation.backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            operation.backward()
        torch.cuda.synchronize()
    for kernel in profiler.key_averages():
        if kernel.key.endswith("_kernel"):
            mean = kernel.device_time_total / kernel.count
            print(f"{kernel.key:26} {mean:9.1f} us, {kernel.count // 10} times")
