"""torchrun restarts a run that lost a rank; it resumes from its last complete checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import assert_same_weights, finish, losses, start_together, weights

SCRIPT = Path(__file__).with_name("dying.py")


@pytest.mark.slow
def test_a_restarted_run_ends_as_an_undisturbed_one(write_recipe, tmp_path):
    path = write_recipe(max_steps=8, save_steps=2, eval_strategy="no")
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--standalone", "--max-restarts", "1", "--monitor-interval", "0.1", str(SCRIPT)]
    command += [str(tmp_path / "has died"), "train", str(path), "--fsdp", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    torchrun = subprocess.Popen(
        [*command, "--output_dir", str(disturbed)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for process in start_together(2, path, "--fsdp", "true", "--output_dir", whole):
        finish(process)
    said, _ = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, said
    assert (tmp_path / "has died").exists()
    assert f"Resuming from {disturbed / 'checkpoint-4'} at step 5" in said, said
    assert losses(disturbed) == losses(whole) and len(losses(whole)) == 8
    assert_same_weights(weights(disturbed), weights(whole))
