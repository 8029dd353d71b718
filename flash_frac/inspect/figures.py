"""Figures of a report, as SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flash_frac.drawing import (
    FAINT,
    FOURTH,
    GREY,
    OTHER,
    OURS,
    PALE,
    THIRD,
    Target,
    figure_at,
    short,
)
from flash_frac.extras import require
from flash_frac.inspect.fits import Fit
from flash_frac.inspect.records import LayerReport, MemoryReport

# Colour scale from low to high, as on the page.
SHADES = ("#f4f7f7", "#6fc0c5", "#00707c", "#00323a")
# Responses below this fraction of the largest one are not drawn.
DEEPEST = 1e-9
# Colour and mark of each type of layer, by its name in figures.
TYPES = {
    "frac": ("Frac", OURS, "o"),
    "delta": ("delta", THIRD, "s"),
    "attention": ("attention", OTHER, "D"),
    "sliding_attention": ("sliding attention", FOURTH, "^"),
}
QUANTITIES = {"half_life": "half-life, tokens", "beta": "beta"}


def draw_layer(path: Target, report: MemoryReport, layer: int) -> None:
    """Responses of all heads of a layer with the laws fitted to their mean, and their mechanism.

    The mechanism is the use of modes in a Frac layer, gates in a delta layer, and weight by
    distance in attention. The layer is report.layers[layer].

    Example: `draw_layer("layer_00.svg", report, 0)`
    """
    seen = report.layers[layer]
    with figure_at(path, (11.0, 3.6), [1.5, 1, 1]) as (figure, axes):
        _responses(axes[0], report, layer)
        if seen.type == "frac":
            _modes(figure, axes[1:], seen)
        elif seen.type == "delta":
            _gates(axes[1:], seen)
        else:
            _distances(figure, axes[1:], seen)


def draw_responses(path: Target, report: MemoryReport) -> None:
    """The mean response of every layer, each as a share of its sum over all lags.

    Example: `draw_responses("responses.svg", report)`
    """
    lags = np.array(report.lags, float)
    # Lags between measured ones count with the next lower one.
    widths = np.diff([*lags, lags[-1] + 1])
    with figure_at(path, (7.2, 4.0), [1]) as (_, axes):
        named = set()
        for layer in report.layers:
            name, colour, _ = TYPES[layer.type]
            size = np.abs(layer.response)
            shares = size[1:] / max((size * widths).sum(), 1e-300)
            axes[0].plot(
                lags[1:],
                np.where(shares > DEEPEST, shares, np.nan),
                color=colour,
                lw=1.3,
                alpha=0.85,
                label=None if name in named else name,
            )
            named.add(name)
            _name_layer(axes[0], lags[1:], shares, layer.number, colour)
        axes[0].set_xscale("log")
        axes[0].set_yscale("log")
        axes[0].set(
            xlabel="lag, tokens",
            ylabel="share of the response per token",
            title="What layers hold of earlier tokens",
        )
        axes[0].legend(frameon=False, loc="lower left")


def _name_layer(axes: Any, lags: np.ndarray, shares: np.ndarray, number: int, colour: str) -> None:
    """Write the number of a layer at the end of its line."""
    shown = np.flatnonzero(shares > DEEPEST)
    if len(shown):
        at = (lags[shown[-1]], shares[shown[-1]])
        axes.annotate(
            str(number), at, xytext=(3, 0), textcoords="offset points", color=colour, va="center"
        )


def draw_alpha(path: Target, report: MemoryReport) -> None:
    """Median alpha of every head of Frac layers, by layer and head.

    Example: `draw_alpha("alpha.svg", report)`
    """
    layers = [layer for layer in report.layers if layer.type == "frac"]
    middle = len(report.quantiles) // 2
    medians = [
        [head.distributions["alpha"].quantiles[middle] for head in layer.heads] for layer in layers
    ]
    with figure_at(path, (5.6, 1.8 + 0.12 * len(medians)), [1]) as (figure, axes):
        numbers = [layer.number for layer in layers]
        _heat(figure, axes[0], np.array(medians), "head", "layer", rows=numbers)
        axes[0].set_title("Median alpha")


def draw_horizon(path: Target, report: MemoryReport) -> None:
    """Lags that hold half and 90% of the response, and the mean lag, by layer; heads as dots.

    Example: `draw_horizon("horizon.svg", report)`
    """
    numbers = [layer.number for layer in report.layers]
    present = [kind for kind in TYPES if any(x.type == kind for x in report.layers)]
    mixed = len(present) > 1
    with figure_at(path, (7.6 if mixed else 5.6, 3.6), [1]) as (_, axes):
        for layer in report.layers:
            reach = [max(head.horizon.half, 0.1) for head in layer.heads]
            axes[0].plot([layer.number] * len(reach), reach, ".", color=PALE, ms=4, zorder=1)
        lines = (("half", OURS), ("mean", THIRD), ("ninety", OTHER))
        for name, colour in lines:
            reach = [max(getattr(layer.horizon, name), 0.1) for layer in report.layers]
            label = {"half": "half of the weight (dots: heads)", "ninety": "90% of it"}
            axes[0].plot(numbers, reach, "-", color=colour, ms=4, label=label.get(name, "mean lag"))
            for layer, at in zip(report.layers, reach, strict=True):
                mark = TYPES[layer.type][2]
                axes[0].plot(layer.number, at, mark, color=colour, ms=4)
        axes[0].set_yscale("log")
        axes[0].set(xlabel="layer", ylabel="tokens", title="Reach of the memory")
        axes[0].xaxis.get_major_locator().set_params(integer=True)
        axes[0].axhline(report.lags[-1], color=FAINT, lw=1, zorder=0)
        for kind in present if mixed else ():
            name, _, mark = TYPES[kind]
            axes[0].plot([], [], mark, color=GREY, ms=4, label=name)
        # With several types of layers, no corner is free.
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if mixed else {}
        axes[0].legend(frameon=False, **beside)


def draw_before_after(path: Target, before: MemoryReport, after: MemoryReport) -> None:
    """Responses of layers and medians of Δ, α and λ by layer, for two models in the same panels.

    Example: `draw_before_after("before_after.svg", untrained, trained)`
    """
    frac = [n for n, layer in enumerate(after.layers) if layer.type == "frac"]
    controls = {"delta": "Δ", "alpha": "α", "lambda": "λ"} if frac else {}
    middle = len(after.quantiles) // 2
    with figure_at(path, (4.4 + 2.5 * len(controls), 3.6), [1.7] + [1] * len(controls)) as drawn:
        axes = drawn[1]
        lags = np.array(after.lags[1:], float)
        for report, colour, style, label in (
            (before, GREY, "--", f"before: {before.name}"),
            (after, OURS, "-", f"after: {after.name}"),
        ):
            for n, layer in enumerate(report.layers):
                response = np.array(layer.response[1:])
                shown = np.where(response > DEEPEST * response.max(), response, np.nan)
                axes[0].plot(lags, shown, style, color=colour, lw=1.3, label=None if n else label)
                if report is after:
                    _name_layer(axes[0], lags, response, layer.number, colour)
            for panel, name in zip(axes[1:], controls, strict=True):
                medians = [report.layers[n].distributions[name].quantiles[middle] for n in frac]
                numbers = [report.layers[n].number for n in frac]
                panel.plot(numbers, medians, "o" + style, color=colour, ms=4)
        axes[0].set_xscale("log")
        axes[0].set_yscale("log")
        axes[0].set(xlabel="lag, tokens", ylabel="response", title="Memory of layers")
        axes[0].legend(frameon=False, loc="lower left")
        for panel, symbol in zip(axes[1:], controls.values(), strict=True):
            panel.set(xlabel="layer", title=f"Median {symbol}")
            panel.xaxis.get_major_locator().set_params(integer=True)


def _modes(figure: Any, panels: Sequence[Any], seen: LayerReport) -> None:
    for panel, name in zip(panels, ("read", "write"), strict=True):
        shares = np.array([getattr(head, f"{name}_share") for head in seen.heads])
        tau = [value for head in seen.heads for value in head.tau or ()]
        modes = f"mode, tau {min(tau):,.3g} to {max(tau):,.0f} tokens"
        _heat(figure, panel, shares, modes, "head", log=True)
        panel.set_title(f"Share of {name} by mode")


def _gates(panels: Sequence[Any], seen: LayerReport) -> None:
    """Quantiles of each head's gates: 5 to 95% thin, 25 to 75% thick, and the median."""
    for panel, (name, label) in zip(panels, QUANTITIES.items(), strict=True):
        for h, head in enumerate(seen.heads):
            low, first, median, third, high = head.distributions[name].quantiles
            panel.plot([low, high], [h, h], color=PALE, lw=1.2)
            panel.plot([first, third], [h, h], color=THIRD, lw=4, solid_capstyle="butt")
            panel.plot(median, h, "|", color="white", ms=7)
        panel.set_xscale("log" if name == "half_life" else "linear")
        panel.set_ylim(len(seen.heads) - 0.5, -0.5)
        panel.yaxis.get_major_locator().set_params(integer=True)
        panel.set(xlabel=label, ylabel="head", title=f"{label.split(',')[0].capitalize()} by head")


