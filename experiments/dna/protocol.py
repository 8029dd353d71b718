"""Definition of a run: its protocol, its options, and the columns of its row in results.csv."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.dna.data import RowSettings
from experiments.dna.designs import CORES, MODELS
from experiments.dna.fetch import CHROMOSOME_20
from experiments.table import add_run_options

LENGTHS = tuple(1024 * k for k in (1, 4, 8, 16, 32, 64))
LRS = (1e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1e-2, 2e-2)
KEY = (
    *("data", "mode", "unknown", "eos", "strands", "eval_tokens"),
    *("core", "model", "length", "steps", "batch_tokens", "lr", "seed"),
)
COLUMNS = (
    *KEY,
    *("valid_ppl", "test_ppl", "valid_base_ppl", "test_base_ppl", "test_tokens", "train_loss"),
    *("parameters", "train_s", "evaluate_s", "commit", "machine", "torch"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings shared by all runs.

    The paper gives AdamW with weight decay 0.1 and the cosine schedule of its language models, with
    10% warm-up. It gives neither tokens nor batch size; clipping is HyenaDNA's.

    Attributes:
        data: name of the FASTA file.
        rows: how rows are cut; each run sets its own length.
        strands: 2 if each training row comes from a random strand.
        core: as in `experiments.dna.designs`.
        max_tokens, batch_tokens: per run and per step, the same at every length.
        eval_tokens: most tokens of the validation and test splits each; 0 for all.
        warmup, weight_decay, clip: as in `Optimisation`.
        small: tiny models, for tests of the code.
    """

    data: str
    rows: RowSettings
    strands: int = 1
    core: str = "swiglu"
    max_tokens: int = 2**29
    batch_tokens: int = 2**17
    eval_tokens: int = 0
    warmup: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    small: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < self.batch_tokens:
            raise ValueError(
                f"max_tokens must be at least batch_tokens ({self.batch_tokens}), "
                f"got {self.max_tokens}"
            )

    @property
    def steps(self) -> int:
        return self.max_tokens // self.batch_tokens

    def batch_size(self, length: int) -> int:
        if self.batch_tokens % length:
            raise ValueError(
                f"batch_tokens must be a multiple of every length, got {self.batch_tokens} for "
                f"length {length}; choose a power of two that is at least the largest"
            )
        return self.batch_tokens // length


class Job(NamedTuple):
    """Settings that differ between runs."""

    model: str
    length: int
    lr: float
    seed: int

    def key(self, protocol: Protocol) -> tuple[Any, ...]:
        """Key of its row, in the order of KEY."""
        rows = protocol.rows
        return (
            *(protocol.data, rows.mode, rows.unknown, int(rows.eos)),
            *(protocol.strands, protocol.eval_tokens, protocol.core, self.model, self.length),
            *(protocol.steps, protocol.batch_tokens, self.lr, self.seed),
        )


def parse(description: str, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Protocol]:
    """The options, and the protocol that they set."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:4])
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--lrs", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--core", choices=CORES, default="swiglu")
    parser.add_argument("--fasta", type=Path, default=CHROMOSOME_20)
    parser.add_argument("--bed", type=Path, help="intervals and splits; default by position")
    parser.add_argument("--mode", choices=("hyenadna", "subsegment"), default="subsegment")
    parser.add_argument("--unknown", choices=("keep", "pad"), default="keep", help="how to read N")
    parser.add_argument("--no-eos", action="store_true", help="no [SEP] at the end of a row")
    parser.add_argument("--strands", type=int, choices=(1, 2), default=1, help="2: random strand")
    parser.add_argument("--max-tokens", type=int, help=f"per run; default {Protocol.max_tokens}")
    parser.add_argument("--steps", type=int, help="instead of --max-tokens")
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--eval-tokens", type=int, help="per evaluated split; 0 for all")
    parser.add_argument("--at-once", type=int, default=1, help="runs trained side by side")
    parser.add_argument("--device", help="default: a GPU if available")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    smoke = options.smoke
    options.lengths = options.lengths or ([64, 128] if smoke else list(LENGTHS))
    options.lrs = options.lrs or ([1e-3, 4e-3] if smoke else list(LRS))
    batch_tokens = options.batch_tokens or (256 if smoke else Protocol.batch_tokens)
    steps = options.steps or (4 if smoke and options.max_tokens is None else None)
    max_tokens = options.max_tokens or Protocol.max_tokens
    protocol = Protocol(
        data=options.fasta.name,
        rows=RowSettings(max(options.lengths), options.mode, not options.no_eos, options.unknown),
        strands=options.strands,
        core=options.core,
        max_tokens=steps * batch_tokens if steps else max_tokens,
        batch_tokens=batch_tokens,
        eval_tokens=options.eval_tokens or (1024 if smoke else 0),
        small=smoke,
    )
    for length in options.lengths:
        protocol.batch_size(length)
    return options, protocol
