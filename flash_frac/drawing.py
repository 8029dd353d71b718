"""The style of this package's figures, and how they are saved; needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from flash_frac.extras import require
from flash_frac.files import write_bytes

# The destination of a figure.
Target = str | Path | BytesIO
INK, GREY, FAINT = "#222222", "#8a94a0", "#dddddd"
OURS, PALE = "#00707c", "#6fc0c5"
OTHER, THIRD, FOURTH = "#c06c54", "#8d6a9f", "#d9a441"
# Settings for text and files; STYLE adds axes.
TEXT = {
    # A white background is readable on dark and light pages.
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    # Text stays text, and ids are stable, so a file changes only if its numbers do.
    "svg.fonttype": "none",
    "svg.hashsalt": "flash-frac",
}
STYLE = TEXT | {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def short(length: int) -> str:
    """A short form of a number of tokens for figures and tables: 512, 4K.

    Example: `short(4096) == "4K"`
    """
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)


def label(name: str) -> str:
    """Escape a user-supplied name so that matplotlib shows it literally, even in a legend.

    Example: `label("a$b") == "a\\\\$b"`
    """
    # matplotlib leaves labels that start with an underscore out of a legend.
    return name.replace("$", r"\$").replace("_", "\u200b_", name.startswith("_"))


def length_axis(axes: Any, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick at each length and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.minorticks_off()


def faint_grid(axes: Any, axis: str = "y") -> None:
    """Draw a thin grid behind everything else."""
    axes.grid(axis=axis, color=FAINT, lw=0.6)
    axes.set_axisbelow(True)


@contextmanager
def figure_at(
    path: Target, size: tuple[float, float], widths: Sequence[float] = (1,)
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, side by side; save it at the end to `path`, or as SVG to memory.

    Example: `with figure_at("a.svg", (5, 3)) as (_, (axes,)): axes.plot([1, 2])`
    """
    # Using the Figure class directly needs no display and no global state.
    matplotlib = require("matplotlib", "plot", "a figure")
    figure_class = require("matplotlib.figure", "plot", "a figure").Figure
    with matplotlib.rc_context(STYLE):
        drawn = figure_class(figsize=size, layout="constrained")
        grid = {"width_ratios": list(widths)}
        yield drawn, drawn.subplots(1, len(widths), squeeze=False, gridspec_kw=grid)[0]
        # Without a date, the same numbers give the same file.
        file = path if isinstance(path, BytesIO) else BytesIO()
        kind = "svg" if isinstance(path, BytesIO) else Path(path).suffix[1:]
        metadata = {"Date": None} if kind == "svg" else None
        drawn.savefig(file, format=kind, dpi=150, metadata=metadata)
        if not isinstance(path, BytesIO):
            write_bytes(Path(path), file.getvalue())
