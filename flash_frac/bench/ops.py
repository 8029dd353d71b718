"""Time forward and backward of the scan beside other formulations.

On a GPU: the Triton and the torch backend in bfloat16, and the operators of `peers` that can be
imported, in turns. Read and write are float32 for us, as the layer makes them. The kernels are
checked against float64 first.
On a CPU the yardstick is the textbook chunked form: chunks of 32 in a Python loop, gamma in one
piece, gradients by autograd. Both are checked against float64 first, then timed in turns; peak
memory is measured in a process of its own.
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
from flash_frac.bench.rows import make_row
from flash_frac.bench.timing import OURS, attempt, peak_mib, runnable, time_in_turns
from flash_frac.ops import frac_scan
from flash_frac.ops.testing import ScanInputs, random_inputs, relative_error

Scan = Callable[[ScanInputs], tuple[Tensor, Tensor]]
# B, T, H, M, D of the 1.3B model, on a GPU.
GPU_SIZES = ([1, 16384, 16, 16, 256], [8, 4096, 16, 16, 256])


def plain_chunk_scan(inputs: ScanInputs, chunk: int = 32) -> tuple[Tensor, Tensor]:
    """The yardstick: design of the paper's appendix, one chunk after another."""
    batch, num_tokens, heads, channels = inputs.u.shape
    state = inputs.u.new_zeros(batch, heads, inputs.read.shape[-1], channels)
    future = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)[..., None]
    outputs = []
    for start in range(0, num_tokens, chunk):
        u, read, write, log_decay = (x[:, start : start + chunk].transpose(1, 2) for x in inputs)
        size = u.shape[2]
        total = log_decay.cumsum(2)
        between = total[:, :, :, None] - total[:, :, None]
        decay = between.masked_fill(future[:size, :size], -torch.inf).exp()
        gamma = torch.einsum("bhtm,bhkm,bhtkm->bhtk", read, write, decay)
        outputs.append((gamma @ u + (read * total.exp()) @ state).transpose(1, 2))
        last = total[:, :, -1:]
        state = last.transpose(2, 3).exp() * state
        state = state + (write * (last - total).exp()).transpose(2, 3) @ u
    return torch.cat(outputs, 1), state


IMPLEMENTATIONS = {
    "plain chunk-32 loop": plain_chunk_scan,
    "flash_frac torch": lambda inputs: frac_scan(*inputs, backend="torch"),
}


