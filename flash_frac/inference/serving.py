"""OpenAI's API over HTTP: the server is `transformers serve`, taught the classes of Frac."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from flash_frac.extras import require
from flash_frac.models import FracForCausalLM


def serve(checkpoint: str, options: Sequence[str] = ()) -> None:
    """Answer requests until it is interrupted.

    Args:
        checkpoint: folder or hub id of a model with its tokenizer; the only one that is served.
        options: any of `transformers serve`, such as ["--port", "9000"].

    Example: `serve("my-frac", ["--host", "0.0.0.0"])`
    """
    if any(option == "--continuous-batching" for option in options):
        raise ValueError(
            "--continuous-batching pages keys and values, which Frac layers do not have; leave it "
            "out: requests are answered one after another"
        )
    for module in ("fastapi", "uvicorn", "openai"):
        require(module, "serve", "frac serve")
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    # The server looks for the class that a checkpoint names among those of transformers, in the
    # module that it has imported: there may be two of them, one made while the other was loaded.
    names = model_manager.transformers  # pyright: ignore[reportPrivateImportUsage]
    setattr(names, FracForCausalLM.__name__, FracForCausalLM)
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(Serve)
    command([checkpoint, *options], prog_name="frac serve", standalone_mode=False)
