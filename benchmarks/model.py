"""Time a FRAC language model beside its peers, eager calls and CUDA graphs of each in one run.

    python benchmarks/model.py [--parts prefill forward decode train growth small] [--no-peers]

Random weights in bfloat16; on a CPU float32, tiny sizes and no graphs, to test the script.
    prefill  the backbone with its cache, batch 1; ours also with `Generator`
    forward  `model(ids)` without a cache, eager, batch 1
    decode   64 tokens after T, batch 1 and 64: `generate` and a graph; ours also with `Generator`,
             and how much longer a step of 2B takes than one of B
    train    forward and backward with labels, no optimizer: 8 x 4096 tokens
    growth   ours only: prompts of 16K to 1M tokens in pieces, and how far the time is from linear
    small    forward and forward+backward of a model of width 256, each of our backends
    plans    only on request, ours only: steps by the default of `flash_frac/ops/decode/plan.py`
             and by plans that may be faster, 16 tokens in a graph
Training, prefill and decoding of a small model are first checked against float64, and inference
once more with each kind of --quantize. Rows go to <gpu>.csv; last comes the paper's table. Rows of
--profile, the kernels of our model and the time in which none runs, go to profile/<gpu>.csv.

Everything for the figure and the tables, at one commit, because the figure compares rows of one
commit only. Minutes are estimates for an H200 that compiles all kernels first (2 of them for ours):

    MODEL="python benchmarks/model.py" BATCHES="1 2 4 8 16 32 64 256"
    $MODEL --parts prefill forward train --peers qwen3 --policies all cheap            # 5
    $MODEL --parts prefill forward train --peers gated_deltanet                        # 6
    $MODEL --parts prefill forward train --peers mamba2                                # 6
    $MODEL --parts prefill train --peers mamba3 mamba3_d64 mamba3_mimo                 # 8
    $MODEL --parts decode --only graph --batches $BATCHES --peers qwen3                # 6
    $MODEL --parts decode --only graph --batches $BATCHES --peers gated_deltanet       # 6
    $MODEL --parts decode --only graph --batches $BATCHES --peers mamba2               # 6
    $MODEL --parts decode --only graph --batches 1 64 --peers mamba3 mamba3_d64 mamba3_mimo  # 6
    $MODEL --parts decode --only eager --peers qwen3 gated_deltanet mamba2             # 6
    $MODEL --parts prefill decode train --batches 1 --modes 32 --no-peers              # 5
    $MODEL --parts prefill growth --lengths 65536 --no-peers                           # 4
    $MODEL --parts decode --only graph --batches 1 2 4 8 --quantize int8 fp8 --no-peers  # 5
    $MODEL --profile --lengths 1024 4096 16384 65536 --batches 1 8 64 256              # 5
    $MODEL --profile --parts decode --batches 1 8 --quantize int8                      # 3
    $MODEL --parts plans --batches 1 2 4 8 16 32 64 --prompt 64 --no-peers             # 4
    python benchmarks/perplexity.py CHECKPOINT TOKENS                                  # 2
On a machine that stays up, compiled kernels are kept, and the calls after the first take less.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flash_frac.bench.models import measure_models
from flash_frac.bench.parts import default_sizes
from flash_frac.bench.peers import MODEL_PEERS
from flash_frac.bench.plans import MEASURED, USUAL
from flash_frac.bench.profiling import PROFILE_COLUMNS, PROFILED, print_profile
from flash_frac.bench.rows import add_options, row_keeper
from flash_frac.bench.table import is_papers, paper_table
from flash_frac.bench.timing import exit_if_ours_failed
from flash_frac.models import FracConfig
from flash_frac.models.quantizing import CONFIGS
from flash_frac.models.recomputing import POLICIES
from flash_frac.recipes import find_config


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--parts", nargs="+", choices=[*USUAL, "plans"], default=USUAL)
    parser.add_argument("--config", type=Path, help="config.json of the model; default 1.3B")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of prefill and forward")
    parser.add_argument("--prompt", type=int, help="tokens before the decoded ones")
    parser.add_argument("--batches", type=int, nargs="+", help="sequences decoded together")
    parser.add_argument("--modes", type=int, nargs="+", default=[], help="more sizes of ours")
    parser.add_argument("--quantize", nargs="+", choices=CONFIGS, default=[], help="also quantised")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="also with recomputation")
    parser.add_argument("--only", choices=["eager", "graph"], help="prefill, decode: one mode only")
    parser.add_argument("--profile", action="store_true", help="kernels of our model, no speeds")
    add_options(parser, peers=MODEL_PEERS)
    options = parser.parse_args(typed)
    if options.config is None and not torch.cuda.is_available():
        parser.error("without a GPU, --config must name a tiny model")
    if options.profile:
        options.parts = [part for part in options.parts if part in PROFILED]
    kept = {"kind": "profile", "columns": PROFILE_COLUMNS, "show": print_profile}
    keep = row_keeper(__file__, typed, options, **(kept if options.profile else {}))
    failures, measured = [], []
    path = options.config or find_config("frac-1.3b") / "config.json"
    config = FracConfig.from_json_file(path)
    chosen = {name: getattr(options, name) for name in ("parts", "quantize", "modes")}
    chosen |= {"table": PROFILED if options.profile else MEASURED, "failures": failures}
    chosen["peers"] = [] if options.no_peers or options.profile else options.peers
    given = {"decode_batches": options.batches, "policies": options.policies, "only": options.only}
    given |= dict.fromkeys(("prefill", "forward"), options.lengths)
    sizes = default_sizes(prompt=options.prompt, **given)
    for rows in measure_models(config, sizes=sizes, **chosen):
        measured += keep(rows)
    if not options.profile:
        print("", *paper_table(measured, failures, paper=is_papers(config)), sep="\n")
    exit_if_ours_failed(failures)


if __name__ == "__main__":
    main()
