"""The command `frac`: parse, call, print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FRAC: sequence models whose memory fades as a power law.",
)


@app.callback()
def frac() -> None:
    """FRAC: sequence models whose memory fades as a power law."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="YAML file; see recipes/ and docs/training.md.")],
) -> None:
    """Train by a recipe, or go on with its run: frac train RECIPE [--any_training_argument VALUE].

    Any field of transformers.TrainingArguments, and of the model and data fields of
    docs/training.md, is taken from the recipe or the command line, which has the last word.
    """
    from flash_frac.train import load_recipe
    from flash_frac.train import train as run

    result = run(load_recipe(recipe, context.args))
    if result.is_main:
        print(f"The model is in {result.final}, the logs in {result.output_dir}.")


@app.command()
def consolidate(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint-N of a run with sharded states.")],
    output: Annotated[Path, typer.Argument(help="A new folder for from_pretrained.")],
) -> None:
    """Join the shards of an FSDP checkpoint into one folder for from_pretrained."""
    from flash_frac.train.consolidate import consolidate as join

    print(f"{join(checkpoint, output)} can be loaded with from_pretrained.")


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(help="Rough time on two cores; more is better.")] = 3.0,
) -> None:
    """Train a small language model on an embedded text, in minutes on a CPU, and look at it."""
    from flash_frac.quickstart import run

    run(output_dir, minutes)


def main() -> None:
    """Run the command; what a user can mend is told in a sentence, without a traceback."""
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"frac: {error}")
    except RuntimeError as error:
        # Errors of a run that say what to do; others are ours, and keep their traceback.
        if type(error).__name__ not in ("CheckpointError", "NotFiniteError"):
            raise
        sys.exit(f"frac: {error}")


if __name__ == "__main__":
    main()
