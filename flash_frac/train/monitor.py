"""What a run says of itself: to the console, and as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from flash_frac.files import write_rows

LOG_NAME = "log.jsonl"
# In this order on the console, with these formats; the rest is in the files.
_SHOWN = {
    "loss": "loss {:.4f}",
    "eval_loss": "held-out loss {:.4f}",
    "eval_perplexity": "perplexity {:.2f}",
    "grad_norm": "gradient {:.2f}",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "peak {:.1f} GiB",
    "memory/horizon": "memory horizon {:.1f} tokens",
}


def describe(step: int, logs: dict[str, Any]) -> str | None:
    """A line for the console, or None if there is nothing to show."""
    parts = [text.format(logs[key]) for key, text in _SHOWN.items() if key in logs]
    return f"step {step}: " + ", ".join(parts) if parts else None


class ConsoleCallback(ProgressCallback):
    """A progress bar, and one line where Trainer would print a dictionary."""

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
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / LOG_NAME
        kept = [line for line in read_lines(path) if line["step"] <= state.global_step]
        write_rows(path, kept)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            path = Path(args.output_dir) / LOG_NAME
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            except OSError as error:
                # A full disk is reported without the name of the file.
                raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The logs in a log.jsonl; a last line that was cut off is left out."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
