"""Show a run: one live line on a terminal, plain lines elsewhere, curves at the end."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers import trainer as trainer_module
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer_callback import PrinterCallback

from flash_frac.drawing import OTHER, OURS, faint_grid, figure_at
from flash_frac.models.fields import did_you_mean
from flash_frac.train.monitor import LOG_NAME, duration, read_lines

# Packages that report_to needs, where they are not named like its value.
_PACKAGES = {"comet_ml": "comet-ml", "dagshub": "dagshub mlflow"}
# transformers does not list these, whether they are installed or not.
_UNLISTED = ("azure_ml", "flyte")
CURVES_NAME = "training.svg"
# Seconds between updates of the live line.
_EVERY = 0.2
# Logs shown on the console, in this order; log.jsonl has the others.
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
# The subset for the live line, which must fit a terminal.
_LIVE = ("loss", "grad_norm", "tokens_per_second", "mfu")


def describe(step: int, logs: Mapping[str, Any], left: float | None = None) -> str | None:
    """A line for the console, or None if there is nothing to show; `left`: remaining seconds."""
    parts = [text.format(logs[key]) for key, text in _SHOWN.items() if key in logs]
    if parts and left is not None and "loss" in logs:
        parts.append(f"{duration(left)} left")
    return f"step {step}: " + ", ".join(parts) if parts else None


def describe_live(step: int, steps: int, logs: Mapping[str, Any], left: float | None) -> str:
    """The live line, most important first: narrow terminals cut off its end."""
    parts = [f"step {step:,}/{steps:,}"]
    parts += [f"{duration(left)} left"] if left is not None else []
    parts += [_SHOWN[key].format(logs[key]) for key in _LIVE if key in logs]
    if "memory/horizon" in logs:
        parts.append(f"memory horizon {logs['memory/horizon']:.1f}")
    return ", ".join(parts)


def use_our_console(trainer: Any, console: Console) -> None:
    """Show a run with `console` instead of transformers' progress bar, table or dictionaries."""
    for other in (PrinterCallback, trainer_module.DEFAULT_PROGRESS_CALLBACK):
        trainer.remove_callback(other)
    trainer.add_callback(console)


class Console(TrainerCallback):
    """Prints the logs of a run: one line each or, on a terminal, one live line.

    A live line would be garbled in files and notebooks. The held-out loss, which is measured
    rarely, always gets a line of its own.

    Args:
        live: whether to use a live line if the output is a terminal.
    """

    def __init__(self, *, live: bool = True) -> None:
        self._wanted, self._live, self._open = live, False, False
        self._logs: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None
        self._changed = -math.inf

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._live = self._wanted and sys.stdout.isatty()
        self._logs, self._first = {}, None
        if state.is_world_process_zero:
            self._change(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The first step is not timed, because it compiles kernels.
        self._first = self._first or (state.global_step, time.monotonic())
        if state.is_world_process_zero and time.monotonic() - self._changed > _EVERY:
            self._change(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._logs |= logs or {}
        if not self._live or "eval_loss" in (logs or {}):
            line = describe(state.global_step, logs or {}, self.seconds_left(state))
            self.say(line)
        self._change(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._change(state)
        self.close()
        self._live = False

    def seconds_left(self, state: Any) -> float | None:
        """Remaining seconds, from the mean time of all steps after the first; None if unknown."""
        if self._first is None or state.global_step <= self._first[0]:
            return None
        step, begun = self._first
        seconds = (time.monotonic() - begun) / (state.global_step - step)
        return seconds * max(state.max_steps - state.global_step, 0)

    def close(self) -> None:
        """End the live line, so that other output starts on a new one."""
        if self._open:
            print(flush=True)
            self._open = False

    def say(self, line: str | None) -> None:
        """Print a permanent line in place of the live one."""
        if line is not None:
            print(f"\r\x1b[K{line}" if self._open else line, flush=True)
            self._open = False

    def _change(self, state: Any) -> None:
        if not self._live:
            return
        left = self.seconds_left(state)
        line = describe_live(state.global_step, state.max_steps, self._logs, left)
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{line[:width]}\x1b[K", end="", flush=True)
        self._open, self._changed = True, time.monotonic()


def check_reports(names: Sequence[str]) -> None:
    """Raise ValueError for a name in report_to that is unknown or not installed.

    Trainer would only fail after all text is tokenised.
    """
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            hint = did_you_mean(name, INTEGRATION_TO_CALLBACK, f"choose none or from {known}")
            raise ValueError(f"report_to has no value {name}{hint}")
        if name not in (*get_available_reporting_integrations(), *_UNLISTED):
            package = _PACKAGES.get(name, name)
            raise ValueError(
                f"report_to {name} needs a package that is not installed: pip install {package}, "
                "or set report_to to none"
            )


def draw_curves(output_dir: str | Path) -> str | None:
    """Plot the logs of a run over its steps; return a message that says why if it cannot.

    Example: `draw_curves("runs/mine")` writes runs/mine/training.svg
    """
    path, logs = Path(output_dir) / CURVES_NAME, read_lines(Path(output_dir) / LOG_NAME)
    logs = [log for log in logs if "loss" in log or "eval_loss" in log]
    if not logs:
        return f"{CURVES_NAME} is not drawn: the log is empty"
    panels = {"loss": "Loss", "learning_rate": "Learning rate", "grad_norm": "Gradient norm"}
    panels |= {"tokens_per_second": "Tokens/s"}
    try:
        with figure_at(path, (13, 3), [1] * len(panels)) as (_, all_axes):
            for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
                _curve(axes, logs, name, OURS, "training")
                axes.set(title=title, xlabel="step")
                faint_grid(axes)
            _curve(all_axes[0], logs, "eval_loss", OTHER, "held out")
            all_axes[0].legend(frameon=False)
            all_axes[3].set_ylim(bottom=0)
    except (ImportError, OSError) as error:
        return f"{CURVES_NAME} is not drawn: {error}"
    return None


def _curve(axes: Any, logs: list[dict[str, Any]], name: str, color: str, label: str) -> None:
    # The log writes a non-finite number as null.
    points = [(log["step"], log[name]) for log in logs if log.get(name) is not None]
    if points:
        marker = "o" if len(points) < 30 else None
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=color, lw=1.2, marker=marker, ms=3, label=label)
