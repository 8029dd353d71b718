"""`frac inspect`: parse options, call the library, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flash_frac.cli_options import Checkpoint, TokenizerName, check_given, named_tokenizer
from flash_frac.files import check_folder, decode_text


def inspect(
    checkpoint: Checkpoint,
    after: Annotated[
        str | None,
        typer.Argument(
            metavar="AFTER", help="A later checkpoint of the same model, to compare the two."
        ),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="Folder for the page, figures and numbers.")],
    text: Annotated[
        Path | None, typer.Option(help="Text file to read; by default, a presidential address.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens to read.", min=16)] = 4096,
    tokenizer: TokenizerName = None,
) -> None:
    """Measure how a model's memory fades and write an HTML report.

    OUT has index.html, figures and report.json.

    With two checkpoints, the page compares them, such as before and after training.

    Example: frac inspect my-run/checkpoint-100 my-run/final --out law
    """
    from flash_frac.inspect import inspect_checkpoint
    from flash_frac.quickstart import corpus

    if text is None:
        name, passage = "State of the Union address", corpus.load()[-1].text
    else:
        name, passage = text.name, decode_text(check_given(text, "--text").read_bytes(), text)
    check_folder(out, "--out")
    inspect_checkpoint(
        checkpoint if after is None else after,
        out,
        before=None if after is None else checkpoint,
        text=passage,
        text_name=name,
        num_tokens=tokens,
        tokenizer=named_tokenizer(tokenizer),
    )
    numbers = out / "report.json" if after is None else f"{out}/before.json and report.json"
    print(f"Open {out / 'index.html'}; every number is in {numbers}.")
