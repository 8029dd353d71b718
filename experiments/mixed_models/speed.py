"""Speed and memory of the designs, with random weights: rows of speed.csv.

    python -m experiments.mixed_models.speed [--models frac_delta ...] [--state-only]

Training as in run.py, one model at a time on the GPU; greedy decoding in bfloat16 with `Generator`,
after a context of random tokens; and the size of the state of one sequence in bfloat16, in bytes,
which --state-only measures alone, on any machine. Rows that are there are not measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.language_model import loss
from experiments.mixed_models.models import DESIGNS, make_config, make_model
from experiments.mixed_models.run import HERE
from experiments.table import Table, add_run_options, made_with, out_folder
from experiments.training import Optimisation, Training, training_device
from flash_frac.bench.subjects import build
from flash_frac.bench.timing import synchronize
from flash_frac.inference import Generator
from flash_frac.models import FracCache, FracConfig, FracForCausalLM

KEY = ("model", "measurement", "length", "batch_size")
COLUMNS = (*KEY, "value", "unit", "commit", "machine", "torch")
# Designs that differ from another in where attention is, how it is trained, or a factor of its
# queries: neither their speed nor their size differs.
ALIKE = {
    f"frac_attention_nope_{name}" for name in ("first", "last", "growing", "1_growing", "scaled")
}
# Tokens that a model reads before its size is measured.
_READ = 64
# Untimed steps and tokens, in which kernels are compiled and graphs captured.
_WARM_STEPS = 8


class Sizes(NamedTuple):
    """Settings of the measurements: lengths in tokens, batches, and number of timed steps."""

    train: tuple[int, int] = (4096, 8)
    train_steps: int = 20
    contexts: tuple[int, ...] = (4096, 65536)
    batches: tuple[int, ...] = (1, 16)
    tokens: int = 64


class Kind(NamedTuple):
    """A measurement: the key of a row, after the model."""

    measurement: str
    length: int
    batch_size: int


SMOKE = Sizes(train=(32, 2), train_steps=2, contexts=(16, 64), batches=(1, 2), tokens=4)


def results(folder: Path) -> Table:
    """The table of a folder; KEY identifies a row."""
    return Table(folder / "speed.csv", COLUMNS, num_key=len(KEY))


def training_speed(config: FracConfig, sizes: Sizes, device: torch.device) -> float:
    """Training throughput in mixed precision, tokens per second."""
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
    """Decoding throughput in tokens per second, over all sequences of a batch."""
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
    """Bytes of all states, keys and values after a context of one sequence.

    Only the first tokens are read. Keys and values of the others are zeros, because their number
    alone matters.
    """
    device, read = model.lm_head.weight.device, min(_READ, context)
    ids = torch.randint(model.config.vocab_size, (1, read), device=device)
    cache = FracCache(model.config)
    model.model(ids, past_key_values=cache, use_cache=True)
    layers: dict[int, Any] = {n: cache.layers[n] for n in cache.attention_layers}
    for n, layer in layers.items():
        batch, heads, _, channels = layer.keys.shape
        rest = layer.keys.new_zeros(batch, heads, context - read, channels)
        if context > read:
            cache.update(rest, rest, n)
    cache.slide()
    kept = [*cache.tensors(), *(x for layer in layers.values() for x in (layer.keys, layer.values))]
    return sum(x.nbytes for x in kept)


def kinds(sizes: Sizes, *, state_only: bool) -> list[Kind]:
    """All measurements of a model."""
    states = [Kind("state", context, 1) for context in sizes.contexts]
    if state_only:
        return states
    decoding = [Kind("decoding", *shape) for shape in product(sizes.contexts, sizes.batches)]
    return [Kind("training", *sizes.train), *states, *decoding]


def measure(
    config: FracConfig, sizes: Sizes, device: torch.device, wanted: Sequence[Kind]
) -> Iterator[dict]:
    """The rows of one model, without its name."""
    names = {kind.measurement for kind in wanted}
    generator = None
    if "decoding" in names:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = Generator(build(config, dtype, device))
    model = build(config, torch.bfloat16, device) if "state" in names else None
    for kind in wanted:
        value, unit = 0.0, "tokens/s"
        if kind.measurement == "training":
            value = round(training_speed(config, sizes, device))
        elif kind.measurement == "state":
            assert model is not None
            value, unit = state_bytes(model, kind.length), "bytes"
        else:
            assert generator is not None
            shape = kind.length, kind.batch_size
            value = round(decoding_speed(generator, config.vocab_size, *shape, sizes.tokens), 1)
        yield {**kind._asdict(), "value": value, "unit": unit}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    default = [name for name in DESIGNS if name not in ALIKE]
    parser.add_argument("--models", nargs="+", choices=DESIGNS, default=default)
    parser.add_argument("--state-only", action="store_true", help="only bytes of states; no GPU")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    table, facts = results(out_folder(options, HERE)), made_with(options.commit)
    device, sizes = training_device(), SMOKE if options.smoke else Sizes()
    for name in options.models:
        every = kinds(sizes, state_only=options.state_only)
        wanted = [kind for kind in every if (name, *kind) not in table]
        if not wanted:
            continue
        vocab_size = 259 if options.smoke else 32000
        config = make_config(DESIGNS[name], vocab_size, smoke=options.smoke)
        start = time.perf_counter()
        rows = [{"model": name, **row, **facts} for row in measure(config, sizes, device, wanted)]
        table.append(rows)
        values = [f"{row['measurement']} {row['length']} {row['value']}" for row in rows]
        print(f"{name} ({time.perf_counter() - start:.0f} s):", "; ".join(values), flush=True)
    print(f"{table.path}: {len(table.rows)} rows")


if __name__ == "__main__":
    main()
