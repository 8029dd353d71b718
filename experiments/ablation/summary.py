"""results.csv as a table: python -m experiments.ablation.summary [--steps S] [--out FOLDER]

Mean and standard deviation over seeds, the change from the baseline in percent, and the paper's
perplexities (390M parameters, 30B tokens, other documents) with their changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from experiments.ablation.run import HERE
from experiments.ablation.variants import BASELINE, DATASETS, VARIANTS
from experiments.long_documents.summary import Runs, asked_runs, ratios
from experiments.style import cell
from flash_frac.drawing import short


def changes(found: Mapping[str, Runs], length: int) -> dict[str, list[float]]:
    """Change in perplexity from the baseline in percent, for each seed that both have."""
    by_seed = {
        name: runs.by_seed("perplexity", "perplexity").get(length, {})
        for name, runs in found.items()
    }
    base = by_seed.get(BASELINE, {})
    return {
        name: [100 * (ratio - 1) for ratio in ratios(seeds, base)]
        for name, seeds in by_seed.items()
    }


def seed_spread(found: Mapping[str, Runs], length: int) -> float | None:
    """Standard deviation of the baseline over seeds in percent; None if it has one seed."""
    values = found[BASELINE].values("perplexity", "perplexity").get(length, [])
    return 100 * statistics.stdev(values) / statistics.mean(values) if len(values) > 1 else None


def paper_change(name: str) -> float | None:
    """Mean over DATASETS of the paper's change from its baseline, percent; None if unpublished."""
    ours, base = VARIANTS[name].paper, VARIANTS[BASELINE].paper
    if ours is None or base is None:
        return None
    return statistics.mean(100 * (a / b - 1) for a, b in zip(ours, base, strict=True))


def table(found: Mapping[str, Runs]) -> list[str]:
    """Rows of a Markdown table, in the order of VARIANTS."""
    columns = {name: runs.values("perplexity", "perplexity") for name, runs in found.items()}
    lengths = sorted({length for values in columns.values() for length in values})
    heads = [f"{short(n)} | change, %" for n in lengths]
    paper = [f"paper: {name}" for name in DATASETS]
    heads = ["", "seeds", *heads, *paper, "mean change, %"]
    lines = [f"| {' | '.join(heads)} |", "|---" * (len(heads) + len(lengths)) + "|"]
    change = {length: changes(found, length) for length in lengths}
    for name, variant in VARIANTS.items():
        if name not in found:
            continue
        cells = [variant.label, str(found[name].num_seeds)]
        for length in lengths:
            there = columns[name].get(length)
            cells.append(cell(there, 2) if there else "")
            difference = change[length][name]
            cells.append(cell(difference, 1) if difference and name != BASELINE else "")
        cells += [f"{value}" for value in variant.paper or ("", "", "")]
        beside = paper_change(name)
        cells.append("" if beside is None or name == BASELINE else f"{beside:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    _, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    print(*table(by_steps[max(by_steps)]), sep="\n")


if __name__ == "__main__":
    main()
