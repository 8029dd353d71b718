"""`frac bench`: tokens/s on this machine, next to the paper's numbers for its size.

The paper measures prefill at batch 1 and decoding over 64 tokens on one unnamed GPU, and training
on 16 of them, as its numbers imply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
IN_TABLE = ("prefill", "decode", "train")
# Possible last parts of a row's label.
WAYS = ("eager", "generate", "transformers' loop", "Generator", "graph")
# Fields that the speed of a model depends on.
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
    parts: Sequence[str] = ("prefill", "decode", "train"),
    peers: Sequence[str] = tuple(MODEL_PEERS),
    sizes: Sizes | None = None,
    modes: Sequence[int] = (),
    out: str | Path | None = None,
) -> tuple[list[str], list[str]]:
    """Measure a model with random weights and the peers that can be imported.

    Args:
        config: configuration of the model; peers are built in its size.
        parts: "prefill", "decode", "train" or "growth".
        peers: names in `flash_frac.bench.peers.MODEL_PEERS`.
        sizes: lengths and batches; None for the paper's, and also decoding at batch 64.
        modes: also measure our model with these numbers of modes.
        out: a JSON file for all rows, with versions and machine, or None.

    Returns:
        The lines of a Markdown table, and the reasons for skipped models or ways to run them.

    Example:
        >>> config = FracConfig.from_pretrained(find_config("frac-130m"))
        >>> lines, left_out = bench(config, peers=["qwen3"])
    """
    check_parts_and_peers(parts, peers)
    failures: list[str] = []
    rows = []
    asked = {"parts": parts, "peers": peers, "sizes": sizes or Sizes(), "modes": modes}
    for found in measure_models(config, failures=failures, **asked):
        print_rows(found)
        rows += found
    if out is not None:
        write_json(Path(out), {"rows": rows, "left_out": failures, "made_with": provenance()})
    return paper_table(rows, failures, paper=is_papers(config)), failures


def check_parts_and_peers(parts: Sequence[str], peers: Sequence[str]) -> None:
    """Raise a ValueError for names that `bench` does not know."""
    for argument, names, known in (("parts", parts, PARTS), ("peers", peers, MODEL_PEERS)):
        if unknown := sorted(set(names) - set(known)):
            raise ValueError(
                f"{argument} must be among {', '.join(known)}, got {', '.join(unknown)}"
            )


def choose_config(config: str | None) -> FracConfig:
    """The configuration of an installed size, a folder or a hub id; by default frac-1.3b.

    Without a GPU it must be given, because the default is too large for a CPU.
    """
    if config is None and not torch.cuda.is_available():
        raise ValueError(
            "config must be given if there is no GPU, because the default has 1.3B parameters: "
            f"name a smaller size ({', '.join(installed_sizes())}), or a folder with a config.json"
        )
    name = config or "frac-1.3b"
    if name.count("/") == 1 and not Path(name).exists():
        found = find_checkpoint(name, argument="config")
        return FracConfig.from_pretrained(found.name, **found.options)
    return FracConfig.from_pretrained(find_config(name, argument="config"))


def choose_sizes(lengths: str) -> Sizes:
    """Sizes to measure, with prefill at lengths such as "1024,4096"."""
    return replace(Sizes(), prefill=_numbers("lengths", lengths, "1024,4096"))


def choose_modes(modes: str) -> tuple[int, ...]:
    """Numbers of modes such as "32,64"; none if empty."""
    return _numbers("modes", modes, "32,64") if modes else ()


def _numbers(name: str, text: str, example: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise ValueError(f"{name} must be positive numbers such as {example}, got {text!r}")
    return numbers


def column_of(row: Mapping[str, object]) -> str:
    """The table column of a row: what was run, and at which length or batch."""
    if row["pass"] == "decode":
        return "decode" if row["B"] == 1 else f"decode x {row['B']}"
    return f"{row['pass']}@{short(int(str(row['T'])))}"


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def is_papers(config: FracConfig) -> bool:
    """Whether a model has the size of the paper's and runs on a GPU, as in the paper."""
    size = FracConfig.from_pretrained(find_config("frac-1.3b"))
    same = all(getattr(config, name) == getattr(size, name) for name in _SIZE)
    return same and torch.cuda.is_available()


def paper_table(
    rows: Sequence[Mapping[str, object]], failures: Iterable[str] = (), *, paper: bool = True
) -> list[str]:
    """Lines of a Markdown table in tokens/s, ours first.

    A model has a line in each mode, and more if it was run in several ways. A model that could not
    run has a line that says why. With `paper`, its models come last and its columns first.
    """
    lines: dict[tuple[str, str], dict[str, float]] = {}
    states: dict[str, object] = {}
    for row in rows:
        if row["pass"] not in IN_TABLE:
            continue
        label, mode, column = str(row["implementation"]), str(row["mode"]), column_of(row)
        name = model_of(label)
        if column in lines.get((name, mode), {}):
            name = label
        lines.setdefault((name, mode), {})[column] = float(str(row["tokens_per_s"]))
        if row["pass"] == "decode":
            states[model_of(label)] = row["state_bytes"]
    found = {column for line in lines.values() for column in line}
    columns = [column for column in COLUMNS if paper or column in found]
    columns += sorted(found - set(COLUMNS))
    table = [
        f"| tokens/s | mode | state, MiB | {' | '.join(columns)} |",
        "|---" * (len(columns) + 3) + "|",
    ]
    for name, mode in sorted(lines, key=lambda line: not line[0].startswith(OURS)):
        held = states.get(model_of(name))
        state = "" if held is None else f"{int(str(held)) / 2**20:.1f}"
        cells = (cell(lines[name, mode].get(column)) for column in columns)
        table.append(f"| {plain(name)} | {mode} | {state} | {' | '.join(cells)} |")
    for name, _, why in (failure.partition(": ") for failure in failures):
        reason = f"| {plain(name)} could not be run: {plain(why)} "
        table.append(reason + "| " * (len(columns) + 2) + "|")
    for name, values in PAPER.items() if paper else ():
        known: dict[str, float] = dict(zip(COLUMNS, values, strict=True))
        cells = (cell(known.get(column)) for column in columns)
        table.append(f"| *{name}, paper* |  |  | {' | '.join(cells)} |")
    return table


def model_of(implementation: str) -> str:
    """The model of a row without how it was run, such as "(eager)"."""
    name, _, notes = implementation.removesuffix(")").partition(" (")
    kept = ", ".join(note for note in notes.split(", ") if note and note not in WAYS)
    return f"{name} ({kept})" if kept else name
