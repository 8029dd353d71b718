"""`frac train` and `frac consolidate`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flash_frac.extras import require


def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="Name of an installed recipe, such as small, or a YAML file."
        ),
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run", "--dry-run", help="Show the plan and the first batch, then stop."
        ),
    ] = False,
) -> None:
    """Train a model from a recipe, or resume its run.

    A recipe, or the command line, which overrides it, sets any field of
    transformers.TrainingArguments, of the model and of the data. The most used:

    \b
      --config_name frac-130m          fresh weights of an installed size, or of a config.json
      --model_name_or_path my-frac     instead: start from the weights of a checkpoint
      --data_files my-texts            files or folders to train on
      --held_out_files other-texts     files or folders to evaluate on
      --prepared_data tokens           instead of both: a folder of `frac data prepare`
      --tokenizer bytes                bytes, dna, or the folder or hub id of a tokenizer
      --sequence_length 1024           tokens per training sequence
      --output_dir runs/mine           folder of the run; the same one resumes it
      --max_steps 1000                 optimizer steps
      --learning_rate 3e-4             peak learning rate
      --per_device_train_batch_size 8  sequences per device and step

    docs/training.md has all fields of the model and the data.

    Example: frac train small --data_files my-texts --learning_rate 3e-4
    """
    require("accelerate", "train", "frac train")
    from flash_frac.train import load_recipe
    from flash_frac.train import train as run

    loaded = load_recipe(recipe, context.args)
    if dry_run:
        from flash_frac.train.dry_run import dry_run as look

        lines = look(loaded)
        if loaded.training.should_save:
            print(*lines, sep="\n")
        return
    result = run(loaded)
    if result.is_main:
        print(f"The model is in {result.final}, the logs in {result.output_dir}.")


def consolidate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A sharded checkpoint-N folder.")
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A new folder for from_pretrained.")
    ],
) -> None:
    """Join the shards of an FSDP checkpoint into one folder for from_pretrained.

    Example: frac consolidate my-run/checkpoint-1000 my-model
    """
    from flash_frac.train.checkpoint import consolidate as join

    print(f"{join(checkpoint, output)} can be loaded with from_pretrained.")
