"""Several processes match the losses of one: data, sharded and context parallel."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flash_frac.models  # noqa: F401  (registers the model)
from flash_frac.train import load_recipe, train
from flash_frac.train.checkpoint import consolidate
from flash_frac.train.monitor import LOG_NAME, read_lines
from tests.train.runs import assert_same_weights, finish, start_together, weights

STEPS = 5
SHARDED = ["--fsdp", "--fsdp_config", '{"state_dict_type": "SHARDED_STATE_DICT"}']

# Every type of layer.
MIXED = {"mixer_types": ["frac", "delta", "attention", "sliding_attention"], "sliding_window": 9}
MIXED |= {"num_hidden_layers": 4, "mlp_intermediate_size": 24, "attention_positions": "none"}


def run(processes, path, *arguments):
    """`frac train` in several processes, on CPUs."""
    for process in start_together(processes, path, *arguments):
        finish(process)


def torchrun(processes, path, *arguments):
    """The same by the command."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--standalone", "-m", "flash_frac.cli", "train", str(path), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


def logged(folder, name="loss"):
    return [line[name] for line in read_lines(folder / LOG_NAME) if name in line]


@pytest.fixture
def compare(write_recipe, tmp_path):
    """A function that trains with one process and with several, and compares the two."""

    def compare(processes, *arguments, batch, whole=4, run=run, **changes):
        path = write_recipe(max_steps=STEPS, save_steps=3, lr_scheduler_type="constant", **changes)
        one, many = tmp_path / "one", tmp_path / "many"
        size = "--per_device_train_batch_size"
        train(load_recipe(path, [size, str(whole), "--output_dir", str(one)]))
        run(processes, path, size, str(batch), *arguments, "--output_dir", str(many))
        # Sums of float32 in another order, over five steps: losses differ by 9e-8, weights by 2e-6.
        assert logged(many) == pytest.approx(logged(one), rel=1e-6) and len(logged(one)) == STEPS
        assert logged(many, "eval_loss") == pytest.approx(logged(one, "eval_loss"), rel=1e-6)
        assert logged(many, "eval_tokens") == logged(one, "eval_tokens")
        ended = weights(many)
        for name, value in weights(one).items():
            torch.testing.assert_close(ended[name], value, rtol=0, atol=5e-6)
        return path, many

    return compare


@pytest.mark.parametrize(
    ("processes", "way"),
    [
        (2, run),
        pytest.param(2, torchrun, marks=pytest.mark.slow),
        pytest.param(4, run, marks=pytest.mark.slow),
    ],
)
def test_data_parallel(compare, processes, way):
    compare(processes, batch=4 // processes, run=way)


def test_sharded(compare, tmp_path):
    path, folder = compare(2, *SHARDED, batch=2, memory_law_steps=2)
    assert len(logged(folder, "memory/horizon")) == 2
    last = folder / f"checkpoint-{STEPS}"
    assert (last / "pytorch_model_fsdp_0").is_dir() and not (last / "model.safetensors").exists()
    joined = consolidate(last, tmp_path / "joined")
    assert_same_model(joined, folder / "final")
    assert AutoTokenizer.from_pretrained(joined).eos_token_id == 2
    resume_is_exact(2, path, folder, *SHARDED)


@pytest.mark.slow
def test_sharded_with_whole_checkpoints(compare):
    """As `fsdp` alone has it: each is a folder for from_pretrained, and can be resumed.

    With every type of layer, packed documents and recomputation.
    """
    arguments = ["--fsdp", "true", "--gradient_checkpointing"]
    changes = {"separate_documents": True, "config_overrides": MIXED}
    path, folder = compare(4, *arguments, batch=1, **changes)
    assert_same_model(folder / f"checkpoint-{STEPS}", folder / "final")
    resume_is_exact(4, path, folder, *arguments)


@pytest.mark.parametrize(
    ("model", "more"),
    [({}, {}), ({"tie_word_embeddings": False}, {"gradient_checkpointing": True})],
    ids=["tied", "untied, recomputed"],
)
def test_sharded_in_bfloat16(write_recipe, tmp_path, model, more):
    """Sharding changes no precision: two ranks give the same bits with FSDP2 and without.

    Times, norms and sums of gradients stay float32, and matrix products are those of autocast.
    """
    changes = {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 100.0}
    path = write_recipe(max_steps=3, config_overrides=MIXED | model, **changes, **more)
    for name, arguments in (("whole", ()), ("sharded", ("--fsdp", "true"))):
        run(2, path, *arguments, "--output_dir", str(tmp_path / name))
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    for name in ("loss", "eval_loss", "grad_norm"):
        # The norm is a sum over another order of parameters.
        assert logged(sharded, name) == pytest.approx(logged(whole, name), rel=1e-6)
    ended = weights(sharded)
    assert all(torch.equal(ended[name], value) for name, value in weights(whole).items())


def assert_same_model(one, other):
    one, other = (AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (one, other))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def resume_is_exact(processes, path, folder, *arguments):
    """Without its last checkpoint, the run finds the same end again."""
    before, ended = logged(folder), weights(folder)
    (folder / f"checkpoint-{STEPS}").rename(folder / "old")
    size = ["--per_device_train_batch_size", str(4 // processes), "--output_dir", str(folder)]
    run(processes, path, *size, *arguments)
    assert logged(folder) == before
    assert_same_weights(weights(folder), ended)


def test_context_parallel(compare):
    compare(2, "--context_parallel_size", "2", batch=4)


def test_context_parallel_beside_data_parallel(compare):
    """Four processes: two share each sequence, and there are two sequences at a time."""
    arguments = ["--context_parallel_size", "2", "--gradient_checkpointing"]
    arguments += ["--memory_law_steps", "2"]
    _, many = compare(4, *arguments, batch=1, whole=2, separate_documents=True)
    assert len(logged(many, "memory/horizon")) == 2


@pytest.mark.slow
def test_context_parallel_over_four(compare):
    changes = {"separate_documents": True, "config_overrides": MIXED}
    compare(4, "--context_parallel_size", "4", batch=1, whole=1, **changes)


def test_context_parallel_of_a_sharded_model(compare):
    """Two processes share the weights and each sequence, with every type of layer."""
    arguments = ["--fsdp", "true", "--context_parallel_size", "2", "--gradient_checkpointing"]
    changes = {"separate_documents": True, "config_overrides": MIXED}
    compare(2, *arguments, batch=1, whole=1, **changes)
