"""Predict the memory, time, disk and data of a run before it starts.

Example:
    >>> plan = plan_run(load_recipe("frac-1.3b", planned=16), gpu_memory=80)
    >>> print("\n".join(plan.lines()))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig

from flash_frac.models import FracConfig
from flash_frac.models.loading import find_checkpoint
from flash_frac.models.recomputing import policy_of
from flash_frac.train.arguments import FracTrainingArguments
from flash_frac.train.available import known_tokens
from flash_frac.train.memory import GIB, KINDS, Memory, Setup, count_parameters, memory_of
from flash_frac.train.monitor import duration
from flash_frac.train.others import describe_model
from flash_frac.train.recipe import Recipe
from flash_frac.train.speed import Speed, estimate_speed

# Memory of GPUs in GiB, by their names in `PEAK_TFLOPS`.
GPU_MEMORY = {"H200": 140, "H100 PCIe": 80, "H100": 80, "A100": 80, "L40S": 48, "B200": 180}
# Memory of the GPUs that the paper's models were trained on, in GiB.
PAPER_MEMORY = 80
# The CUDA context with the code of all kernels, and cuBLAS workspaces.
CONTEXT_BYTES = GIB
# The driver reserves some memory, and the allocator's blocks leave gaps.
USABLE = 0.95
# Numbers per weight that an optimizer stores, and needs temporarily, by prefix of its name.
OPTIMIZERS = {
    "adamw_torch_fused": (2, 0),
    "adamw_apex_fused": (2, 0),
    "adamw_torch": (2, 1),
    "adamw_bnb_8bit": (0.5, 0),
    "adamw_8bit": (0.5, 0),
    "adafactor": (0, 1),
    "sgd": (0, 0),
}


def setup_of(recipe: Recipe, gpus: int) -> tuple[Setup, list[str]]:
    """The settings that determine a run's memory, and notes on settings that are not counted."""
    args, data, config = recipe.training, recipe.data, config_of(recipe)
    notes, optimizer = [], str(getattr(args.optim, "value", args.optim))
    if not isinstance(config, FracConfig):
        notes.append(
            "activations and speed are planned for Frac models only: --max_steps 3 logs "
            f"peak_memory_gib and tokens_per_second of this {config.model_type}"
        )
    known = next((name for name in OPTIMIZERS if optimizer.startswith(name)), None)
    if known is None:
        notes.append(f"optim {optimizer} is counted as adamw_torch, two numbers per weight")
    moments, temporary = OPTIMIZERS[known or "adamw_torch"]
    fsdp: dict[str, Any] = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    options = {name.removeprefix("fsdp_"): value for name, value in fsdp.items()}
    if args.sharded and options.get("cpu_offload"):
        notes.append("cpu_offload is not counted: the plan has weights and optimizer on GPUs")
    kwargs = args.gradient_checkpointing_kwargs
    compiled = "model" if args.torch_compile else "blocks" if args.compile_blocks else "no"
    if compiled != "no":
        name = "torch_compile" if args.torch_compile else "compile_blocks"
        notes.append(f"{name} is not counted: it chooses itself which tensors to save")
    setup = Setup(
        config=config,
        gpus=gpus,
        batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        length=data.sequence_length,
        half=args.bf16 or args.fp16,
        sharded=args.sharded,
        recompute=args.gradient_checkpointing or bool(options.get("activation_checkpointing")),
        policy=policy_of(kwargs if isinstance(kwargs, dict) else {}),
        compile=compiled,
        whole=options.get("reshard_after_forward") is False,
        context=args.context_parallel_size,
        moments=moments,
        temporary=temporary,
        eval_batch=None if args.eval_strategy == "no" else args.per_device_eval_batch_size,
        separate=data.separate_documents,
        stateful=data.stateful,
    )
    return setup, notes


