"""Compiled blocks train like plain ones: every type of layer, packed, recomputed, sharded.

aot_eager traces forward and backward like inductor, without the C++ compiler.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from flash_frac.train import FracTrainer, load_recipe, train
from flash_frac.train.nonfinite import NotFiniteError
from tests.train.runs import finish, losses, start_together
from tests.train.test_distributed import MIXED

QUICK = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 3}


def without_inductor():
    torch.compile = partial(torch.compile, backend="aot_eager")


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without inductor; gives the counts of dynamo."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    return counters


def same_losses(one, other):
    one, other = dict(losses(one)), dict(losses(other))
    assert one == pytest.approx(other, rel=1e-6) and len(one) == 3


def test_every_type_of_layer(write_recipe, tmp_path, traced):
    changes = {"separate_documents": True, "config_overrides": MIXED, "memory_law_steps": 2}
    path = write_recipe(gradient_checkpointing=True, **QUICK, **changes)
    train(load_recipe(path, ["--output_dir", str(tmp_path / "plain")]))
    assert not traced["stats"]
    result = train(load_recipe(path, ["--compile_blocks", "true"]))
    assert traced["stats"]["unique_graphs"] >= 4 and not traced["graph_break"]
    same_losses(tmp_path / "run", tmp_path / "plain")
    assert not any("forward" in vars(block) for block in result.model.model.layers)


def test_layers_share_what_is_compiled(write_recipe, traced):
    deep = {"num_hidden_layers": 12}
    train(load_recipe(write_recipe(compile_blocks=True, config_overrides=deep, **QUICK)))
    assert traced["stats"]["unique_graphs"] == 1


def test_layers_that_carry_states_share_it_too(write_recipe, tmp_path, traced):
    layers = ["frac", "sliding_attention"] * 6
    deep = {"num_hidden_layers": 12, "mixer_types": layers, "sliding_window": 20}
    changes = {"stateful": True, "separate_documents": True, "config_overrides": deep}
    path = write_recipe(**QUICK, **changes)
    train(load_recipe(path, ["--output_dir", str(tmp_path / "plain")]))
    result = train(load_recipe(path, ["--compile_blocks", "true"]))
    # One for the first step, which has no states, and one for all others.
    assert traced["stats"]["unique_graphs"] == 2 * 2
    same_losses(tmp_path / "run", tmp_path / "plain")
    assert [block.layer_idx for block in result.model.model.layers[::2]] == [0, 2, 4, 6, 8, 10]


def test_the_whole_model(write_recipe, tmp_path, traced):
    path = write_recipe(separate_documents=True, config_overrides=MIXED, **QUICK)
    train(load_recipe(path, ["--output_dir", str(tmp_path / "plain")]))
    train(load_recipe(path, ["--torch_compile_backend", "aot_eager"]))
    assert traced["stats"]["unique_graphs"] >= 1 and not traced["graph_break"]
    same_losses(tmp_path / "run", tmp_path / "plain")


BLOCKS = ("--compile_blocks", "true")
WHOLE = ("--torch_compile_backend", "aot_eager", "--gradient_checkpointing", "true")


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(BLOCKS, id="blocks"), pytest.param(WHOLE, id="whole", marks=pytest.mark.slow)],
)
def test_sharded(write_recipe, tmp_path, arguments):
    layers = {**MIXED, "mixer_types": ["frac", "sliding_attention"], "num_hidden_layers": 2}
    changes = {"separate_documents": True, "config_overrides": layers}
    path = write_recipe(fsdp=True, per_device_train_batch_size=1, **QUICK, **changes)
    plain, compiled = tmp_path / "plain", tmp_path / "run"
    processes = start_together(2, path, "--output_dir", plain)
    more = start_together(2, path, *arguments, before=without_inductor)
    for process in [*processes, *more]:
        finish(process)
    same_losses(compiled, plain)


def test_what_is_not_finite_is_found_inside_of_blocks(write_recipe, traced, monkeypatch):
    step = FracTrainer.training_step

    def overflow(self, *args, **kwargs):
        if self.state.global_step == 1:
            with torch.no_grad():
                self.frac_model().model.layers[1].mixer.in_proj.weight.mul_(1e30)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(FracTrainer, "training_step", overflow)
    with pytest.raises(NotFiniteError, match=r"output of model\.layers\.1\.mixer\.\w+"):
        train(load_recipe(write_recipe(compile_blocks=True, **QUICK)))


def test_what_cannot_be_combined(write_recipe):
    with pytest.raises(ValueError, match="compile_blocks and torch_compile cannot be combined"):
        load_recipe(write_recipe(compile_blocks=True, torch_compile=True))
