"""Draw results.csv as figure.svg: python -m experiments.mixed_models.plot [--out FOLDER]

Perplexity against context and recall against distance, for the largest number of training steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.long_documents.plot import mark
from experiments.long_documents.summary import Runs, asked_runs
from experiments.mixed_models.run import HERE
from experiments.mixed_models.summary import in_order, label
from experiments.style import FIFTH, curve
from flash_frac.drawing import FOURTH, GREY, OTHER, OURS, PALE, THIRD, figure_at

COLOURS = {
    "frac_attention": PALE,
    "frac_attention_nope": OURS,
    "delta_attention": OTHER,
    "frac_delta": FIFTH,
    "delta": THIRD,
    "attention": FOURTH,
    "frac_mlp": GREY,
}
"""The models that are drawn; the others are in the tables."""
# Perplexities that are drawn, over the lowest: attention's grow without bound beyond training.
HIGHEST = 2.0


def draw_perplexity(axes: Any, found: Mapping[str, Runs]) -> None:
    values = {name: runs.values("perplexity", "perplexity") for name, runs in found.items()}
    for name, by_length in values.items():
        shown = f"{label(name)} ({found[name].num_seeds})"
        curve(axes, by_length, colour=COLOURS[name], label=shown)
    lowest = min(min(each) for by_length in values.values() for each in by_length.values())
    top = min(axes.get_ylim()[1], HIGHEST * lowest)
    axes.set(xlabel="context, tokens", ylabel="perplexity", ylim=(0.95 * lowest, top))


def draw_recall(axes: Any, found: Mapping[str, Runs]) -> None:
    for name, runs in found.items():
        recalled = runs.values("recall", "accuracy")
        percent = {distance: [100 * v for v in recalled[distance]] for distance in recalled}
        curve(axes, percent, colour=COLOURS[name], label=label(name))
    axes.axhline(10, color=GREY, lw=0.8, ls=":")
    axes.set(xlabel="distance of the fact, tokens", ylabel="digits right, percent", ylim=(-3, 103))


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    runs = in_order(by_steps[max(by_steps)])
    found = {name: runs[name] for name in runs if name in COLOURS}
    if not found:
        raise SystemExit(f"{folder} has no rows of {', '.join(COLOURS)}, which are drawn")
    with figure_at(folder / "figure.svg", (10, 3.8), [1, 1]) as (figure, panels):
        for axes, draw in zip(panels, (draw_perplexity, draw_recall), strict=True):
            draw(axes, found)
            mark(axes, next(iter(found.values())).train_length)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside right upper", frameon=False, fontsize=8, title="(seeds)"
        )


if __name__ == "__main__":
    main()