def config_of(recipe: Recipe) -> PreTrainedConfig:
    """The configuration of the model to train; for a checkpoint, weights are not read."""
    path = recipe.model.model_name_or_path
    if path is None:
        return recipe.model.config()
    found = find_checkpoint(path, argument="model_name_or_path")
    return FracConfig.from_pretrained(found.name, **found.options)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The predicted cost of a run.

    Attributes:
        gpu_memory: memory of each GPU in GiB.
        speed: None for models of other families, whose memory lacks the activations.
        steps: optimizer steps; None if they depend on text that is not tokenised yet.
        available: tokens of the training text; None if unknown, and `data` says why.
        advice: a message that says what to change if the run does not fit.
    """

    setup: Setup
    memory: Memory
    gpu_memory: float
    speed: Speed | None
    steps: int | None
    kept_checkpoints: int | None
    available: int | None
    data: str
    advice: str
    notes: list[str]

    @property
    def total(self) -> float:
        """Bytes that the run needs on each GPU, including the CUDA context."""
        return self.memory.peak + CONTEXT_BYTES

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.gpu_memory)

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run."""
        return None if self.steps is None else self.steps * self.setup.tokens_per_step

    @property
    def days(self) -> float | None:
        if self.tokens is None or self.speed is None:
            return None
        return self.tokens / self.speed.tokens_per_s / 86400

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of one checkpoint: float32 weights and optimizer state."""
        return 4 * (1 + self.setup.moments) * count_parameters(self.setup.config).total

    def lines(self) -> list[str]:
        """The plan as lines for the console."""
        return [
            *self._model_lines(),
            *self._memory_lines(),
            *self._time_lines(),
            *(f"note      {note}" for note in self.notes),
        ]

    def _model_lines(self) -> Iterator[str]:
        setup = self.setup
        counts = count_parameters(setup.config)
        yield f"model     {describe_model(setup.config, counts.total)}"
        ways = ["FSDP2" if setup.sharded else "data parallel"] if setup.gpus > 1 else []
        ways += [f"context parallel {setup.context}"] if setup.context > 1 else []
        ways += ["recomputation"] if setup.recompute else []
        yield (
            f"step      {setup.tokens_per_step:,} tokens: {setup.batch} x {setup.length} per GPU, "
            f"{setup.accumulation} batch{'es' * (setup.accumulation > 1)}, "
            f"{setup.gpus} GPU{'s' * (setup.gpus > 1)}" + (f" ({', '.join(ways)})" if ways else "")
        )

    def _memory_lines(self) -> Iterator[str]:
        for kind in KINDS:
            if size := self.memory.kinds.get(kind, 0):
                yield f"          {size / GIB:8.2f} GiB  {kind}"
        yield f"          {CONTEXT_BYTES / GIB:8.2f} GiB  CUDA context"
        verdict, what = "fits" if self.fits else "DOES NOT FIT", f"peak: {self.memory.moment}"
        if not self.setup.is_frac:
            verdict, what = "may fit" if self.fits else verdict, "activations not counted"
        yield (
            f"memory    {self.total / GIB:8.2f} GiB on each GPU, {verdict} in {self.gpu_memory:g} "
            f"GiB ({USABLE:.0%} usable); {what}"
        )
        if not self.fits:
            yield f"warning   {self.advice}"

    def _time_lines(self) -> Iterator[str]:
        speed, least = self.speed, ""
        if speed is not None:
            most, least = ("at most ", "at least ") if speed.is_bound else ("", "")
            yield f"speed     {most}{speed.tokens_per_s:,.0f} tokens/s, {speed.source}"
        if self.tokens is None:
            yield "time      unknown: num_train_epochs is set, and the text is not tokenised yet"
        else:
            time = "unknown" if self.days is None else least + duration(86400 * self.days)
            yield f"time      {time} for {self.steps:,} steps, {self.tokens:,} tokens"
        size, kept = self.checkpoint_bytes, self.kept_checkpoints
        # The oldest is deleted when the new one is complete.
        disk = "all are kept"
        if kept is not None:
            disk = f"at most {_size((kept + 1) * size)} for {kept} and one being written"
        final = 4 * count_parameters(self.setup.config).total
        yield f"disk      {_size(size)} per checkpoint, {disk}; final model {_size(final)}"
        yield f"data      {self.data}"


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def fits(memory: Memory, gpu_memory: float) -> bool:
    """Whether a run fits on a GPU with `gpu_memory` GiB."""
    return memory.peak + CONTEXT_BYTES <= USABLE * gpu_memory * GIB


def check_gpu(gpu: str, memory: float | None = None) -> None:
    """Raise ValueError if the type of a GPU is not known, or its memory in GiB is impossible.

    Example: `check_gpu("H200", 80)`
    """
    if gpu not in GPU_MEMORY:
        raise ValueError(f"gpu must be one of {', '.join(GPU_MEMORY)}, got {gpu}")
    if memory is not None and not 0 < memory < float("inf"):
        raise ValueError(f"gpu_memory must be a positive number of GiB, got {memory:g}")


def plan_run(
    recipe: Recipe,
    *,
    gpus: int | None = None,
    gpu_memory: float | None = None,
    gpu: str = "H200",
) -> Plan:
    """Predict the cost of a recipe's run from its settings alone.

    Args:
        gpus: number of GPUs; by default that of `load_recipe(planned=...)`, or of processes.
        gpu_memory: memory of each GPU in GiB; by default that of `gpu`.
        gpu: a name in `GPU_MEMORY`, which sets the speed.
    """
    args = recipe.training
    check_gpu(gpu, gpu_memory)
    gpu_memory = GPU_MEMORY[gpu] if gpu_memory is None else gpu_memory
    setup, notes = setup_of(recipe, gpus or args.planned or args.world_size)
    memory = memory_of(setup)
    available, where = known_tokens(recipe)
    steps = args.max_steps if args.max_steps > 0 else None
    if steps is None and available is not None:
        steps = max(1, int(args.num_train_epochs * available / setup.tokens_per_step))
    speed = None
    if setup.is_frac:
        speed = estimate_speed(setup, gpu=gpu, peak_tflops=args.peak_tflops)
    return Plan(
        setup=setup,
        memory=memory,
        gpu_memory=gpu_memory,
        speed=speed,
        steps=steps,
        kept_checkpoints=_kept_checkpoints(args),
        available=available,
        data=_data_line(steps, setup, available, where),
        advice="" if fits(memory, gpu_memory) else advise(setup, gpu_memory),
        notes=notes,
    )


def _kept_checkpoints(args: FracTrainingArguments) -> int | None:
    """Checkpoints that stay: the last ones, and always the best one. None for all."""
    if args.save_total_limit is None:
        return None
    return max(args.save_total_limit, 2 if args.load_best_model_at_end else 1)


def advise(setup: Setup, gpu_memory: float) -> str:
    """A message that says which fields to set so that a run fits, with the same tokens per step."""
    evaluation = _evaluation_changes(setup, gpu_memory)
    for changes in _changes(setup):
        changes |= evaluation
        memory = memory_of(replace(setup, **changes))
        if fits(memory, gpu_memory):
            fields = ", ".join(f"{_FIELDS[k]} to {_typed(v)}" for k, v in changes.items())
            size = (memory.peak + CONTEXT_BYTES) / GIB
            return f"set {fields}: {size:.1f} GiB on each GPU"
    kinds = ("weights", "optimizer") if setup.is_frac else KINDS
    always = sum(memory_of(setup).kinds.get(kind, 0) for kind in kinds)
    if always + CONTEXT_BYTES > USABLE * gpu_memory * GIB:
        return "weights and optimizer alone do not fit: use more GPUs with fsdp, or a smaller model"
    return "no batch fits: lower sequence_length, or use more GPUs with context_parallel_size"


def _evaluation_changes(setup: Setup, gpu_memory: float) -> dict[str, Any]:
    """A smaller evaluation batch, if evaluation does not fit."""
    if not setup.is_frac:
        return {}
    for batch in (setup.eval_batch or 1, *_divisors(setup.eval_batch or 1)):
        moments = memory_of(replace(setup, eval_batch=batch)).moments
        if fits(Memory({"evaluation": moments["evaluation"]}), gpu_memory):
            return {} if batch == (setup.eval_batch or 1) else {"eval_batch": batch}
    return {}


# Recipe fields by their names in `Setup`.
_FIELDS = {
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "recompute": "gradient_checkpointing",
    "sharded": "fsdp",
    "eval_batch": "per_device_eval_batch_size",
}


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changes(setup: Setup) -> Iterator[dict[str, Any]]:
    """Changes to try, cheapest first: smaller batches, sharding, recomputation."""
    base: list[dict[str, Any]] = [{}]
    if not setup.is_frac:
        # Its plan depends on neither batch nor recomputation.
        yield from ({"sharded": True} for _ in range(setup.gpus > 1 and not setup.sharded))
        return
    if setup.gpus > 1 and not setup.sharded:
        base.append({"sharded": True})
    if not (setup.recompute or setup.stateful):
        base += [{**changes, "recompute": True} for changes in base]
    for changes in base:
        yield dict(changes)
        for batch in _divisors(setup.batch):
            factor = setup.batch // batch
            yield {"batch": batch, "accumulation": setup.accumulation * factor, **changes}


def _divisors(number: int) -> Iterator[int]:
    """The divisors below a number, the largest first."""
    yield from (n for n in range(number // 2, 0, -1) if number % n == 0)


def _data_line(steps: int | None, setup: Setup, available: int | None, where: str) -> str:
    needed = None if steps is None else steps * setup.tokens_per_step
    asked = "tokens needed: unknown" if needed is None else f"{needed:,} tokens needed"
    if available is None:
        return f"{asked}; {where}"
    epochs = "" if needed is None else f", read {needed / available:.2f} times"
    return f"{asked}; {available:,} available ({where}){epochs}"
