"""`frac train --dry_run`, alone and on several nodes as in docs/training.md."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import frac

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train.slurm"
PAGE = (ROOT / "docs" / "training.md").read_text()


def local(text, tmp_path):
    """What is typed behind a recipe to look at it here, without a GPU or a network."""
    paths = ["--data_files", text, "--output_dir", tmp_path / "run", "--cache_dir", tmp_path / "c"]
    typed = ["--tokenizer", "bytes", "--held_out", "0.1", "--sequence_length", "64", "--use_cpu"]
    return list(map(str, [*paths, *typed, "--dry_run"]))


def run_as_typed(command, **variables):
    """A command of the page or a script, with the programs and the package of this test."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": ":".join(paths), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def check(output, tmp_path):
    """One plan of two processes with a batch, from all of them together; and nothing written."""
    assert output.count("1,385,075,808 parameters") == 1, output
    assert "2 GPUs (FSDP2)" in output and "batch     4 x 64 tokens" in output
    assert re.search(r"    1     '.*(memory|fades|power)", output)
    assert list(tmp_path.iterdir()) == []


def test_the_plan_and_the_first_batch(write_recipe, tmp_path):
    recipe = write_recipe(cache_dir=str(tmp_path / "tokens"))
    before = sorted(tmp_path.rglob("*"))
    done = frac("train", recipe, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "step      128 tokens: 2 x 64 per GPU" in done.stdout
    assert "batch     2 x 64 tokens, in which" in done.stdout
    assert "in the order of the text (a run shuffles)" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_documents_that_are_held_out_are_not_shown(write_recipe):
    """The batch is of the first documents that a run would train on."""
    shown = {frac("train", write_recipe(seed=s), "--dry_run").stdout for s in range(8)}
    assert len({text[text.index("batch") :] for text in shown}) > 1


def test_a_stream_is_shown_as_the_first_gpu_reads_it(write_recipe, text_folder):
    changes = {"streaming": True, "held_out_documents": 2, "shuffle_buffer": 8, "held_out": None}
    recipe = write_recipe(dataset_name=str(text_folder), data_files=None, **changes)
    done = frac("train", recipe, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "as the first GPU reads it" in done.stdout and "unknown until it is read" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_train_batch_size": 4096}, "sequences of 64 tokens, fewer than one batch"),
        ({"config_overrides": {"vocab_size": 100}}, "vocab"),
        (
            {"data_files": ["nowhere"]},
            "data_files: nowhere does not exist",
        ),
        ({"model_name_or_path": "./nowhere", "config_name": None}, "path ./nowhere was not found"),
    ],
)
def test_a_dry_run_finds_what_would_end_a_run(write_recipe, tmp_path, changes, message):
    done = frac("train", write_recipe(**changes), "--dry_run")
    assert done.returncode == 1 and message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_line_of_the_page_for_several_nodes(text_folder, tmp_path):
    (line,) = re.findall(r"torchrun --nnodes 4 .*\\\n.*train frac-1.3b", PAGE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = line.replace("\\\n", " ").split()
    words[words.index("--nnodes") + 1] = "1"
    words[words.index("--nproc_per_node") + 1] = "2"
    words[words.index("--rdzv_endpoint") + 1] = f"127.0.0.1:{port}"
    done = run_as_typed([*words, *local(text_folder, tmp_path)])
    assert done.returncode == 0, done.stderr
    check(done.stdout, tmp_path)


@pytest.mark.slow
def test_the_script_for_slurm(text_folder, tmp_path, tmp_path_factory):
    """As Slurm would run it on one node of two, whose programs are stand-ins."""
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    assert "(examples/train.slurm)" not in PAGE and "sbatch examples/train.slurm" in PAGE
    programs = tmp_path_factory.mktemp("programs")
    # srun passes no number of CPUs on by itself.
    srun = '[[ $1 == --cpus-per-task=8 && "$*" == *" --max-restarts 3 "* ]] && shift && exec "$@"'
    for name, body in (("scontrol", "echo 127.0.0.1"), ("srun", srun)):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    line = f'PATH={programs}:$PATH exec bash {SCRIPT} frac-1.3b "$@"'
    done = run_as_typed(
        ["bash", "-c", line, "bash", *local(text_folder, tmp_path)],
        SLURM_JOB_NODELIST="node[1-4]",
        SLURM_NNODES="1",
        SLURM_GPUS_ON_NODE="2",
        SLURM_CPUS_PER_TASK="8",
        SLURM_JOB_ID=str(os.getpid()),
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, tmp_path)
