"""What a run logs, to the console and as lines of JSON: speed, memory, and the memory law."""

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
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

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
# In a checkpoint: size and checksum of the log at that moment.
LOG_SUM_NAME = "log.json"
# Dense bfloat16 rates of matrix products in TFLOP/s, from the makers' data sheets.
PEAK_TFLOPS = {
    "H200": 989.5,
    "H100 PCIe": 756.5,
    "H100": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "B200": 2250.0,
}
# In this order on the console, with these formats; the rest is in the files.
_SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "held-out loss {:.4f}",
    "eval_perplexity": "perplexity {:.2f}",
    "grad_norm": "gradient norm {:.2f}",
    "learning_rate": "learning rate {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "peak memory {:.1f} GiB",
    "memory/horizon": "mean memory horizon of the layers {:.1f} tokens",
}


def describe(step: int, logs: dict[str, Any]) -> str | None:
    """A line for the console, or None if there is nothing to show."""
    parts = [text.format(logs[key]) for key, text in _SHOWN.items() if key in logs]
    return f"step {step}: " + ", ".join(parts) if parts else None


class ConsoleCallback(ProgressCallback):
    """A progress bar, and one line where Trainer would print a dictionary."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Steps before a checkpoint took no time of this run.
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, dynamic_ncols=True
            )

    def close(self) -> None:
        """Leave the bar as it is, so that other lines do not run into it."""
        for bar in (self.training_bar, self.prediction_bar):
            if bar is not None:
                bar.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        line = describe(state.global_step, logs or {})
        if state.is_world_process_zero and line is not None:
            if self.training_bar is not None:
                self.training_bar.write(line)
            else:
                print(line, flush=True)


class JsonLinesCallback(TrainerCallback):
    """Every log as one line of log.jsonl, whole even if the process dies.

    A run that resumes drops the lines past its checkpoint: the file is that of a run that was
    never interrupted.

    Args:
        resumed_from: returns the checkpoint that the run goes on from, None for a new run.
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
        # Checkpoints of earlier versions do not know their log.
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
    """Write size and checksum of a run's log into a checkpoint."""
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
    """The logs in a log.jsonl; a last line that was cut off is left out.

    ValueError that names file and line if another is damaged.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        return read_objects(path, {"step": int}, cut_off=True)
    except ValueError as error:
        raise ValueError(f"{error}; delete that line") from error


def device_peak_flops(device: torch.device) -> float | None:
    """The matrix rate of a device in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if key in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has used, of the GPU or, without one, of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    # On Linux in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_law(model: Any, ids: Tensor) -> dict[str, float]:
    """The memory of every Frac layer on some tokens (1, T), and their mean horizon."""
    layers, law = memory_statistics(model, ids), {}
    for number, layer in zip(layer_numbers(model), layers, strict=True):
        law |= layer.as_dict(f"memory/layer_{number}/")
    law["memory/horizon"] = math.exp(sum(math.log(x.horizon) for x in layers) / len(layers))
    return law
