"""The command `frac`, as typed by a user."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import flash_frac
from flash_frac.manifest import write_manifest
from flash_frac.models import FracForCausalLM
from tests.commands import frac, make_checkpoint
from tests.tiny import tiny_config

SAMPLES = Path(__file__).parent / "evals" / "samples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


def test_help_and_errors():
    command = [sys.executable, "-m", "flash_frac.cli", "--help"]
    typed = subprocess.run(command, capture_output=True, text=True)
    assert "train" in typed.stdout and typed.returncode == frac("--help").returncode == 0
    done = frac("train", "absent.yaml")
    assert done.returncode == 1 and done.stderr.startswith("frac: there is no recipe absent.yaml")
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    done = frac("train", "x.yaml")
    assert done.returncode == 1
    assert "frac train needs accelerate: pip install 'flash-frac[train]'" in done.stderr


def test_bench(checkpoint, tmp_path):
    out = tmp_path / "rows.json"
    options = ("--parts", "prefill", "--peers", "none", "--lengths", "16,32", "--out", out)
    done = frac("bench", checkpoint, *options)
    assert done.returncode == 0, done.stderr
    assert "| tokens/s | mode | state, MiB | prefill@16 | prefill@32 |" in done.stdout
    # Neither rows of a 1.3B model on a GPU, nor the error of another dtype than the rows have.
    assert "paper" not in done.stdout and "bfloat16" not in done.stdout
    assert "a small model in float32: logits off by" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"float32"}
    assert all(float(row["error"]) < 1e-5 for row in rows)


def test_bench_checks_its_options_before_the_config():
    """The config is missing, because there is no GPU, and may take a download."""
    for option, value in (("--parts", "fly"), ("--peers", "fly"), ("--lengths", "fly")):
        done = frac("bench", option, value)
        assert done.returncode == 1 and done.stderr.startswith(f"frac: {option[2:]} must be"), value


def test_doctor():
    done = frac("doctor", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_inspect(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("memory fades as a power law " * 20)
    out = tmp_path / "out"
    done = frac("inspect", checkpoint, "--text", tmp_path / "text.txt", "--out", out)
    assert done.returncode == 0, done.stderr
    assert (out / "index.html").exists() and (out / "report.json").exists()
    text = ("--text", tmp_path / "text.txt", "--out", tmp_path / "both")
    done = frac("inspect", checkpoint, checkpoint, *text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("both/before.json and report.json.\n")
    assert (tmp_path / "both" / "before_after.svg").exists()


def test_a_bad_value_names_its_option(checkpoint, tmp_path):
    absent = tmp_path / "absent"
    inspect = ("inspect", checkpoint, "--out", tmp_path / "out")
    for command, problem in (
        ((*inspect, "--text", absent), f"frac: --text {absent} does not exist"),
        ((*inspect, "--text", tmp_path), f"frac: --text {tmp_path} is a folder"),
        ((*inspect, "--tokens", 3), "Invalid value for '--tokens'"),
        (("generate", checkpoint, "--state", absent), f"frac: --state {absent} does not exist"),
    ):
        done = frac(*command)
        assert done.returncode and problem in done.stderr, done.stderr


def test_version():
    done = frac("--version")
    assert (done.returncode, done.stdout) == (0, f"flash-frac {flash_frac.__version__}\n")


@pytest.fixture
def not_finite(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


COMMANDS = {
    "generate": ("--prompt", "x"),
    "chat": (),
    "inspect": ("--out", "page"),
    "eval": ("--suite", "lm", "--tasks", "piqa", "--data-dir", SAMPLES),
    "serve": ("--port", "0"),
    "train": (),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_broken_model(command, not_finite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = (not_finite, *COMMANDS[command])
    if command == "train":
        (tmp_path / "text.txt").write_text("some words " * 100)
        recipe = {"model_name_or_path": str(not_finite), "data_files": ["text.txt"]}
        recipe |= {"tokenizer": "bytes", "output_dir": "run", "max_steps": 1, "use_cpu": True}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        arguments = ("recipe.yaml",)
    done = frac(command, *arguments)
    assert done.returncode == 1
    problem = "is refused: tensors with NaN or inf: model.norm.weight"
    assert done.stderr.splitlines()[-1].startswith("frac: ") and problem in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_verifies_a_checkpoint(checkpoint, tmp_path):
    """All of its files, by the manifest that training writes."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    said = " ".join(frac("doctor", folder).stdout.split())
    assert "not verified: there is no manifest.json" in said
    write_manifest(folder)
    done = frac("doctor", folder)
    assert done.returncode == 0 and "files match their checksums in" in done.stdout
    for name in ("model.safetensors", "config.json"):
        whole = (folder / name).read_bytes()
        # A digit of the settings, and a bit of the last weight.
        (folder / name).write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
        done = frac("doctor", folder)
        assert done.returncode == 1 and "Wrong: files" in done.stdout
        # Lines are wrapped to the terminal.
        assert f"{name} is damaged".replace(" ", "") in "".join(done.stdout.split())
        (folder / name).write_bytes(whole)


