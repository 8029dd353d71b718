"""`frac bench`: tokens/s on this machine, beside what the paper prints for its size.

The paper measures prefill at batch 1 and decoding over 64 tokens on one card that it does not name,
and training on what its numbers imply to be 16 of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flash_frac.bench.models import PARTS, measure_models
from flash_frac.bench.parts import Sizes
from flash_frac.bench.peers import MODEL_PEERS
from flash_frac.bench.rows import print_rows
from flash_frac.bench.timing import OURS
from flash_frac.drawing import short
from flash_frac.files import write_json
from flash_frac.markdown import plain
from flash_frac.models import FracConfig
from flash_frac.models.loading import find_checkpoint
from flash_frac.provenance import provenance
from flash_frac.recipes import find_config, installed_sizes

COLUMNS = ("prefill@1K", "prefill@4K", "prefill@16K", "decode", "train@4K")
# What the speed of a model depends on.
_SIZE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "frac_num_modes")
# The paper's table of throughput, tokens/s, for models of 1.3B parameters.
PAPER = {
    "Transformer": (55839, 79173, 56297, 62, 218184),
    "Mamba2": (15362, 41060, 67571, 34, 278620),
    "Gated DeltaNet": (10455, 35481, 58384, 20, 215357),
    "Mamba3 SISO": (19517, 44998, 74314, 27, 238924),
    "Mamba3 MIMO": (13692, 30710, 46707, 25, 200994),
    "FRAC": (16213, 49946, 77490, 33, 241598),
}


def bench(
    config: FracConfig,
    *,
    parts: Sequence[str] = tuple(PARTS),
    peers: Sequence[str] = tuple(MODEL_PEERS),
    sizes: Sizes | None = None,
    out: str | Path | None = None,
) -> tuple[list[str], list[str]]:
    """Measure a model with random weights and the peers that can be imported.

    Args:
        config: of the model; peers take its size.
        parts: of "prefill", "decode" and "train".
        peers: names in `flash_frac.bench.peers.MODEL_PEERS`.
        sizes: lengths and batches; the paper's, decoding also a batch of 64, if None.
        out: a JSON file for every row, with versions and machine; none if None.

    Returns:
        The lines of a Markdown table, and why models or ways were left out.

    Example:
        >>> config = FracConfig.from_pretrained(find_config("frac-130m"))
        >>> lines, left_out = bench(config, peers=["qwen3"])
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise ValueError(f"parts must be of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if unknown := sorted(set(peers) - set(MODEL_PEERS)):
        raise ValueError(f"peers must be of {', '.join(MODEL_PEERS)}, got {', '.join(unknown)}")
    failures: list[str] = []
    rows = []
    for found in measure_models(
        config, parts=parts, peers=peers, sizes=sizes or Sizes(), failures=failures
    ):
        print_rows(found)
        rows += found
    if out is not None:
        write_json(Path(out), {"rows": rows, "left_out": failures, "made_with": provenance()})
    return paper_table(rows, paper=_is_papers(config)), failures


def choose_config(config: str | None) -> FracConfig:
    """The configuration of an installed size, a folder or a hub id; if None that of frac-1.3b.

    Without a GPU it must be given, because the default is too large for a CPU.
    """
    if config is None and not torch.cuda.is_available():
        raise ValueError(
            "config must be given where there is no GPU, because the default has 1.3B parameters: "
            f"name a smaller size ({', '.join(installed_sizes())}), or a folder with a config.json"
        )
    name = config or "frac-1.3b"
    if name.count("/") == 1 and not Path(name).exists():
        found = find_checkpoint(name, argument="config")
        return FracConfig.from_pretrained(found.name, **found.options)
    return FracConfig.from_pretrained(find_config(name, argument="config"))


def choose_sizes(lengths: str) -> Sizes:
    """What is measured, with prefill at lengths such as "1024,4096"."""
    try:
        numbers = tuple(int(length) for length in lengths.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ValueError(f"lengths must be positive numbers such as 1024,4096, got {lengths!r}")
    return replace(Sizes(), prefill=numbers)


def column_of(row: Mapping[str, object]) -> str:
    """Where a row stands in the table: what was run, and at which length or batch."""
    if row["pass"] == "decode":
        return "decode" if row["B"] == 1 else f"decode x {row['B']}"
    return f"{row['pass']}@{short(int(str(row['T'])))}"


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _is_papers(config: FracConfig) -> bool:
    """Whether a model has the size of the paper's and runs on a GPU, as those did."""
    size = FracConfig.from_pretrained(find_config("frac-1.3b"))
    same = all(getattr(config, name) == getattr(size, name) for name in _SIZE)
    return same and torch.cuda.is_available()


def paper_table(rows: Sequence[Mapping[str, object]], *, paper: bool = True) -> list[str]:
    """Lines of a Markdown table in tokens/s, ours first.

    Ours by the calls of transformers are one line, those of `Generator` and decoding by
    transformers' loop others. With `paper` its
    models come last, and its columns first.
    """
    measured: dict[str, dict[str, float]] = {}
    for row in rows:
        name = str(row["implementation"]).removesuffix(" (eager)").removesuffix(" (generate)")
        along = measured.setdefault(name, {})
        along[column_of(row)] = float(str(row["tokens_per_s"]))
    found = {name for along in measured.values() for name in along}
    columns = [name for name in COLUMNS if paper or name in found]
    columns += sorted(found - set(COLUMNS))
    lines = [f"| tokens/s | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in sorted(measured, key=lambda name: not name.startswith(OURS)):
        cells = (cell(measured[name].get(column)) for column in columns)
        lines.append(f"| {plain(name)} | {' | '.join(cells)} |")
    for name, values in PAPER.items() if paper else ():
        known: dict[str, float] = dict(zip(COLUMNS, values, strict=True))
        cells = (cell(known.get(column)) for column in columns)
        lines.append(f"| *{name}, paper* | {' | '.join(cells)} |")
    return lines
