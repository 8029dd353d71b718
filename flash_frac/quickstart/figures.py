"""The three figures of the quickstart, drawn from numbers; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flash_frac.drawing import FAINT, OTHER, OURS, PALE, THIRD, figure_at

SIZE = (5.6, 3.6)
# One colour per layer, from first to last.
LAYERS = (PALE, OURS, THIRD, OTHER, "#e09f3e")
UNTRAINED = "#c3c8ce"
# The lowest response drawn, relative to that at lag 0.
LEAST = 1e-8


def draw_loss(
    path: str | Path,
    training: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    trigram: float,
) -> None:
    """Draw bits per byte against steps, from pairs (step, bits per byte); the trigram is a line.

    Example: `draw_loss("loss.svg", [(10, 5.1), (20, 4.2)], [(20, 4.3)], 3.05)`
    """
    with figure_at(path, SIZE) as (_, (axes,)):
        axes.plot(*zip(*training, strict=True), color=PALE, label="training")
        axes.plot(*zip(*validation, strict=True), "o-", color=OURS, ms=4, label="validation")
        _reference(axes, trigram, "trigram")
        axes.set(xlabel="step", ylabel="bits per byte", title="Learning")
        axes.set_xlim(0, 1.02 * max(step for step, _ in [*training, *validation]))
        axes.legend(frameon=False)


def draw_context(path: str | Path, bits: Mapping[int, float], trained: int, trigram: float) -> None:
    """Draw bits per byte on the validation text against the context length.

    Args:
        path: the SVG file to write.
        bits: bits per byte at each length, in bytes.
        trained: the training length, which is marked.
        trigram: bits per byte of the trigram, drawn as a line.

    Example: `draw_context("context.svg", {256: 2.1, 1024: 2.0}, 256, 3.05)`
    """
    lengths = sorted(bits)
    with figure_at(path, SIZE) as (_, (axes,)):
        axes.plot(lengths, [bits[n] for n in lengths], "o-", color=OURS, ms=5)
        for n in lengths:
            axes.annotate(
                f"{bits[n]:.3f}", (n, bits[n]), (0, -14), textcoords="offset points", ha="center"
            )
        axes.axvline(trained, color=FAINT, lw=1, zorder=0)
        _reference(axes, trigram, f"trigram {trigram:.3f}")
        axes.set_xscale("log", base=2)
        names = [f"{n:,}\n(training)" if n == trained else f"{n:,}" for n in lengths]
        axes.set_xticks(lengths, names)
        axes.set_xlim(lengths[0] / 1.6, lengths[-1] * 1.6)
        low, high = min([*bits.values(), trigram]), max([*bits.values(), trigram])
        axes.set_ylim(low - 0.2 * (high - low), high + 0.12 * (high - low))
        axes.set(xlabel="context length, bytes", ylabel="bits per byte", title="Longer contexts")


def draw_memory(
    path: str | Path,
    lags: np.ndarray,
    responses: Mapping[int, np.ndarray],
    untrained: Mapping[int, np.ndarray],
) -> None:
    """Draw the measured responses of all heads on log-log axes, relative to lag 0.

    Args:
        path: the SVG file to write.
        lags: (n,) tokens, ascending and positive.
        responses: (H, n) by layer number, relative to lag 0.
        untrained: the same for the model before training, drawn in grey behind them.

    Example: `draw_memory("memory.svg", lags, {0: trained}, {0: untrained})`
    """
    with figure_at(path, SIZE) as (_, (axes,)):
        before = [line for heads in untrained.values() for line in heads]
        lines = axes.plot(lags, np.transpose(before), color=UNTRAINED, lw=1, zorder=1)
        for place, (number, heads) in enumerate(responses.items()):
            colour = LAYERS[place % len(LAYERS)]
            trained = axes.plot(lags, np.transpose(heads), color=colour, lw=1, alpha=0.8)
            trained[0].set_label(f"layer {number}, one line per head")
        lines[0].set_label("all layers before training")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(lags[0], lags[-1])
        axes.set_ylim(LEAST, 1.5)
        axes.set(
            xlabel="tokens ago", ylabel="response, relative to the present", title="Learned memory"
        )
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[1:] + handles[:1], labels[1:] + labels[:1], frameon=False)


def _reference(axes: Any, value: float, name: str) -> None:
    axes.axhline(value, color=OTHER, ls="--", lw=1)
    axes.annotate(
        name,
        (1, value),
        (-2, 3),
        xycoords=axes.get_yaxis_transform(),
        textcoords="offset points",
        color=OTHER,
        ha="right",
    )
