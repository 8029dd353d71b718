"""The search for launch parameters: its steps anywhere, its measurements on a GPU."""

import pytest
import torch

from flash_frac.ops.scan.autotune import autotune, improve
from flash_frac.ops.scan.tuning import DEFAULT, TUNED, Walk, tuning_for


def test_it_finds_the_least_of_a_separable_cost():
    wanted = DEFAULT._replace(programs=2048, mix_warps=4, output=Walk(128, 8, 3))

    def cost(tuning):
        walks = zip(tuning[3:], wanted[3:], strict=True)
        apart = sum(abs(a - b) for x, y in walks for a, b in zip(x, y, strict=True))
        return apart + abs(tuning.programs - 2048) + abs(tuning.mix_warps - 4)

    assert improve(DEFAULT, cost)._replace(mix_backward_warps=2) == wanted


def test_what_cannot_run_is_not_chosen():
    assert improve(DEFAULT, lambda t: 1.0 if t == DEFAULT else float("inf")) == DEFAULT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(RuntimeError, match="autotune measures on a GPU"):
        autotune()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    key = (torch.bfloat16, torch.device("cuda", 0))
    try:
        assert autotune(batch=1, time=64, heads=1, modes=4, channels=16) == tuning_for(*key)
    finally:
        TUNED.clear()
