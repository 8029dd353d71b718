"""Time what a FracStream does at the shape of a model: save, load, and one token more.

    python benchmarks/stream.py [--config flash_frac/recipes/models/frac-130m/config.json]

Random weights, in bfloat16; the 1.3B model unless told. Rows go to <gpu>.csv or cpu.csv:
    save, load  a file on the local disk, fsync included; its size does not depend on T
    stream      greedy decoding by `FracStream.generate`, after T tokens were fed
The kernels are checked in a small model against float64 first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from measure import add_options, row_keeper

from flash_frac.bench.models import check
from flash_frac.bench.parts import count
from flash_frac.bench.peers import build
from flash_frac.bench.timing import OURS, Times, make_row, quantiles, wall_ms
from flash_frac.models import FracConfig
from flash_frac.recipes import find_config
from flash_frac.stream import FracStream

CONFIG = find_config("frac-1.3b") / "config.json"
DTYPE = torch.bfloat16
REPEATS = 7
# Tokens that are fed, and generated in a call, on a GPU and on a CPU.
TOKENS = {"cuda": (1024, 256), "cpu": (16, 8)}


def file_times(stream: FracStream, path: Path) -> dict[str, Times]:
    """Of a whole file, again and again, after a first time that does not count."""
    ways = {
        "save": partial(stream.save, path),
        "load": partial(FracStream.load, path, stream.model),
    }
    times = {}
    for name, way in ways.items():
        way()
        times[name] = quantiles([wall_ms(way) for _ in range(REPEATS)])
    return times


def step_times(stream: FracStream, num_tokens: int) -> Times:
    """Of one token, in a stream that goes on and on; graphs are recorded before."""

    def run() -> None:
        made = sum(1 for _ in stream.generate(max_new_tokens=num_tokens, eos=False))
        assert made == num_tokens, f"{made} of {num_tokens} tokens were generated"

    run()
    return quantiles([wall_ms(run) / num_tokens for _ in range(REPEATS)])


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the model")
    add_options(parser, peers=False)
    options = parser.parse_args(typed)
    keep = row_keeper(__file__, typed, options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fed, generated = TOKENS[device]
    error = check(device, "triton" if device == "cuda" else "torch")
    model = build(FracConfig.from_json_file(options.config), DTYPE, device)
    config = model.config
    shape = {"B": 1, "T": fed, "H": config.num_attention_heads}
    shape |= {"M": config.frac_num_modes, "D": config.frac_head_dim}
    row = partial(make_row, f"{OURS} {count(model)} (FracStream)", peak=None, error=error)
    stream = FracStream(model).feed(torch.randint(3, config.vocab_size, (1, fed)))
    with tempfile.TemporaryDirectory() as folder:
        for name, times in file_times(stream, Path(folder) / "state.safetensors").items():
            keep([row(name, shape, DTYPE, times, tokens=None)])
    keep([row("stream", shape, DTYPE, step_times(stream, generated), tokens=1)])


if __name__ == "__main__":
    main()
