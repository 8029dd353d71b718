"""`frac train ARGUMENTS` in which one rank kills itself once, after its step 5; for torchrun."""

import os
import signal
import sys
from pathlib import Path

import torch

from flash_frac.cli import main
from flash_frac.train import FracTrainer
from tests.train.runs import await_checkpoint


def die_once(mark: Path) -> None:
    step = FracTrainer.training_step

    def step_or_die(self, *args, **kwargs):
        if os.environ["RANK"] == "1" and self.state.global_step == 5 and not mark.exists():
            # What the run is to go on from.
            await_checkpoint(self.args.output_dir, 4)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    FracTrainer.training_step = step_or_die


if __name__ == "__main__":
    torch.set_num_threads(1)
    die_once(Path(sys.argv.pop(1)))
    main()
