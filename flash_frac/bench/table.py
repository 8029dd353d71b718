"""`frac bench`: tokens/s on this machine, beside what the paper prints.

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
from flash_frac.models import FracConfig
from flash_frac.provenance import provenance

COLUMNS = ("prefill@1K", "prefill@4K", "prefill@16K", "decode", "train@4K")
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
        >>> config = FracConfig.from_pretrained("recipes/models/frac-1.3b")
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
    return paper_table(rows), failures


def choose_config(folder: str | None) -> FracConfig:
    """The configuration in a folder; that of the paper's 1.3B model, which needs a GPU, if None."""
    if folder is not None:
        return FracConfig.from_pretrained(folder)
    if not torch.cuda.is_available():
        raise ValueError(
            "config must be given where there is no GPU, for the default has 1.3B parameters: "
            "name a folder with the config.json of a smaller model"
        )
    return FracConfig(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=16, frac_num_modes=16,
        frac_alpha_min=0.1, frac_alpha_max=0.9, frac_tau_max=2.0**17, frac_residual_read_init=-1.0,
        fuse_linear_cross_entropy=True,
    )  # fmt: skip


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


def paper_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of a Markdown table in tokens/s, ours first, the paper's models last.

    Ours by the calls of transformers are one line, those of `Generator` another.
    """
    measured: dict[str, dict[str, float]] = {}
    for row in rows:
        name = str(row["implementation"]).removesuffix(" (eager)").removesuffix(" (generate)")
        along = measured.setdefault(name, {})
        along[column_of(row)] = float(str(row["tokens_per_s"]))
    found = {name for along in measured.values() for name in along}
    columns = [*COLUMNS, *sorted(found - set(COLUMNS))]
    lines = [f"| tokens/s | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in sorted(measured, key=lambda name: not name.startswith(OURS)):
        cells = (cell(measured[name].get(column)) for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, values in PAPER.items():
        known: dict[str, float] = dict(zip(COLUMNS, values, strict=True))
        cells = (cell(known.get(column)) for column in columns)
        lines.append(f"| *{name}, paper* | {' | '.join(cells)} |")
    return lines
