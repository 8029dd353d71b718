"""Write a report to disk: numbers as JSON, figures as SVG, and an interactive page.

report.json     every number; the keys are the attributes of `MemoryReport`
index.html      the page, with numbers, style and script inside: it needs no other file
responses.svg   how much each layer keeps of earlier tokens, all types of layers in one figure
horizon.svg     reach of each layer
alpha.svg       median alpha by layer and head, if the model has Frac layers
layer_00.svg    responses of a layer and their mechanism, one file per layer, by layer index

With two checkpoints, these files describe the second. The page shows both, and there are
before.json       every number of the first
before_after.svg  responses and medians of Δ, α and λ of both, by layer
"""

from __future__ import annotations

import html
import json
import logging
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from flash_frac.extras import require
from flash_frac.files import write_files
from flash_frac.inspect.figures import (
    draw_alpha,
    draw_before_after,
    draw_horizon,
    draw_layer,
    draw_responses,
)
from flash_frac.inspect.records import MemoryReport
from flash_frac.inspect.report import inspect_model
from flash_frac.inspect.statistics import check_model
from flash_frac.models.loading import Found, find_checkpoint, find_tokenizer, load_model

logger = logging.getLogger(__name__)
_PARTS = (
    *("page.html", "page.css"),
    *("charts.js", "overview.js", "distributions.js", "page.js"),
)


# Files that an earlier report may have left here, and that would contradict this one.
_SOMETIMES = (
    *("before.json", "before_after.svg", "responses.svg", "horizon.svg", "alpha.svg"),
    "layer_[0-9][0-9].svg",
)


def write_report(
    report: MemoryReport, folder: str | Path, *, before: MemoryReport | None = None
) -> Path:
    """Write page, figures and numbers to a folder, created if missing; return the page's path.

    With `before`, a report of the same layers on the same text, the page compares the two.
    Files of an earlier report in the folder are replaced or deleted. Without matplotlib there are
    no figures, and a warning says so.

    Example: `write_report(inspect_model(model, ids), "memory")`
    """
    folder, numbers = Path(folder), report.as_dict()
    page = folder / "index.html"
    # NaN is not valid JSON: raise an error now rather than in a browser.
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    contents = {"report.json": f"{text}\n".encode()}
    earlier = None
    if before is not None:
        check_comparable(before, report)
        earlier = before.as_dict()
        text = json.dumps(earlier, allow_nan=False, separators=(",", ":"))
        contents["before.json"] = f"{text}\n".encode()
    contents[page.name] = render_page(numbers, earlier).encode()
    try:
        require("matplotlib", "plot", "a figure")
        contents |= _figures(report, before)
    except ImportError as error:
        logger.warning("%s has no figures next to it: %s", page, error)
    # Write all together, so that a full disk does not leave a page without its figures.
    write_files(folder, contents)
    for pattern in _SOMETIMES:
        for file in folder.glob(pattern):
            if file.name not in contents:
                file.unlink()
    return page


def check_comparable(before: MemoryReport, after: MemoryReport) -> None:
    """Raise a ValueError unless two reports have the same layers, heads, lags and text."""
    shapes = [
        {"layers": [(layer.number, layer.type, len(layer.heads)) for layer in report.layers]}
        | {"lags": report.lags, "text": report.text}
        for report in (before, after)
    ]
    for name, what in (
        ("layers", "models with the same layers and heads"),
        ("lags", "the same number of tokens"),
        ("text", "the same text"),
    ):
        if shapes[0][name] != shapes[1][name]:
            raise ValueError(
                f"{before.name} and {after.name} cannot be compared: a comparison needs {what}; "
                "inspect them one by one"
            )


def _figures(report: MemoryReport, before: MemoryReport | None) -> dict[str, bytes]:
    """The figures of a report, by file name."""
    drawn: dict[str, BytesIO] = {"responses.svg": BytesIO(), "horizon.svg": BytesIO()}
    draw_responses(drawn["responses.svg"], report)
    draw_horizon(drawn["horizon.svg"], report)
    if any(layer.type == "frac" for layer in report.layers):
        draw_alpha(drawn.setdefault("alpha.svg", BytesIO()), report)
    for n, layer in enumerate(report.layers):
        draw_layer(drawn.setdefault(f"layer_{layer.number:02}.svg", BytesIO()), report, n)
    if before is not None:
        draw_before_after(drawn.setdefault("before_after.svg", BytesIO()), before, report)
    return {name: file.getvalue() for name, file in drawn.items()}


def render_page(numbers: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    """The page as one string, for the numbers of `MemoryReport.as_dict()` and earlier ones.

    Example: `render_page(json.loads(Path("memory/report.json").read_text()))`
    """
    folder = files("flash_frac.inspect") / "page"
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in _PARTS}
    shown = numbers if before is None else numbers | {"before": before}
    data = json.dumps(shown, allow_nan=False, separators=(",", ":"))
    # A "</script>" in the name of a text must not end the script element.
    parts["report.json"] = data.replace("<", "\\u003c")
    parts["title"] = html.escape(numbers["name"])
    page = parts["page.html"]
    # Split the template once, so that a marker inside the inserted text is not replaced.
    pieces = page.split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def inspect_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    text: str,
    before: str | Path | None = None,
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
        text: the text to read; its length limits the lags.
        before: an earlier checkpoint to compare with, such as that of the first step. It reads the
            same tokens and needs no tokenizer.
        text_name: name of the text in the report.
        num_tokens: read at most this many tokens of the text.
        tokenizer: replaces the checkpoint's own.
        device, dtype: of the model.
        settings: `factor`, `num_lags`, `max_sources` and `max_queries` of `inspect_model`.

    Returns:
        The report of `checkpoint`.

    Example: `inspect_checkpoint("my-frac", "memory", text=Path("book.txt").read_text())`
    """
    if num_tokens < 16:
        raise ValueError(f"num_tokens must be at least 16, got {num_tokens}")
    found = find_checkpoint(checkpoint)
    if tokenizer is None:
        tokenizer = find_tokenizer(found)
    # Most tokens have at least one character, so cut first: tokenizing a whole book is slow.
    ids = tokenizer(text[: 32 * num_tokens], return_tensors="pt").input_ids[:, :num_tokens]
    if ids.shape[1] < 16:
        raise ValueError(
            f"text must have at least 16 tokens, got {ids.shape[1]}; use a few thousand"
        )

    def measure(place: Found) -> MemoryReport:
        model = load_model(place, dtype=dtype).to(device)
        check_model(model)
        if int(ids.max()) >= model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has an id {int(ids.max())}, but the vocab_size of {place.name} is "
                f"{model.config.vocab_size}; use the tokenizer that the model was trained with"
            )
        return inspect_model(model, ids.to(device), text=text_name, **settings)

    earlier = None if before is None else measure(find_checkpoint(before))
    report = measure(found)
    write_report(report, out, before=earlier)
    return report
