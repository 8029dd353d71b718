"""Draw results.csv as figure.svg: python -m experiments.mixed_models.plot [--out FOLDER]

Perplexity against context and recall against distance, for the largest number of training steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.long_documents.summary import Runs, asked_runs
from experiments.mixed_models.run import HERE
from experiments.mixed_models.summary import in_order, label
from experiments.style import COLOURS as MODELS
from experiments.style import SEVENTH, SIXTH, curve, figure_legend, mark_guessing, mark_lengths
from flash_frac.drawing import OTHER, OURS, PALE, figure_at

COLOURS = {
    "frac_attention": PALE,
    "frac_attention_nope": OURS,
    "frac_attention_nope_temperature_0.12": OURS,
    "frac_attention_nope_growing_temperature_0.12": SEVENTH,
    "frac_attention_nope_1": SIXTH,
    "delta_attention": OTHER,
    "frac_delta": MODELS["frac_delta"],
    "delta": MODELS["gated_deltanet"],
    "attention": MODELS["qwen3"],
}
"""Colours of the plotted models; the others are only in the tables."""
# Upper limit of the plot over the lowest perplexity: attention's grows without bound beyond 4K.
HIGHEST = 2.0


def is_dashed(name: str) -> bool:
    """Whether a row is of another model measured with a temperature."""
    return "_temperature_" in name


def entry(name: str, runs: Runs) -> str:
    """A model's name in the legend, with its number of seeds."""
    # Long lines would leave no room for the panels.
    return f"{label(name)} ({runs.shown_seeds})".replace("no positions, ", "no positions,\n")


def draw_perplexity(axes: Any, found: Mapping[str, Runs]) -> None:
    values = {name: runs.values("perplexity", "perplexity") for name, runs in found.items()}
    for name, by_length in values.items():
        shown = entry(name, found[name])
        curve(axes, by_length, colour=COLOURS[name], label=shown, dashed=is_dashed(name))
    lowest = min(min(each) for by_length in values.values() for each in by_length.values())
    top = min(axes.get_ylim()[1], HIGHEST * lowest)
    axes.set(xlabel="context, tokens", ylabel="perplexity, axis not from 0")
    axes.set_ylim(0.95 * lowest, top)


def draw_recall(axes: Any, found: Mapping[str, Runs]) -> None:
    for name, runs in found.items():
        recalled = runs.values("recall", "accuracy")
        percent = {distance: [100 * v for v in recalled[distance]] for distance in recalled}
        shown = entry(name, runs)
        curve(axes, percent, colour=COLOURS[name], label=shown, dashed=is_dashed(name))
    mark_guessing(axes, 10)
    axes.set(
        xlabel="distance of the fact, tokens", ylabel="digits correct, percent", ylim=(-3, 103)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    folder, by_steps = asked_runs(__doc__.splitlines()[0], arguments, HERE)
    runs = in_order(by_steps[max(by_steps)])
    found = {name: runs[name] for name in runs if name in COLOURS}
    if not found:
        raise SystemExit(
            f"{folder} has no rows with {max(by_steps)} steps of {', '.join(COLOURS)}, which are "
            "drawn; choose others with --steps"
        )
    with figure_at(folder / "figure.svg", (10, 3.8), [1, 1]) as (figure, panels):
        for axes, draw in zip(panels, (draw_perplexity, draw_recall), strict=True):
            draw(axes, found)
            mark_lengths(axes, next(iter(found.values())).train_length)
        title = "model (seeds), and standard deviation over seeds"
        figure_legend(figure, panels, beside=True, title=title)


if __name__ == "__main__":
    main()
