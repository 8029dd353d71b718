"""Side-by-side training takes the same steps as a plain training loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.training import (
    Optimisation,
    Recorded,
    Training,
    shuffled_order,
    train_side_by_side,
    training_device,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS, STEPS, BATCH = 24, 12, 4


def plan(**options):
    return Optimisation(**{"lr": 0.1, "steps": STEPS, "batch_size": BATCH} | options)


def make(device="cpu", seed=0, schedule=None, **options):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(ROWS, 3, generator=generator).to(device)
    targets = torch.randn(ROWS, 1, generator=generator).to(device)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    order = shuffled_order(ROWS, STEPS, BATCH, seed)
    return Training(model, loss_of, inputs, targets, order, plan(**options), schedule)


def loss_of(model, inputs, targets):
    return F.mse_loss(model(inputs), targets)


def test_a_gpu_multiplies_in_tf32_and_a_cpu_as_it_did():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert training_device("cpu") == torch.device("cpu")
        assert torch.get_float32_matmul_precision() == "highest"
        assert training_device("cuda").type == "cuda"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert (training_device().type == "cuda") == torch.cuda.is_available()


def parameters(training):
    return [p.detach().cpu() for p in training.model.parameters()]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_those_of_a_loop(device):
    options = {"weight_decay": 0.5, "warmup": 0.25, "clip": 0.01}
    training, other = make(device, **options), make(device, **options)
    train_side_by_side([training], every=5)
    model, rates = other.model, other.optimisation.rates()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
    )
    losses = []
    for step, rows in enumerate(other.order):
        for group in optimizer.param_groups:
            group["lr"] = rates[step].item()
        optimizer.zero_grad()
        loss = loss_of(model, other.inputs[rows], other.targets[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(training.losses.tolist(), losses)
    for a, b in zip(parameters(training), parameters(other), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_do_not_matter(device):
    alone = [make(device, seed=seed) for seed in range(3)]
    together = [make(device, seed=seed) for seed in range(3)]
    for training in alone:
        train_side_by_side([training])
    train_side_by_side(together, every=7)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.losses, b.losses)


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_function_follows_its_inputs(device):
    training = make(device)
    weight = training.model[0].weight
    recorded = Recorded(lambda: weight.square().sum(), training.stream)
    for _ in range(4):
        training.advance(2)
        torch.testing.assert_close(recorded().item(), weight.detach().square().sum().item())


def test_a_run_can_be_stopped():
    first, second = make(seed=0), make(seed=1)
    asked = []

    def after(training):
        asked.append((training is first, training.taken))
        return training is first

    train_side_by_side([first, second], after=after, every=5)
    assert asked == [(True, 5), (False, 5), (False, 10), (False, 12)]
    assert first.losses.isnan().sum() == STEPS - 5 and not second.losses.isnan().any()


def test_learning_rates():
    rates = plan(steps=100, warmup=0.1, min_lr=0.01).rates().tolist()
    assert rates[:10] == pytest.approx([0.01 * n for n in range(1, 11)])
    assert rates[10] == pytest.approx(0.1) and rates == [*rates[:10], *sorted(rates[10:])[::-1]]
    assert rates[55] == pytest.approx(0.055)
    assert rates[-1] == pytest.approx(0.01 + 0.09 * (1 + math.cos(math.pi * 89 / 90)) / 2)
    assert plan(schedule="constant").rates().unique().tolist() == pytest.approx([0.1])


def test_every_epoch_has_every_row_once():
    order = shuffled_order(ROWS, 12, BATCH, seed=3)
    first, second = order[:6].flatten(), order[6:].flatten()
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(ROWS))
    assert not torch.equal(first, second)


def test_decay_of_biases():
    kept, decayed = (make(weight_decay=0.5, decay_all=flag) for flag in (False, True))
    groups = [[g["weight_decay"] for g in t.optimizer.param_groups] for t in (kept, decayed)]
    assert groups == [[0.5, 0.0], [0.5, 0.5]]


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="batch_size must be at most the 3 rows, got 4"):
        shuffled_order(3, 1, 4, seed=0)
    with pytest.raises(ValueError, match="schedule must be 'cosine' or 'constant', got 'linear'"):
        plan(schedule="linear")
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        plan(steps=0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_schedule_changes_the_model_between_steps(device):
    """From step 7 on the model is another: on a GPU the recorded step has to be another too."""
    seen = []

    def schedule(model, step):
        seen.append(step)
        if step == 7:
            model[1] = nn.ReLU()
        return step == 7

    training, other, plain = make(device, schedule=schedule), make(device), make(device)
    train_side_by_side([training, plain], every=5)
    assert seen == list(range(STEPS))
    other.advance(7)
    # Takes the graph away: the rest are eager steps.
    other.finish()
    other.model[1] = nn.ReLU()
    other.advance(STEPS)
    other.finish()
    torch.testing.assert_close(training.losses, other.losses)
    assert torch.equal(training.losses[:7], plain.losses[:7])
    assert not torch.allclose(training.losses[7:], plain.losses[7:])
