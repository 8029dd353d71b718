"""Select the rows that a figure shows: of the newest commit that compares ours with peers.

Letters: B batch, T time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from flash_frac.bench.table import WAYS, model_of
from flash_frac.bench.timing import OURS

# If a model was run in several ways in one mode, the first of these is drawn.
PREFERRED = ("eager", "transformers' loop", "Generator", "graph", "", "generate")


def newest(rows: Iterable[dict], script: str, passed: str) -> list[dict]:
    """The rows of one pass to draw, for each mode, batch and length those of one commit.

    That is the newest commit at which both ours and peers were measured. Without one, ours are of
    their newest commit, and peers of their own. Rows are appended, so the newest are the last.
    """
    scenarios: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        if row["pass"] == passed and f"/{script}" in row["command"]:
            scenarios.setdefault((mode_of(row), row["B"], row["T"]), []).append(row)
    kept = [row for given in scenarios.values() for row in _of_one_commit(given)]
    return sorted(kept, key=lambda row: not is_ours(row))


def _of_one_commit(rows: list[dict]) -> list[dict]:
    """Of the rows of one scenario, those to compare, in their newest version."""
    # A commit moves to the end when it occurs again.
    sides: dict[str, set[bool]] = {}
    for row in rows:
        sides[row["commit"]] = sides.pop(row["commit"], set()) | {is_ours(row)}
    commits = list(sides)
    both = [commit for commit in commits if len(sides[commit]) == 2]
    if both:
        rows = [row for row in rows if row["commit"] == both[-1]]
    else:
        last = [commit for commit in commits if True in sides[commit]][-1:]
        rows = [row for row in rows if not is_ours(row) or row["commit"] in last]
    return list({family(row["implementation"]): row for row in rows}.values())


def is_ours(row: dict) -> bool:
    return row["implementation"].startswith(OURS)


def model_rows(rows: Iterable[dict], passed: str) -> list[dict]:
    """Rows of whole models in one pass: ours first, one for each model, mode, batch and length.

    Our models with other weights, another number of modes or recomputation appear only in tables.
    """
    ours = re.compile(rf"{OURS} \d(?!.*\(recomputing )")
    rows = [row for row in rows if ours.match(row["implementation"]) or not is_ours(row)]
    chosen: dict[tuple[str, ...], dict] = {}
    for row in sorted(newest(rows, "model.py", passed), key=preference, reverse=True):
        model = family(model_of(row["implementation"]))
        chosen[model, mode_of(row), row["B"], row["T"]] = row
    # transformers' Mamba2 is the same model without its dedicated kernels.
    if any(model.startswith("fla Mamba2") for model, *_ in chosen):
        chosen = {key: row for key, row in chosen.items() if key[0] != "transformers Mamba2"}
    return sorted(chosen.values(), key=lambda row: not is_ours(row))


def mode_of(row: dict) -> str:
    """Mode of a row; in older rows without that column, only `Generator` used graphs."""
    recorded = "(Generator)" in row["implementation"] and (
        row["pass"] != "prefill" or int(row["T"]) <= 4096
    )
    return row.get("mode") or ("graph" if recorded else "eager")


def preference(row: dict) -> int:
    way = row["implementation"].removesuffix(")").rpartition("(")[2].split(", ")[-1]
    return PREFERRED.index(way if way in WAYS else "")


def family(implementation: str) -> str:
    """A name without versions and sizes, such as 0.6.0 or 1.37B."""
    return re.sub(r" v?\d+\.\d\S*?(?=[ )]|$)", "", implementation)
