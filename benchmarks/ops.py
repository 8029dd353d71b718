"""Time forward and backward of the scan beside the plain formulation, and append the rows.

    python benchmarks/ops.py [--time 4096] [--repeats 15] [--profile]

On a machine with a GPU: the Triton and the torch backend in bfloat16 at the shape of the 1.3B
model, medians of CUDA events with the cache flushed before each; rows go to <gpu>.csv there.
On a CPU the yardstick is the textbook chunked form: chunks of 32 in a Python loop, gamma in one
piece, gradients by autograd. Both are checked against float64 first, then timed in turns; peak
memory is measured in a process of its own. Rows go to benchmarks/results/cpu.csv.
Letters: B batch, T time, H heads, M modes, D head channels, C chunk.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flash_frac.ops import frac_scan
from flash_frac.ops.testing import ScanInputs, random_inputs, relative_error

RESULTS = Path(__file__).parent / "results"
Scan = Callable[[ScanInputs], tuple[Tensor, Tensor]]


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


def peak_mib(name: str, sizes: list[int]) -> float:
    """Memory that one forward and backward adds to a fresh process, in MiB."""
    command = [sys.executable, __file__, "--peak-of", name, *map(str, sizes)]
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


def measure(sizes: list[int], repeats: int) -> list[dict]:
    """One row an implementation; the implementations take turns, so that noise falls on all."""
    errors = {name: check(name) for name in IMPLEMENTATIONS}
    inputs = random_inputs(*sizes)
    times: dict[str, list[float]] = {name: [] for name in IMPLEMENTATIONS}
    for _ in range(repeats + 2):
        for name in IMPLEMENTATIONS:
            start = time.perf_counter()
            forward_backward(IMPLEMENTATIONS[name], inputs)
            times[name].append(1e3 * (time.perf_counter() - start))
    rows = []
    for name in IMPLEMENTATIONS:
        low, *_, high = statistics.quantiles(times[name][2:], n=5)
        rows.append(
            {
                "implementation": name,
                "pass": "forward+backward",
                **dict(zip("BTHMD", sizes, strict=True)),
                "dtype": "float32",
                "ms_p20": round(low, 1),
                "ms_p50": round(statistics.median(times[name][2:]), 1),
                "ms_p80": round(high, 1),
                "peak_mib": round(peak_mib(name, sizes)),
                "error": f"{errors[name]:.1e}",
            }
        )
    return rows


def check_gpu(sizes: list[int]) -> float:
    """Worst relative error of the kernels in bfloat16, against float64; none past twice torch's."""
    inputs = random_inputs(*sizes, dtype=torch.bfloat16, device="cuda", rho_eps=1e-6)
    runs = {
        name: backward_of(inputs.to(dtype), backend)
        for name, dtype, backend in (
            ("exact", torch.float64, "torch"),
            ("torch", torch.bfloat16, "torch"),
            ("triton", torch.bfloat16, "triton"),
        )
    }
    worst = 0.0
    for a, b, c in zip(runs["triton"], runs["torch"], runs["exact"], strict=True):
        error = relative_error(a, c)
        if error > 2 * (relative_error(b, c) + 2**-9):
            raise SystemExit(f"the kernels are wrong by {error:.1e}: no timing")
        worst = max(worst, error)
    return worst


def backward_of(inputs: ScanInputs, backend: str) -> list[Tensor]:
    """y and the gradients of the sum of y, for one backend."""
    leaves = ScanInputs(*(x.detach().requires_grad_() for x in inputs))
    y, _ = frac_scan(*leaves, backend=backend)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def measure_gpu(sizes: list[int]) -> list[dict]:
    """Rows of both backends, forward and forward+backward; read and write are float32."""
    from triton.testing import do_bench

    error = check_gpu([1, 4096, 2, *sizes[3:]])
    inputs = random_inputs(*sizes, device="cuda", rho_eps=1e-6)
    inputs = inputs._replace(u=inputs.u.bfloat16())
    rows = []
    for backend in ("triton", "torch"):

        def forward(backend: str = backend) -> None:
            with torch.no_grad():
                frac_scan(*inputs, backend=backend)

        def both(backend: str = backend) -> None:
            backward_of(inputs, backend)

        for name, function in (("forward", forward), ("forward+backward", both)):
            low, median, high = do_bench(function, warmup=20, rep=200, quantiles=[0.2, 0.5, 0.8])
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            rows.append(
                {
                    "implementation": f"flash_frac {backend}",
                    "pass": name,
                    **dict(zip("BTHMD", sizes, strict=True)),
                    "dtype": "bfloat16",
                    "ms_p20": round(low, 3),
                    "ms_p50": round(median, 3),
                    "ms_p80": round(high, 3),
                    "peak_mib": round(peak),
                    "error": f"{error:.1e}" if backend == "triton" else "",
                }
            )
    return rows


def print_profile(sizes: list[int]) -> None:
    """Mean time of every kernel of a forward and backward pass on a GPU, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    inputs = random_inputs(*sizes, device="cuda", rho_eps=1e-6)
    inputs = inputs._replace(u=inputs.u.bfloat16())
    backward_of(inputs, "triton")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            backward_of(inputs, "triton")
        torch.cuda.synchronize()
    for kernel in profiler.key_averages():
        if kernel.key.endswith("_kernel"):
            mean = kernel.device_time_total / kernel.count
            print(f"{kernel.key:22} {mean:9.1f} us, {kernel.count // 10} times")


def describe_machine() -> dict:
    """Where and with what: the columns that make a row repeatable."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "command": "python benchmarks/ops.py " + " ".join(sys.argv[1:]),
        "commit": commit or "unknown",
        "machine": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def append(rows: list[dict], path: Path) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", type=int, default=4096, help="tokens")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="times of the kernels, no rows")
    parser.add_argument("--peak-of", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        name, *sizes = arguments.peak_of
        print_peak(name, [int(size) for size in sizes])
        return
    if arguments.profile and not torch.cuda.is_available():
        parser.error("--profile needs a GPU")
    if arguments.profile:
        print_profile([1, 16384, 16, 16, 256])
        print_profile([8, 4096, 16, 16, 256])
        return
    if torch.cuda.is_available():
        rows = [*measure_gpu([1, 16384, 16, 16, 256]), *measure_gpu([8, 4096, 16, 16, 256])]
        path = RESULTS / f"{torch.cuda.get_device_name().split()[-1].lower()}.csv"
    else:
        rows = measure([1, arguments.time, 8, 16, 64], arguments.repeats)
        path = RESULTS / "cpu.csv"
    for row in rows:
        print(
            f"{row['implementation']:22} {row['pass']:17} B {row['B']} T {row['T']:6d} "
            f"{row['ms_p50']:9.3f} ms {row['peak_mib']:6d} MiB  error {row['error']}"
        )
    machine = describe_machine()
    append([row | machine for row in rows], path)


if __name__ == "__main__":
    main()
