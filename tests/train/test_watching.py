"""Progress of a run while it trains, and its records afterwards."""

import io
import os
import pty
import subprocess
import sys
import types
from types import SimpleNamespace
from unittest import mock

import pytest
from transformers import TrainerCallback, TrainerState
from transformers import trainer as trainer_module
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import rewrite_logs

from flash_frac.train import load_recipe, train, watching
from flash_frac.train.watching import CURVES_NAME, Console, describe, draw_curves

LOGS = {"loss": 2.5, "grad_norm": 0.125, "learning_rate": 3e-3, "tokens_per_second": 1234.5}


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def shown(self):
        """The lines of a screen: what was written over is gone."""
        rows = [""]
        for part in self.getvalue().replace("\x1b[K", "").splitlines(keepends=True):
            text = part.rstrip("\r\n")
            rows[-1] = text if text else rows[-1]
            if part.endswith("\n"):
                rows.append("")
        return rows


def test_plain_lines():
    line = "step 7: loss 2.5000, gradient norm 0.12, learning rate 3.00e-03, 1,234 tokens/s"
    assert describe(7, LOGS) == line
    assert describe(7, LOGS, 5400) == f"{line}, 1.50 hours left"
    assert describe(7, {"epoch": 1.0}, 5400) is None


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(watching.time, "monotonic", lambda: now.seconds)
    return now


def play(console, clock, steps=4):
    """Ten seconds for the first step and two for each of the others, with logs."""
    state = TrainerState(max_steps=10, is_world_process_zero=True)
    console.on_train_begin(None, state, None)
    for step in range(1, steps + 1):
        clock.seconds += 10 if step == 1 else 2
        state.global_step = step
        console.on_step_end(None, state, None)
        console.on_log(None, state, None, logs={**LOGS, "mfu": 0.418, "loss": 3 - step / 10})
        if step == 2:
            console.on_log(None, state, None, logs={"memory/horizon": 51.23, "memory/x": 1.0})
            console.on_log(None, state, None, logs={"eval_loss": 2.0, "eval_perplexity": 7.389})
    return state


@pytest.mark.parametrize("columns", [120, 40])
def test_one_live_line_on_a_terminal(monkeypatch, clock, columns):
    monkeypatch.setattr(
        watching.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 9))
    )
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = Console()
    state = play(console, clock)
    live = (
        "step 4/10, 12.0 seconds left, loss 2.6000, gradient norm 0.12, 1,234 tokens/s, MFU 41.8%, "
    )
    live = (live + "memory horizon 51.2")[: columns - 1]
    held_out = "step 2: held-out loss 2.0000, perplexity 7.39"
    assert sys.stdout.shown() == [held_out, live]
    console.on_train_end(None, state, None)
    console.close()
    assert sys.stdout.shown() == [held_out, live, ""]
    # The last evaluation comes after the end.
    console.on_log(None, state, None, logs={"eval_loss": 1.5})
    assert sys.stdout.shown()[2:] == ["step 4: held-out loss 1.5000", ""]


@pytest.mark.parametrize(("terminal", "live"), [(False, True), (True, False)])
def test_a_line_for_each_log_elsewhere(monkeypatch, clock, terminal, live):
    """In a file, or on a terminal with disable_tqdm."""
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    play(Console(live=live), clock)
    text = sys.stdout.getvalue()
    assert "\r" not in text and "\x1b" not in text
    lines = text.splitlines()
    assert len(lines) == 6 and lines[0].endswith("MFU 41.8%")
    assert lines[1].endswith("MFU 41.8%, 16.0 seconds left")
    assert lines[2] == "step 2: mean memory horizon of the layers 51.2 tokens"
    assert lines[3] == "step 2: held-out loss 2.0000, perplexity 7.39"


def test_other_processes_are_silent(monkeypatch, clock):
    monkeypatch.setattr(sys, "stdout", Terminal())
    console, state = Console(), TrainerState(max_steps=10, is_world_process_zero=False)
    console.on_train_begin(None, state, None)
    state.global_step, clock.seconds = 1, 5.0
    console.on_step_end(None, state, None)
    console.on_log(None, state, None, logs=LOGS)
    console.on_train_end(None, state, None)
    assert sys.stdout.getvalue() == ""


