"""Versions, requirements, device, backend, and known problems of their combinations."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import NamedTuple

import torch

import flash_frac
from flash_frac.doctor import Finding
from flash_frac.ops.backends import BACKENDS, OPERATORS, resolve_backend
from flash_frac.provenance import git_commit, version_of

_PACKAGES = ("torch", "triton", "transformers", "accelerate", "datasets", "numpy")


def versions() -> list[Finding]:
    """The versions of everything that a result depends on."""
    ours = f"flash_frac {flash_frac.__version__} ({git_commit() or 'no git commit'})"
    others = (f"{name} {version_of(name) or 'not installed'}" for name in _PACKAGES)
    found = ", ".join([ours, f"python {platform.python_version()}", *others])
    return [Finding("versions", "ok", found)]


def requirements() -> list[Finding]:
    """Whether the requirements of the installed package are met."""
    from packaging.requirements import Requirement

    if version_of("flash-frac") is None:
        found = "unknown: flash-frac runs from source and is not installed"
        return [Finding("requirements", "warning", found, "in its folder: pip install -e .")]
    absent: dict[str, list[str]] = {}
    bad: list[tuple[str, str]] = []
    for line in importlib.metadata.requires("flash-frac") or []:
        wanted = Requirement(line)
        extra = str(wanted.marker).split('"')[1] if wanted.marker else ""
        if wanted.name == "flash-frac" or extra == "dev":
            continue
        version = version_of(wanted.name)
        if version is None:
            absent.setdefault(extra, []).append(wanted.name)
        elif not wanted.specifier.contains(version, prereleases=True):
            bad.append((f"{wanted.name} {version}", f"{wanted.name}{wanted.specifier}"))
    bad += [(f"no {name}", name) for name in absent.pop("", [])]
    if bad:
        found = ", ".join(f"found {had}, but {needed} is needed" for had, needed in bad)
        remedy = "pip install " + " ".join(f"'{needed}'" for _, needed in bad)
        return [Finding("requirements", "wrong", found, remedy)]
    if not absent:
        return [Finding("requirements", "ok", "installed, with all extras")]
    found = "; ".join(f"{extra} ({', '.join(names)})" for extra, names in absent.items())
    remedy = f"if you need them: pip install 'flash-frac[{','.join(absent)}]'"
    return [Finding("requirements", "ok", f"installed; without the extras {found}", remedy)]


def device() -> list[Finding]:
    """A finding on the GPU, or that there is none."""
    if not torch.cuda.is_available():
        found = f"no CUDA device; {platform.machine()}, {torch.get_num_threads()} threads"
        return [Finding("device", "ok", found)]
    gpu = torch.cuda.get_device_properties(0)
    found = f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, "
    found += f"compute capability {gpu.major}.{gpu.minor}, torch for CUDA {torch.version.cuda}"
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.split()
        found += f", driver {answer[0] if answer else 'unknown'}"
    return [Finding("device", "ok", found)]


def backend(device: str) -> list[Finding]:
    """The backend that "auto" selects for each operator, and why."""
    x = torch.empty(1, 1, device=device)
    # Inputs for the operators' limits: a convolution with four taps, the loss's default chunks, a
    # key with one channel.
    taps = torch.empty(1, 1, 4, device=device)
    facts = {"conv": [taps], "loss": [None], "delta": [x], "delta_step": [x]}
    chosen: dict[str, list[str]] = {}
    for operator in (*OPERATORS, "loss"):
        name = resolve_backend("auto", x, operator, *facts.get(operator, []))
        chosen.setdefault(name, []).append(operator)
    refusal = BACKENDS["triton"].refusal(x)
    if refusal is None:
        why = "there is a CUDA device" if device == "cuda" else "TRITON_INTERPRET is set"
    else:
        why = refusal if device == "cuda" else "there is no CUDA device"
    found = "; ".join(f"{name} for {', '.join(names)}" for name, names in chosen.items())
    missing = device == "cuda" and version_of("triton") is None
    remedy = "for kernels that are several times faster: pip install triton" if missing else ""
    found = f"backend='auto' runs {found}, because {why}"
    return [Finding("backend", "warning" if missing else "ok", found, remedy)]


class Facts(NamedTuple):
    """The facts on which known problems depend; None for what is not installed."""

    torch_cuda: str | None
    triton: str | None
    numpy: str | None
    capability: tuple[int, int] | None
    nvidia_smi: bool
    interpreted: bool


def facts() -> Facts:
    """The facts of this machine."""
    there = torch.cuda.is_available()
    return Facts(
        torch_cuda=torch.version.cuda or torch.version.hip,
        triton=version_of("triton"),
        numpy=version_of("numpy"),
        capability=torch.cuda.get_device_capability() if there else None,
        nvidia_smi=shutil.which("nvidia-smi") is not None,
        interpreted="TRITON_INTERPRET" in os.environ,
    )


def known_problems(here: Facts) -> list[Finding]:
    """One finding per combination that is known to fail, or a single one that there is none."""
    from packaging.version import Version

    problems: list[Finding] = []

    def add(status, found, remedy):
        problems.append(Finding("known problems", status, found, remedy))

    triton = Version(here.triton) if here.triton else None
    if here.nvidia_smi and here.torch_cuda is None:
        found = "torch is built for CPUs only, but nvidia-smi is installed, so there may be a GPU"
        add("warning", found, "install a torch for CUDA (pytorch.org has the command)")
    elif here.nvidia_smi and here.capability is None:
        found = f"torch is built for CUDA {here.torch_cuda} and nvidia-smi is installed, but torch "
        found += "sees no GPU"
        add("warning", found, "check that nvidia-smi lists a GPU, and update its driver")
    hopper = here.capability is not None and here.capability[0] == 9
    if hopper and triton and Version("3.4") <= triton <= Version("3.7.0"):
        found = f"Triton {triton} on Hopper: tl.trans of an accumulator fed to tl.dot gives wrong "
        found += "results (fla issue 640). flash_frac's kernels are checked below, fla's are not"
        add("warning", found, "if you also use fla: pip install 'triton>=3.7.1'")
    if here.interpreted:
        found = "TRITON_INTERPRET is set: kernels run in Triton's interpreter, slowly. Its "
        found += "bfloat16 is wrong, so the torch backend computes everything but float32"
        add("warning", found, "unset TRITON_INTERPRET, except to test kernels")
        if triton and triton < Version("3.5") and Version(here.numpy or "0").major >= 2:
            found = f"the interpreter of Triton {triton} does not run with numpy {here.numpy}"
            add("wrong", found, "pip install 'triton>=3.5', or 'numpy<2'")
    return problems or [Finding("known problems", "ok", "none")]
