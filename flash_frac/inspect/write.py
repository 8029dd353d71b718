"""A report on disk: its numbers as JSON, figures as SVG, and one page to look around in.

report.json     every number; the keys are the attributes of `MemoryReport`
index.html      the page, with numbers, style and script inside: it needs no other file
alpha.svg       median alpha by layer and head
horizon.svg     reach of each layer
layer_00.svg    responses and modes of a layer, one file each
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from flash_frac.inspect.figures import draw_alpha, draw_horizon, draw_layer
from flash_frac.inspect.report import MemoryReport, inspect_model


def write_report(report: MemoryReport, folder: str | Path) -> Path:
    """Write page, figures and numbers into a folder, which is made; returns the page's path.

    Needs matplotlib.

    Example: `write_report(inspect_model(model, ids), "memory")`
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = report.as_dict()
    # NaN is no JSON: it would be found here and not in a browser.
    text = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    page = folder / "index.html"
    page.write_text(render_page(numbers), encoding="utf-8")
    draw_alpha(folder / "alpha.svg", report)
    draw_horizon(folder / "horizon.svg", report)
    for n in range(len(report.layers)):
        draw_layer(folder / f"layer_{n:02}.svg", report, n)
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


_PARTS = ("page.html", "page.css", "charts.js", "page.js")


def inspect_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    text: str,
    text_name: str = "text",
    num_tokens: int = 4096,
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
        device, dtype: of the model.
        settings: `factor`, `num_lags` and `max_sources` of `inspect_model`.

    Example: `inspect_checkpoint("my-frac", "memory", text=Path("book.txt").read_text())`
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if num_tokens < 16:
        raise ValueError(f"num_tokens must be at least 16, got {num_tokens}")
    tokenizer: Any = AutoTokenizer.from_pretrained(str(checkpoint), trust_remote_code=False)
    # A token is a letter at least, mostly; cutting first saves the time a whole book would take.
    ids = tokenizer(text[: 32 * num_tokens], return_tensors="pt").input_ids[:, :num_tokens]
    if ids.shape[1] < 16:
        raise ValueError(
            f"text must have at least 16 tokens, got {ids.shape[1]}; use one of some thousand"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=dtype)
    model.to(device)
    report = inspect_model(model, ids.to(device), text=text_name, **settings)
    write_report(report, out)
    return report
