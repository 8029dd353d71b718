"""Train small models side by side: on a GPU each is a CUDA graph replayed in a stream of its own.

A step of a small model costs more to launch than to compute. Its graph takes the batch from data on
the device by a counter that is there too, so that a replay is a whole step: batch, loss, gradients,
clipping, learning rate and AdamW. Several models then share the GPU without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

# Steps taken before a graph is captured, which must find every buffer in its place.
_EAGER_STEPS = 3

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
# Changes the model before a step of this number, from 0; True if its step is another from then on.
Schedule = Callable[[nn.Module, int], bool]


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """AdamW and the course of its learning rate.

    Attributes:
        lr: the highest learning rate.
        weight_decay: of matrices; of biases, norms and scalars too if `decay_all`.
        steps, batch_size: how long, and how many rows at a time.
        schedule: "cosine" from lr to min_lr, or "constant"; both after the warm-up.
        warmup: share of the steps in which the learning rate rises from 0.
        clip: largest norm of all gradients together; None for no clipping.
        bfloat16: compute in mixed precision; weights stay float32.
    """

    lr: float
    steps: int
    batch_size: int
    weight_decay: float = 0.0
    decay_all: bool = False
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.0
    min_lr: float = 0.0
    clip: float | None = None
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"schedule must be 'cosine' or 'constant', got {self.schedule!r}")
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def rates(self) -> Tensor:
        """The learning rate of every step, (steps,) float32."""
        step = torch.arange(self.steps, dtype=torch.float64)
        rising = round(self.warmup * self.steps)
        rates = torch.full_like(step, self.lr)
        if self.schedule == "cosine":
            along = (step - rising).clamp_min(0) / max(1, self.steps - rising)
            fall = (1 + torch.cos(math.pi * along)) / 2
            rates = self.min_lr + (self.lr - self.min_lr) * fall
        return torch.where(step < rising, self.lr * (step + 1) / max(1, rising), rates).float()


def training_device(name: str | None = None) -> torch.device:
    """The device of this name, or a GPU if there is one.

    On a GPU products of float32 are TF32 from then on: in float32 throughout they would take more
    time than all else in baselines that are plain torch.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return device


def shuffled_order(num_rows: int, steps: int, batch_size: int, seed: int) -> Tensor:
    """Which rows each step takes, (steps, batch_size): every epoch in an order of its own."""
    if num_rows < batch_size:
        raise ValueError(f"batch_size must be at most the {num_rows} rows, got {batch_size}")
    generator = torch.Generator().manual_seed(seed)
    per_epoch = num_rows // batch_size
    epochs = -(-steps // per_epoch)
    orders = [
        torch.randperm(num_rows, generator=generator)[: per_epoch * batch_size]
        for _ in range(epochs)
    ]
    return torch.cat(orders).view(-1, batch_size)[:steps]


class Training:
    """One model on its way: `advance` takes steps, whose losses are in `losses` (steps,).

    Args:
        model: on the device of the data.
        loss: of the model on inputs and targets of a batch.
        inputs, targets: all rows, on the device; rows of whole numbers may be of any integer dtype.
        order: (steps, batch_size) rows of each step.
        optimisation: the rest.
        schedule: called before every step; when it says that it changed the model, the graph is
            recorded again.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        inputs: Tensor,
        targets: Tensor,
        order: Tensor,
        optimisation: Optimisation,
        schedule: Schedule | None = None,
    ) -> None:
        device, plan = inputs.device, optimisation
        self.model, self.loss, self.optimisation = model, loss, optimisation
        self.inputs, self.targets, self.order = inputs, targets, order.to(device)
        self.counter = torch.zeros(1, dtype=torch.long, device=device)
        self.losses = torch.full((optimisation.steps,), torch.nan, device=device)
        self.rates, self.taken = optimisation.rates().to(device), 0
        on_gpu = device.type == "cuda"
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": plan.weight_decay},
                {"params": others, "weight_decay": float(plan.decay_all) * plan.weight_decay},
            ],
            lr=torch.tensor(plan.lr, device=device),
            capturable=on_gpu,
            fused=on_gpu,
        )
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.schedule, self._record_at = schedule, _EAGER_STEPS

    def _step(self) -> None:
        rows = self.order.index_select(0, self.counter)[0]
        inputs, targets = self.inputs.index_select(0, rows), self.targets.index_select(0, rows)
        self.optimizer.zero_grad(set_to_none=True)
        # Without its cache, whose casts would outlive the graph that made them.
        half = self.optimisation.bfloat16
        with torch.autocast(inputs.device.type, torch.bfloat16, half, cache_enabled=False):
            loss = self.loss(self.model, inputs, targets)
        loss.backward()
        if self.optimisation.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.optimisation.clip)
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.counter)[0])
        self.optimizer.step()
        self.losses.index_copy_(0, self.counter, loss.detach()[None])
        self.counter += 1

    def _capture(self) -> None:
        assert self.stream is not None
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._step()

    def advance(self, num_steps: int) -> None:
        """Take `num_steps` more; on a GPU they are queued, and `finish` waits for them."""
        in_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        for _ in range(min(num_steps, self.optimisation.steps - self.taken)):
            if self.schedule is not None and self.schedule(self.model, self.taken):
                # Also gives the old graph's memory back.
                self.finish()
                self._record_at = self.taken + _EAGER_STEPS
            if self.stream is not None and self.taken == self._record_at:
                self.stream.synchronize()
                self._capture()
            with in_stream:
                if self.graph is None:
                    self._step()
                else:
                    self.graph.replay()
            self.taken += 1

    @property
    def done(self) -> bool:
        return self.taken >= self.optimisation.steps

    def finish(self) -> None:
        """Wait for all steps that were taken; give the graph's memory back."""
        if self.stream is not None:
            self.stream.synchronize()
        self.graph = None


class Recorded:
    """A function without arguments, which gives a tensor; on a GPU a graph from its second call on.

    For what is done again and again beside training, such as a test after every epoch. The function
    may not wait for the device.
    """

    def __init__(self, function: Callable[[], Tensor], stream: torch.cuda.Stream | None) -> None:
        self.function, self.stream = function, stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The result, when it is there; the next call may overwrite it."""
        if self.stream is None:
            return self.function()
        if self._result is None:
            # The first call compiles kernels, which a recording cannot.
            with torch.cuda.stream(self.stream):
                self._result = self.function()
        else:
            if self._graph is None:
                self.stream.synchronize()
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self.stream):
                    self._result = self.function()
            with torch.cuda.stream(self.stream):
                self._graph.replay()
        self.stream.synchronize()
        return self._result


def train_side_by_side(
    trainings: Sequence[Training],
    *,
    after: Callable[[Training], bool] | None = None,
    every: int = 100,
) -> None:
    """Take all steps of all trainings, in turns.

    Args:
        after: called for each training after every `every` steps and at its end, when its steps are
            done on the device; True stops it early.
    """
    running = list(trainings)
    while running:
        for _ in range(every):
            for training in running:
                training.advance(1)
        for training in tuple(running):
            if training.stream is not None:
                training.stream.synchronize()
            if (after is not None and after(training)) or training.done:
                training.finish()
                running.remove(training)
