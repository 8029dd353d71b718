"""Speed and memory of the designs, with random weights: rows of speed.csv.

    python -m experiments.mixed_models.speed [--models frac_delta ...]

Training as in run.py, alone on the GPU; greedy decoding in bfloat16 by `Generator`, after a context
of random tokens; and the bytes that the model remembers of one sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.language_model import loss
from experiments.mixed_models.models import DESIGNS, SLIDING_PIECE, make_config, make_model
from experiments.mixed_models.run import HERE
from experiments.table import Table, add_run_options, made_with, out_folder
from experiments.training import Optimisation, Training, training_device
from flash_frac.bench.parts import build
from flash_frac.bench.timing import synchronize
from flash_frac.inference import Generator
from flash_frac.models import FracCache, FracConfig, FracForCausalLM

KEY = ("model", "measurement", "length", "batch_size")
COLUMNS = (*KEY, "value", "unit", "commit", "machine", "torch")
# Steps and tokens that are not timed, in which kernels are compiled and graphs recorded.
_WARM_STEPS = 8


class Sizes(NamedTuple):
    """What is measured: lengths in tokens, batches, and how many steps are timed."""

    train: tuple[int, int] = (4096, 8)
    train_steps: int = 20
    contexts: tuple[int, ...] = (4096, 65536)
    batches: tuple[int, ...] = (1, 16)
    tokens: int = 64


SMOKE = Sizes(train=(32, 2), train_steps=2, contexts=(16, 64), batches=(1, 2), tokens=4)


def results(folder: Path) -> Table:
    """The rows in a folder, found by KEY."""
    return Table(folder / "speed.csv", COLUMNS, num_key=len(KEY))


def training_speed(config: FracConfig, sizes: Sizes, device: torch.device) -> float:
    """Tokens per second of training in mixed precision."""
    length, batch = sizes.train
    steps = _WARM_STEPS + sizes.train_steps
    plan = Optimisation(
        lr=1e-3, steps=steps, batch_size=batch, clip=1.0, bfloat16=device.type == "cuda"
    )
    ids = torch.randint(config.vocab_size, (batch, length + 1), device=device)
    order = torch.arange(batch).expand(steps, batch)
    model = make_model(config, seed=0).to(device)
    training = Training(model, loss, ids[:, :-1], ids[:, 1:], order, plan)
    training.advance(_WARM_STEPS)
    synchronize()
    start = time.perf_counter()
    training.advance(sizes.train_steps)
    synchronize()
    seconds = time.perf_counter() - start
    training.finish()
    return sizes.train_steps * batch * length / seconds


def decoding_speed(
    generator: Generator, vocab_size: int, context: int, batch: int, tokens: int
) -> float:
    """Tokens per second of a batch, of all its sequences together."""
    device = generator.model.lm_head.weight.device
    ids = torch.randint(vocab_size, (batch, context), device=device)
    stream = generator.stream(ids, max_new_tokens=_WARM_STEPS + tokens)
    for _ in range(_WARM_STEPS):
        next(stream)
    synchronize()
    start = time.perf_counter()
    for _ in range(tokens):
        next(stream)
    synchronize()
    return tokens * batch / (time.perf_counter() - start)


@torch.no_grad()
def state_bytes(model: FracForCausalLM, context: int) -> int:
    """Bytes of all states, keys and values after a context of one sequence."""
    device = model.lm_head.weight.device
    ids = torch.randint(model.config.vocab_size, (1, context), device=device)
    cache = FracCache(model.config)
    for part in ids.split(SLIDING_PIECE, dim=1):
        model.model(part, past_key_values=cache, use_cache=True)
    return sum(state.nbytes for state in cache.tensors()) + cache.memory(1).nbytes


def measure(config: FracConfig, sizes: Sizes, device: torch.device) -> Iterator[dict]:
    """The rows of one model, without its name."""
    length, batch = sizes.train
    speed = training_speed(config, sizes, device)
    yield _row("training", length, batch, round(speed), "tokens/s")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(config, dtype, device)
    generator = Generator(model)
    for context in sizes.contexts:
        yield _row("state", context, 1, state_bytes(model, context), "bytes")
        for batch in sizes.batches:
            speed = decoding_speed(generator, config.vocab_size, context, batch, sizes.tokens)
            yield _row("decoding", context, batch, round(speed, 1), "tokens/s")


def _row(measurement: str, length: int, batch: int, value: float, unit: str) -> dict:
    shape = {"length": length, "batch_size": batch}
    return {"measurement": measurement, **shape, "value": value, "unit": unit}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    add_run_options(parser)
    options = parser.parse_args(arguments)
    table, facts = results(out_folder(options, HERE)), made_with(options.commit)
    device, sizes = training_device(), SMOKE if options.smoke else Sizes()
    for name in options.models:
        if any(key[0] == name for key in table.rows):
            continue
        vocab_size = 259 if options.smoke else 32000
        config = make_config(DESIGNS[name], vocab_size, smoke=options.smoke)
        start = time.perf_counter()
        rows = [{"model": name, **row, **facts} for row in measure(config, sizes, device)]
        table.append(rows)
        values = [f"{row['measurement']} {row['length']} {row['value']}" for row in rows]
        print(f"{name} ({time.perf_counter() - start:.0f} s):", "; ".join(values), flush=True)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