def test_a_run_on_a_terminal(write_recipe):
    """A real one: the line is written over, and what follows begins below it."""
    leader, follower = pty.openpty()
    path = write_recipe(disable_tqdm=False, eval_strategy="no")
    command = [sys.executable, "-m", "flash_frac.cli", "train", str(path)]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.Popen(command, stdout=follower, stderr=subprocess.PIPE, env=environment)
    os.close(follower)
    screen, part = Terminal(), b""
    try:
        while part := os.read(leader, 65536):
            screen.write(part.decode().replace("\r\n", "\n"))
    except OSError:
        # The other end is closed.
        pass
    assert done.wait() == 0 and b"it/s" not in done.stderr.read()
    assert "\rstep 1/6" in screen.getvalue() and "\rstep 5/6, " in screen.getvalue()
    *_, begun, live, end, nothing = screen.shown()
    assert begun.startswith("New run in") and end.startswith("The model is in")
    assert live.startswith("step 6/6, 0.0 seconds left, loss ") and nothing == ""


def test_lines_and_curves_of_a_run(write_recipe, tmp_path, capsys):
    train(load_recipe(write_recipe(eval_steps=3, memory_law_steps=3)))
    printed, run = capsys.readouterr(), tmp_path / "run"
    lines = [line for line in printed.out.splitlines() if line.startswith("step ")]
    assert len(lines) == 6 + 2 + 2 and "seconds left" in lines[1]
    assert "{'loss'" not in printed.out and "it/s" not in printed.err
    drawing = (run / CURVES_NAME).read_text()
    for words in ("Loss", "Learning rate", "Gradient norm", "Tokens/s", "held out"):
        assert f">{words}<" in drawing
    # Six points of a log, and two of evaluation.
    assert drawing.count("<use ") > 4 * 6 + 2


def test_curves_that_cannot_be_drawn(write_recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    train(load_recipe(write_recipe(max_steps=1)))
    last = capsys.readouterr().out.splitlines()[-1]
    needs = "a figure needs matplotlib: pip install 'flash-frac[plot]'"
    assert last == f"{CURVES_NAME} is not drawn: {needs}"
    assert (tmp_path / "run" / "final").is_dir() and not (tmp_path / "run" / CURVES_NAME).exists()
    assert draw_curves(tmp_path) == f"{CURVES_NAME} is not drawn: the log is empty"


@pytest.fixture
def notebook(monkeypatch):
    """What transformers looks for in a notebook, and a list of all that is displayed in it."""
    displayed = []
    kernel = SimpleNamespace(config={"IPKernelApp": {}})
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython, ipython.display = lambda: kernel, display
    display.HTML, display.display = str, lambda *a, **k: displayed.append(a) or mock.Mock()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    from transformers.utils.notebook import NotebookProgressCallback

    monkeypatch.setattr(trainer_module, "DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    yield displayed
    sys.modules.pop("transformers.utils.notebook", None)


def test_a_notebook_gets_plain_lines(notebook, write_recipe, capfd):
    """And neither the table of transformers nor a bar, which would run into each other."""
    train(load_recipe(write_recipe(disable_tqdm=False, eval_steps=3)))
    printed = capfd.readouterr()
    assert notebook == []
    assert "\r" not in printed.out and "it/s" not in printed.err
    assert len([x for x in printed.out.splitlines() if x.startswith("step ")]) == 6 + 2


class Recorder(TrainerCallback):
    """In the place of a callback of transformers that sends logs away."""

    sent: list = []  # noqa: RUF012

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.sent.append((state.global_step, rewrite_logs(logs)))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_reports_get_all_logs(write_recipe, monkeypatch, name):
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, Recorder)
    monkeypatch.setattr(watching, "get_available_reporting_integrations", lambda: [name])
    monkeypatch.setattr(Recorder, "sent", [])
    changes = {"eval_steps": 4, "memory_law_steps": 2, "peak_tflops": 1.0, "report_to": name}
    train(load_recipe(write_recipe(max_steps=4, **changes)))
    found = [(step, key) for step, logs in Recorder.sent for key in logs]
    for key in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"):
        assert [step for step, other in found if other == f"train/{key}"] == [1, 2, 3, 4]
    assert [step for step, key in found if key == "train/memory/horizon"] == [2, 4]
    assert [step for step, key in found if key == "eval/loss"] == [4]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wandb", "report_to wandb needs a package that is not installed: pip install wandb, or"),
        ("trackio", "report_to trackio needs .*: pip install trackio"),
        ("comet_ml", "pip install comet-ml"),
        ("tensorbord", r"report_to has no value tensorbord; did you mean tensorboard\?"),
    ],
)
def test_a_report_that_cannot_be_made(write_recipe, monkeypatch, value, message):
    """Known before any text is read; a plan is made on other machines."""
    name = "get_available_reporting_integrations"
    monkeypatch.setattr(watching, name, lambda: ["tensorboard"])
    path = write_recipe(report_to=["tensorboard", value])
    with pytest.raises(ValueError, match=message):
        load_recipe(path)
    load_recipe(path, planned=4)
