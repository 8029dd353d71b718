"""A report on disk: its numbers as JSON, figures as SVG, and one page to look around in.

report.json     every number; the keys are the attributes of `MemoryReport`
index.html      the page, with numbers, style and script inside: it needs no other file
alpha.svg       median alpha by layer and head
horizon.svg     reach of each layer
layer_00.svg    responses and modes of a layer, one file each; numbered as in the model
"""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flash_frac.drawing import FAINT, GREY, OTHER, OURS, PALE, THIRD, figure_at
from flash_frac.extras import require
from flash_frac.inspect.fits import Fit
from flash_frac.inspect.report import MemoryReport, inspect_model
from flash_frac.inspect.statistics import check_model
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

logger = logging.getLogger(__name__)
_PARTS = ("page.html", "page.css", "charts.js", "page.js")
# From nothing to much, as on the page.
SHADES = ("#f4f7f7", "#6fc0c5", "#00707c", "#00323a")
# What lies further below the largest response is not drawn.
DEEPEST = 1e-9


def write_report(report: MemoryReport, folder: str | Path) -> Path:
    """Write page, figures and numbers into a folder, which is made; returns the page's path.

    Without matplotlib there are no figures, and a warning in the log says so.

    Example: `write_report(inspect_model(model, ids), "memory")`
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = report.as_dict()
    # NaN is no JSON: better an error now than in a browser.
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    page = folder / "index.html"
    page.write_text(render_page(numbers), encoding="utf-8")
    try:
        require("matplotlib", "plot", "a figure")
    except ImportError as error:
        logger.warning("%s has no figures beside it: %s", page, error)
        return page
    draw_alpha(folder / "alpha.svg", report)
    draw_horizon(folder / "horizon.svg", report)
    for n, layer in enumerate(report.layers):
        draw_layer(folder / f"layer_{layer.number:02}.svg", report, n)
    return page


def render_page(numbers: dict[str, Any]) -> str:
    """The page for the numbers of `MemoryReport.as_dict()`, in one piece.

    Example: `render_page(json.loads(Path("memory/report.json").read_text()))`
    """
    folder = files("flash_frac.inspect") / "page"
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in _PARTS}
    data = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    # A "</script>" in the name of a text must not end the element that holds it.
    parts["report.json"] = data.replace("<", "\\u003c")
    parts["title"] = html.escape(numbers["name"])
    page = parts["page.html"]
    # Cut once, so that a marker inside of what is put in stays as it is.
    pieces = page.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def inspect_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    text: str,
    text_name: str = "text",
    num_tokens: int = 4096,
    tokenizer: Any = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> MemoryReport:
    """Load a model and its tokenizer, inspect it along a text, and write the report.

    Args:
        checkpoint: a folder or hub id with model and tokenizer, for the Auto classes.
        out: folder for the report, see `write_report`.
        text: what to read, from its beginning; the lags end where it does.
        text_name: what the report calls it.
        num_tokens: so much of the text is read at most.
        tokenizer: instead of the checkpoint's own.
        device, dtype: of the model.
        settings: `factor`, `num_lags` and `max_sources` of `inspect_model`.

    Example: `inspect_checkpoint("my-frac", "memory", text=Path("book.txt").read_text())`
    """
    if num_tokens < 16:
        raise ValueError(f"num_tokens must be at least 16, got {num_tokens}")
    found = find_checkpoint(checkpoint)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    # A token is a letter at least, mostly; cutting first saves the time a whole book would take.
    ids = tokenizer(text[: 32 * num_tokens], return_tensors="pt").input_ids[:, :num_tokens]
    if ids.shape[1] < 16:
        raise ValueError(
            f"text must have at least 16 tokens, got {ids.shape[1]}; use one of some thousand"
        )
    model = load_model(found, dtype=dtype).to(device)
    check_model(model)
    if int(ids.max()) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has an id {int(ids.max())}, but the model's vocab_size is "
            f"{model.config.vocab_size}; use the tokenizer that the model was trained with"
        )
    report = inspect_model(model, ids.to(device), text=text_name, **settings)
    write_report(report, out)
    return report


def draw_layer(path: str | Path, report: MemoryReport, layer: int) -> None:
    """Responses of all heads of a layer with the laws of their mean, and the use of modes.

    The layer is report.layers[layer].

    Example: `draw_layer("layer_00.svg", report, 0)`
    """
    seen = report.layers[layer]
    with figure_at(path, (11.0, 3.6), [1.5, 1, 1]) as (figure, axes):
        _responses(axes[0], report, layer)
        for panel, name in zip(axes[1:], ("read", "write"), strict=True):
            shares = np.array([getattr(head, f"{name}_share") for head in seen.heads])
            modes = f"mode, tau {seen.tau[0]:,.3g} to {seen.tau[-1]:,.0f} tokens"
            _heat(figure, panel, shares, modes, "head", log=True)
            panel.set_title(f"Share of {name} by mode")


def draw_alpha(path: str | Path, report: MemoryReport) -> None:
    """Median alpha of every head, by layer and head.

    Example: `draw_alpha("alpha.svg", report)`
    """
    middle = len(report.quantiles) // 2
    medians = [
        [head.distributions["alpha"].quantiles[middle] for head in layer.heads]
        for layer in report.layers
    ]
    with figure_at(path, (5.6, 1.8 + 0.12 * len(medians)), [1]) as (figure, axes):
        numbers = [layer.number for layer in report.layers]
        _heat(figure, axes[0], np.array(medians), "head", "layer", rows=numbers)
        axes[0].set_title("Median alpha")


def draw_horizon(path: str | Path, report: MemoryReport) -> None:
    """Lags that hold half and 90% of the response, and the mean lag, by layer; heads as dots.

    Example: `draw_horizon("horizon.svg", report)`
    """
    numbers = [layer.number for layer in report.layers]
    with figure_at(path, (5.6, 3.6), [1]) as (_, axes):
        for layer in report.layers:
            reach = [max(head.horizon.half, 0.1) for head in layer.heads]
            axes[0].plot([layer.number] * len(reach), reach, ".", color=PALE, ms=4, zorder=1)
        lines = (("half", OURS), ("mean", THIRD), ("ninety", OTHER))
        for name, colour in lines:
            reach = [max(getattr(layer.horizon, name), 0.1) for layer in report.layers]
            label = {"half": "half of the weight (dots: heads)", "ninety": "90% of it"}
            axes[0].plot(
                numbers, reach, "o-", color=colour, ms=4, label=label.get(name, "mean lag")
            )
        axes[0].set_yscale("log")
        axes[0].set(xlabel="layer", ylabel="tokens", title="Reach of the memory")
        axes[0].xaxis.get_major_locator().set_params(integer=True)
        axes[0].axhline(report.lags[-1], color=FAINT, lw=1, zorder=0)
        axes[0].legend(frameon=False)


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
    axes.set(xlabel="lag, tokens", ylabel="response", title=f"Memory of layer {seen.number}")
    axes.legend(frameon=False, loc="lower left")


def _law(fit: Fit) -> str:
    if fit.kind == "power":
        return f"power law, exponent {fit.exponent:.2f}"
    if fit.timescale is None:
        return "exponential, which does not fall"
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
) -> None:
    """Values as shades; rows have their own numbers, or count from 0."""
    colours = require("matplotlib.colors", "plot", "the figures of a report")
    shades = colours.LinearSegmentedColormap.from_list("shades", SHADES)
    norm = None
    if log and values.max() > 0:
        # Below that, colours cannot be told apart.
        low = max(values.min(), 1e-5 * values.max())
        values, norm = np.maximum(values, low), colours.LogNorm(low, max(values.max(), 1.01 * low))
    mesh = axes.pcolormesh(values, cmap=shades, norm=norm, edgecolors="white", linewidth=0.3)
    names = (range(values.shape[1]), rows or range(values.shape[0]))
    for axis, numbers in zip((axes.xaxis, axes.yaxis), names, strict=True):
        ticks = range(0, len(numbers), max(1, len(numbers) // 8))
        axis.set_ticks([tick + 0.5 for tick in ticks], [str(numbers[tick]) for tick in ticks])
    axes.invert_yaxis()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(mesh, ax=axes, fraction=0.05).outline.set_visible(False)
