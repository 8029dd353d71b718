"""`frac plan`: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from flash_frac.extras import require


def plan(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Name of an installed recipe, such as frac-1.3b, or a YAML file.",
        ),
    ],
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", min=1)] = 1,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            "--gpu-memory", "--gpu_memory", help="Memory of each GPU in GiB; default: of --gpu."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="GPU type: H200, H100, 'H100 PCIe', A100, L40S or B200.")
    ] = "H200",
) -> None:
    """Predict the memory, speed, time and disk of a run, before it starts.

    It accepts the fields of `frac train`. If the run does not fit, it says what to change, and the
    exit status is 1. Nothing is downloaded or started.

    Example: frac plan frac-1.3b --gpus 16 --gpu-memory 80
    """
    require("accelerate", "train", "frac plan")
    from flash_frac.train import load_recipe
    from flash_frac.train.plan import check_gpu, plan_run

    # Before the recipe, whose settings may print warnings.
    check_gpu(gpu, gpu_memory)
    loaded = load_recipe(recipe, context.args, planned=gpus)
    found = plan_run(loaded, gpu_memory=gpu_memory, gpu=gpu)
    print(*found.lines(), sep="\n")
    raise typer.Exit(0 if found.fits else 1)