def specification(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """The loop over tokens that everything is measured against."""
    return frac_scan(*inputs, backend="recurrent")


def forward_backward(scan: Scan, inputs: ScanInputs) -> list[Tensor]:
    """Outputs and the gradients of all inputs, for y and state weighted by their cosines."""
    leaves = ScanInputs(*(x.detach().requires_grad_() for x in inputs))
    y, state = scan(leaves)
    torch.autograd.backward([y, state], [torch.cos(y.detach()), torch.cos(state.detach())])
    return [y.detach(), state.detach(), *(x.grad for x in leaves if x.grad is not None)]


def check(name: str) -> float:
    """Worst relative error against float64; no timing past ten times that of the float32 loop.

    Ten and not two, because the yardstick is to be timed too, and takes differences of larger sums.
    """
    inputs = random_inputs(1, 200, 2, 16, 8, rho_eps=1e-6)
    exact = forward_backward(specification, inputs.to(torch.float64))

    def worst(scan: Scan) -> float:
        pairs = zip(forward_backward(scan, inputs), exact, strict=True)
        return max(relative_error(value, reference) for value, reference in pairs)

    error = worst(IMPLEMENTATIONS[name])
    if not error < 10 * worst(specification):
        raise SystemExit(f"{name} is wrong by {error:.1e}: no timing")
    return error


def process_peak_mib(name: str, sizes: list[int]) -> float:
    """Memory that one forward and backward adds to a fresh process, in MiB."""
    code = f"from flash_frac.bench.ops import print_peak; print_peak({name!r}, {sizes!r})"
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def print_peak(name: str, sizes: list[int]) -> None:
    scan = IMPLEMENTATIONS[name]
    forward_backward(scan, random_inputs(1, 64, *sizes[2:]))
    inputs = random_inputs(*sizes)
    # Linux: start the high-water mark of resident memory anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mib("VmRSS")
    forward_backward(scan, inputs)
    print(json.dumps(memory_mib("VmHWM") - before))


def memory_mib(field: str) -> float:
    """Resident memory now (VmRSS) or at its highest (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def measure_cpu(sizes: list[int], repeats: int) -> list[dict]:
    """One row an implementation; they take turns at every call, so that noise falls on all."""
    errors = {name: check(name) for name in IMPLEMENTATIONS}
    inputs = random_inputs(*sizes)
    functions = {
        name: lambda scan=scan: forward_backward(scan, inputs)
        for name, scan in IMPLEMENTATIONS.items()
    }
    times = time_in_turns(functions, rounds=repeats, repeats=1)
    return [
        make_row(
            name,
            "forward+backward",
            dict(zip("BTHMD", sizes, strict=True)),
            torch.float32,
            times[name],
            tokens=sizes[0] * sizes[1],
            peak=round(process_peak_mib(name, sizes)),
            error=errors[name],
        )
        for name in IMPLEMENTATIONS
    ]


def our_scan(inputs: ScanInputs, backend: str) -> Operation:
    """The scan of one backend, to be timed beside its peers."""

    def scan(*arguments: Tensor) -> Tensor:
        return frac_scan(*arguments, backend=backend).y

    _, _, heads, channels = inputs.u.shape
    shape = {"H": heads, "M": inputs.read.shape[-1], "D": channels}
    return Operation(f"{OURS} {backend}", shape, scan, inputs, True)


class Subject(NamedTuple):
    """An operator to measure.

    Attributes:
        name: goes before the pass in its rows, with a space after it; "" for the scan.
        draw: draw(*sizes, dtype=, device=) gives inputs, which can be changed by `.to(dtype)`.
        as_in_layer: inputs in float32 to those that a layer has, in bfloat16.
        ours: ours(inputs, backend) gives the operation of one of our backends.
        peers: makes an operation from inputs, by name.
    """

    name: str
    draw: Callable[..., Any]
    as_in_layer: Callable[[Any], Any]
    ours: Callable[[Any, str], Operation]
    peers: Mapping[str, Callable[[Any], Operation]]


def scan_subject() -> Subject:
    def as_in_layer(inputs: ScanInputs) -> ScanInputs:
        return inputs._replace(u=inputs.u.bfloat16())

    return Subject("", partial(random_inputs, rho_eps=1e-6), as_in_layer, our_scan, OP_PEERS)


def check_operations(
    operations: Sequence[Operation],
    inputs: Any,
    ours: Callable[[Any, str], Operation] = our_scan,
) -> dict[str, float]:
    """Worst relative errors of y and its gradients against float64; ours at most twice torch's.

    Of the operations only those that compute what ours does; a peer's error is recorded, not
    judged.
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
        # Not "any above", because an error of NaN is above nothing.
        if operation.name.startswith(OURS) and not (found <= limits).all():
            raise SystemExit(f"{operation.name} is wrong by {found.max():.1e}: no timing")

    for operation in operations:
        if operation.is_scan and operation.name.startswith(OURS):
            judge(operation)
        elif operation.is_scan:
            attempt(f"error of {operation.name}", partial(judge, operation), [])
    return worst


def measure_operations(
    sizes: list[int],
    failures: list[str],
    *,
    subject: Subject | None = None,
    backends: Sequence[str] = ("triton", "torch"),
    peers: Iterable[str] = (),
    device: str = "cuda",
) -> list[dict]:
    """Rows of the backends and the peers, forward and forward+backward, at one shape."""
    subject = subject or scan_subject()

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


def print_profile(sizes: list[int], subject: Subject | None = None) -> None:
    """Mean time of every kernel of a forward and backward pass on a GPU, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    subject = subject or scan_subject()
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