def test_doctor_examines_a_checkpoint(checkpoint, not_finite, tmp_path):
    done = frac("doctor", checkpoint)
    assert done.returncode == 0 and "No problems found." in done.stdout
    done = frac("doctor", not_finite)
    assert done.returncode == 1 and "Wrong: weights." in done.stdout
    assert "NaN or inf: model.norm.weight" in done.stdout
    for path in not_finite.glob("tokenizer*"):
        path.unlink()
    (not_finite / "model.safetensors").write_bytes(b"junk")
    done = frac("doctor", not_finite)
    words = " ".join(done.stdout.split())
    assert "warning tokenizer" in words and "pass --tokenizer" in words
    assert "is cut short, damaged" in words
    done = frac("doctor", tmp_path / "absent")
    assert done.returncode == 1 and "Wrong: checkpoint." in done.stdout


def test_outputs_are_checked_before_the_work(tmp_path):
    """Before a checkpoint is looked for, which here is none."""
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "out"
    for command in (
        ("generate", "absent/", "--prompt", "x", "--save-state", below),
        ("chat", "absent/", "--save-state", below),
        ("inspect", "absent/", "--out", below),
        ("eval", "absent/", "--out", below),
        ("eval", "compare", "absent/", "--out", below),
        ("eval", "prepare", below),
        ("data", "prepare", "absent.txt", below),
        ("bench", "frac-tiny", "--out", below),
        ("quickstart", "--output-dir", below),
    ):
        done = frac(*command)
        assert done.returncode == 1 and "cannot be written to" in done.stderr, command
        assert f"{tmp_path / 'file'} is a file" in done.stderr, command
    done = frac("generate", "absent/", "--prompt", "x", "--save-state", tmp_path)
    assert "is a folder; name a file" in done.stderr


def test_binary_texts_are_named(checkpoint, tmp_path):
    (tmp_path / "text.bin").write_bytes(b"\xff\x00")
    done = frac("inspect", checkpoint, "--text", tmp_path / "text.bin", "--out", tmp_path / "out")
    assert done.returncode == 1 and f"{tmp_path / 'text.bin'} is not UTF-8 text" in done.stderr
    done = frac("generate", checkpoint, stdin=b"\xff\x00")
    assert done.returncode == 1 and "standard input is not UTF-8 text" in done.stderr


def test_a_tokenizer_can_be_named(checkpoint, tmp_path, monkeypatch):
    """For a model that was saved without one, as README saves it."""
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=lambda *_: ["tokenizer.json"])
    for path in bare.glob("tokenizer*"):
        path.unlink()
    monkeypatch.chdir(tmp_path)
    for command, options in COMMANDS.items():
        if command != "train":
            done = frac(command, bare, *options)
            expected = f"frac: {bare} has no tokenizer; pass --tokenizer, or save one next to it"
            assert (done.returncode, done.stderr) == (1, expected), command
    options = ("--prompt", "To be", "--temperature", 0, "--max-new-tokens", 5)
    named = frac("generate", bare, *options, "--tokenizer", "bytes")
    assert named.stdout == frac("generate", checkpoint, *options).stdout != ""
    done = frac("inspect", bare, "--tokenizer", "bytes", "--out", "page", "--tokens", 64)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchao_says_nothing_when_training_imports_it():
    done = subprocess.run(
        [sys.executable, "-c", "import flash_frac.train"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_torchao_says_nothing_when_models_import_it():
    """transformers does, for every command that loads a model."""
    script = (
        "import sys; sys.argv = ['frac', 'export', 'no', 'where']; import flash_frac.cli as cli"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; cli.main()"], capture_output=True, text=True
    )
    expected = "frac: checkpoint must be a folder with a config.json, got no\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_weights_can_be_quantised(checkpoint):
    options = ("--prompt", "To be", "--temperature", 0, "--max-new-tokens", 5)
    for kind in ("int8", "fp8"):
        done = frac("generate", checkpoint, *options, "--quantize", kind)
        assert done.returncode == 0 and done.stdout.startswith("To be"), done.stderr
    done = frac("generate", checkpoint, *options, "--quantize", "int3")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "frac: quantize must be int8 or fp8, got 'int3'"


def test_a_tokenizer_that_is_too_large_is_named(tmp_path):
    FracForCausalLM(tiny_config(vocab_size=100)).save_pretrained(tmp_path / "small")
    command = ("inspect", tmp_path / "small", "--tokenizer", "bytes", "--out", tmp_path / "page")
    done = frac(*command)
    assert done.returncode == 1 and f"but the vocab_size of {command[1]} is 100" in done.stderr
