"""A report on disk: its numbers as JSON, figures as SVG, and one page to look around in.

report.json     every number; the keys are the attributes of `MemoryReport`
index.html      the page, with numbers, style and script inside: it needs no other file
responses.svg   how much each layer holds of earlier tokens, layers of all types in one figure
horizon.svg     reach of each layer
alpha.svg       median alpha by layer and head, if the model has Frac layers
layer_00.svg    responses of a layer and how it makes them, one file each; numbered as in the model
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
from flash_frac.inspect.figures import draw_alpha, draw_horizon, draw_layer, draw_responses
from flash_frac.inspect.records import MemoryReport
from flash_frac.inspect.report import inspect_model
from flash_frac.inspect.statistics import check_model
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

logger = logging.getLogger(__name__)
_PARTS = ("page.html", "page.css", "charts.js", "overview.js", "page.js")


def write_report(report: MemoryReport, folder: str | Path) -> Path:
    """Write page, figures and numbers into a folder, which is made; returns the page's path.

    Without matplotlib there are no figures, and a warning in the log says so.

    Example: `write_report(inspect_model(model, ids), "memory")`
    """
    folder, numbers = Path(folder), report.as_dict()
    page = folder / "index.html"
    # NaN is no JSON: better an error now than in a browser.
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    contents = {"report.json": f"{text}\n".encode(), page.name: render_page(numbers).encode()}
    try:
        require("matplotlib", "plot", "a figure")
        contents |= _figures(report)
    except ImportError as error:
        logger.warning("%s has no figures beside it: %s", page, error)
    # Together, so that a disk that is full does not get a page without its figures.
    write_files(folder, contents)
    return page


def _figures(report: MemoryReport) -> dict[str, bytes]:
    """The figures of a report, by the names of their files."""
    drawn: dict[str, BytesIO] = {"responses.svg": BytesIO(), "horizon.svg": BytesIO()}
    draw_responses(drawn["responses.svg"], report)
    draw_horizon(drawn["horizon.svg"], report)
    if any(layer.type == "frac" for layer in report.layers):
        draw_alpha(drawn.setdefault("alpha.svg", BytesIO()), report)
    for n, layer in enumerate(report.layers):
        draw_layer(drawn.setdefault(f"layer_{layer.number:02}.svg", BytesIO()), report, n)
    return {name: file.getvalue() for name, file in drawn.items()}


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
        settings: `factor`, `num_lags`, `max_sources` and `max_queries` of `inspect_model`.

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
