"""Draw results.csv as figure.svg: python -m experiments.long_documents.plot [--out FOLDER]

Perplexity against context, one panel per number of training steps (or only --steps), and recall
against distance for the largest number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.long_documents.run import HERE
from experiments.long_documents.summary import Runs, asked_runs
from experiments.style import COLOURS, NAMES, curve, from_zero, mark_guessing, mark_lengths
from flash_frac.drawing import figure_at

# Upper limit of the plot, over the highest perplexity at the training length: attention's grows
# without bound beyond it.
HIGHEST = 1.5
# Legends are above their panels.
_ABOVE = {
    **{"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False, "alignment": "left"},
    **{"fontsize": 8, "title_fontsize": 8},
}


def draw_perplexity(axes: Any, found: Mapping[str, Runs], steps: int) -> None:
    """Perplexity against context, on an axis from 0 that shows the order of the models."""
    trained = []
    for name, runs in found.items():
        values = runs.values("perplexity", "perplexity")
        trained += values.get(runs.train_length, values[min(values)])
        curve(axes, values, colour=COLOURS[name], label=f"{NAMES[name]} ({runs.shown_seeds})")
    axes.set(xlabel="context, tokens", ylabel="perplexity")
    from_zero(axes, HIGHEST * max(trained))
    mark_lengths(axes, next(iter(found.values())).train_length)
    axes.legend(title=f"{steps:,} steps: perplexity (seeds)", **_ABOVE)


def draw_recall(axes: Any, found: Mapping[str, Runs], steps: int) -> None:
    for name, runs in found.items():
        recalled = runs.values("recall", "accuracy")
        percent = {distance: [100 * v for v in recalled[distance]] for distance in recalled}
        curve(axes, percent, colour=COLOURS[name], label=NAMES[name])
    mark_guessing(axes, 10)
    axes.set(
        xlabel="distance of the fact, tokens", ylabel="digits correct, percent", ylim=(-3, 103)
    )
    mark_lengths(axes, next(iter(found.values())).train_length)
    axes.legend(title=f"{steps:,} steps: recall", **_ABOVE)


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    by_steps = {
        steps: {name: runs[name] for name in NAMES if name in runs}
        for steps, runs in by_steps.items()
    }
    panels = [(draw_perplexity, steps) for steps in by_steps]
    longest = max(by_steps)
    if any(runs.values("recall", "accuracy") for runs in by_steps[longest].values()):
        panels.append((draw_recall, longest))
    size = (4.2 * len(panels), 4)
    with figure_at(folder / "figure.svg", size, [1] * len(panels)) as (_, axes):
        for axis, (draw, steps) in zip(axes, panels, strict=True):
            draw(axis, by_steps[steps], steps)


if __name__ == "__main__":
    main()