def _distances(figure: Any, panels: Sequence[Any], seen: LayerReport) -> None:
    """Shares of the weight by distance, for the layer and for each head."""
    assert seen.distances is not None
    edges, distances = seen.edges["distance"], seen.distances
    names = [short(int(edge)) for edge in edges[:-1]]
    panels[0].bar(range(len(names)), distances.shares, color=TYPES[seen.type][1])
    ticks = range(0, len(names), -(-len(names) // 6))
    panels[0].set_xticks(list(ticks), [names[n] for n in ticks])
    panels[0].set(
        xlabel="distance from, tokens",
        ylabel="share of the weight",
        title=f"Median {distances.median:,.0f}, mean {distances.mean:,.0f} tokens",
    )
    shares = np.array([head.distances.shares for head in seen.heads if head.distances is not None])
    _heat(figure, panels[1], shares, "distance from, tokens", "head", columns=names)
    panels[1].set_title("Share of the weight by head")


def _responses(axes: Any, report: MemoryReport, layer: int) -> None:
    seen, lags = report.layers[layer], np.array(report.lags[1:], float)
    heads = np.array([head.response[1:] for head in seen.heads])
    heads = np.where(heads > DEEPEST * heads.max(), heads, np.nan)
    lines = axes.plot(lags, heads.T, color=PALE, lw=1, alpha=0.8)
    lines[0].set_label("heads")
    axes.plot(
        lags, np.where(np.array(seen.response[1:]) > 0, seen.response[1:], np.nan), color=OURS
    )
    axes.lines[-1].set_label("their mean")
    for fit, style in ((seen.power, "--"), (seen.exponential, ":")):
        if fit is not None:
            axes.plot(
                lags, fit(lags), style, color=OTHER if style == "--" else GREY, label=_law(fit)
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(lags[0], lags[-1])
    if np.isfinite(heads).any():
        axes.set_ylim(np.nanmin(heads) / 2, 2 * np.nanmax(heads))
    name = "" if seen.type == "frac" else f", {TYPES[seen.type][0]}"
    axes.set(xlabel="lag, tokens", ylabel="response", title=f"Memory of layer {seen.number}{name}")
    axes.legend(frameon=False, loc="lower left")


def _law(fit: Fit) -> str:
    if fit.kind == "power":
        return f"power law, exponent {fit.exponent:.2f}"
    if fit.timescale is None:
        return "exponential, not decaying"
    return f"exponential, {fit.timescale:.3g} tokens"


def _heat(
    figure: Any,
    axes: Any,
    values: np.ndarray,
    xlabel: str,
    ylabel: str,
    *,
    log: bool = False,
    rows: Sequence[int] | None = None,
    columns: Sequence[str] | None = None,
) -> None:
    """Draw a heat map; rows and columns have the given names, or are numbered from 0."""
    colours = require("matplotlib.colors", "plot", "the figures of a report")
    shades = colours.LinearSegmentedColormap.from_list("shades", SHADES)
    norm = None
    if log and values.max() > 0:
        # Below that, colours are indistinguishable.
        low = max(values.min(), 1e-5 * values.max())
        values, norm = np.maximum(values, low), colours.LogNorm(low, max(values.max(), 1.01 * low))
    mesh = axes.pcolormesh(values, cmap=shades, norm=norm, edgecolors="white", linewidth=0.3)
    names = (columns or range(values.shape[1]), rows or range(values.shape[0]))
    for axis, numbers in zip((axes.xaxis, axes.yaxis), names, strict=True):
        ticks = range(0, len(numbers), -(-len(numbers) // 8))
        axis.set_ticks([tick + 0.5 for tick in ticks], [str(numbers[tick]) for tick in ticks])
    axes.invert_yaxis()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(mesh, ax=axes, fraction=0.05).outline.set_visible(False)
