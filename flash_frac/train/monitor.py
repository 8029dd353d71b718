"""The log of a run as JSON lines: speed, memory and the memory law."""

from __future__ import annotations

import hashlib
import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from flash_frac.files import (
    append_text,
    read_object,
    read_objects,
    without_nan,
    write_bytes,
    write_json,
    write_rows,
)
from flash_frac.inspect.statistics import layer_numbers, memory_statistics

LOG_NAME = "log.jsonl"
# The file in a checkpoint with the size and checksum of the log at that moment.
LOG_SUM_NAME = "log.json"
# Dense bfloat16 peak in TFLOP/s, from the vendor's data sheets.
PEAK_TFLOPS = {
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}


def duration(seconds: float) -> str:
    """Format a duration in a suitable unit.

    Example: `duration(5400) == "1.50 hours"`
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.2f} {unit}"
    return f"{seconds:.1f} seconds"


class JsonLinesCallback(TrainerCallback):
    """Writes every log as one line of log.jsonl; no line is cut off if the process dies.

    A run that resumes drops the lines after its checkpoint, so the file equals that of a run that
    was never interrupted.

    Args:
        resumed_from: returns the checkpoint that the run resumes from, None for a new run.
    """

    def __init__(self, resumed_from: Callable[[], Path | None]) -> None:
        self._resumed_from = resumed_from

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        path, checkpoint = Path(args.output_dir) / LOG_NAME, self._resumed_from()
        lines = read_lines(path)
        if path.exists() and path.read_bytes()[-1:] not in (b"\n", b""):
            print(f"{path} line {len(lines) + 1} is cut off and left out", flush=True)
        # Checkpoints of earlier versions have no checksum of the log.
        if checkpoint is not None and (checkpoint / LOG_SUM_NAME).exists():
            if (whole := log_until(path, checkpoint)) is not None:
                write_bytes(path, whole)
                return
            print(f"{path} is not the log that {checkpoint} was saved with", flush=True)
        write_rows(path, [line for line in lines if line["step"] <= state.global_step])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            path = Path(args.output_dir) / LOG_NAME
            line = json.dumps(without_nan({"step": state.global_step, **logs})) + "\n"
            append_text(path, line)


def write_log_sum(output_dir: str | Path, checkpoint: Path) -> None:
    """Write the size and checksum of a run's log into a checkpoint."""
    path = Path(output_dir) / LOG_NAME
    content = path.read_bytes() if path.exists() else b""
    facts = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_json(checkpoint / LOG_SUM_NAME, facts)


def log_until(path: Path, checkpoint: Path) -> bytes | None:
    """The log as it was when a checkpoint was saved; None if it has changed since."""
    if not path.exists():
        return None
    known = read_object(checkpoint / LOG_SUM_NAME, {"size": int, "sha256": str})
    content = path.read_bytes()[: known["size"]]
    return content if hashlib.sha256(content).hexdigest() == known["sha256"] else None


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log.jsonl; a last line that was cut off is left out.

    Raises ValueError naming the file and line if another line is damaged.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        return read_objects(path, {"step": int}, cut_off=True)
    except ValueError as error:
        raise ValueError(f"{error}; delete that line") from error


def device_peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of a device, or None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if key in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: on the GPU, or on the host without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux reports KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_law(model: Any, ids: Tensor) -> dict[str, float]:
    """Memory statistics of every Frac layer on tokens (1, T), and their mean horizon."""
    layers, law = memory_statistics(model, ids), {}
    for number, layer in zip(layer_numbers(model), layers, strict=True):
        law |= layer.as_dict(f"memory/layer_{number}/")
    law["memory/horizon"] = math.exp(sum(math.log(x.horizon) for x in layers) / len(layers))
    return law
