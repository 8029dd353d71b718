"""Train small models side by side: on a GPU each is a CUDA graph replayed in its own stream.

A step of a small model takes longer to launch than to compute. Data and step counter are on the
device, so one replay is a whole step: batch, loss, gradients, clipping, learning rate and AdamW.
Several models then share the GPU without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

# Steps before a graph is captured, which needs all buffers to be allocated.
_EAGER_STEPS = 3

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
# Called with the step number, from 0, before each step; returns True if it changed the model.
Schedule = Callable[[nn.Module, int], bool]


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """AdamW and its learning-rate schedule.

    Attributes:
        lr: peak learning rate.
        weight_decay: for matrices; also for biases, norms and scalars if `decay_all`.
        steps, batch_size: number of steps, and rows per step.
        schedule: "cosine" from lr to min_lr, or "constant"; both after the warm-up.
        warmup: fraction of the steps in which the learning rate rises from 0.
        clip: maximum global gradient norm; None for no clipping.
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
    """The named device; by default a GPU if available.

    On a GPU this turns TF32 on for float32 products: in full float32 they would take most of the
    time of the plain-torch baselines.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    return device


def shuffled_order(num_rows: int, steps: int, batch_size: int, seed: int) -> Tensor:
    """Row indices of each step, (steps, batch_size); every epoch has its own random order."""
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
    """Training of one model: `advance` takes steps and records their `losses` (steps,).

    Args:
        model: on the device of the data.
        loss: function of the model, and of inputs and targets of a batch.
        inputs, targets: all rows, on the device; integer rows may have any integer dtype.
        order: (steps, batch_size) row indices of each step.
        optimisation: optimizer settings.
        schedule: called before every step; if it returns True, the graph is captured again.
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
        # Without autocast's cache, whose casts would outlive the graph that made them.
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
        """Take `num_steps` more steps; on a GPU they are queued, and `finish` waits for them."""
        in_stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        for _ in range(min(num_steps, self.optimisation.steps - self.taken)):
            if self.schedule is not None and self.schedule(self.model, self.taken):
                # Also frees the old graph's memory.
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
        """Wait for all queued steps; free the graph's memory."""
        if self.stream is not None:
            self.stream.synchronize()
        self.graph = None


class Recorded:
    """A function without arguments that returns a tensor; on a GPU a graph from its second call on.

    For repeated work beside training, such as a test after every epoch. The function must not sync
    with the device.
    """

    def __init__(self, function: Callable[[], Tensor], stream: torch.cuda.Stream | None) -> None:
        self.function, self.stream = function, stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Wait for the result and return it; the next call may overwrite it."""
        if self.stream is None:
            return self.function()
        if self._result is None:
            # The first call compiles kernels, which is impossible during capture.
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
    """Run all trainings to their end, in turns.

    Args:
        after: called for each training after every `every` steps and at its end, once the device
            has finished them; returning True stops that training early.
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
