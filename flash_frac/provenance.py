"""The provenance of a result: versions, and the commit of this library."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import flash_frac

_PACKAGES = ("transformers", "accelerate", "datasets", "tokenizers", "triton", "numpy")


def git_commit() -> str | None:
    """The commit of this library, marked if files differ from it; None outside a repository."""
    if shutil.which("git") is None:
        return None
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or None


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    # torch's own version also names its CUDA version.
    if package == "torch":
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """Versions, commit and machine, as JSON values."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "flash_frac": flash_frac.__version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", *_PACKAGES)},
        "machine": gpu or platform.machine(),
    }
