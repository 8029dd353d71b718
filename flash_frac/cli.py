"""The command `frac`: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_frac import __version__
from flash_frac.cli_eval import evals
from flash_frac.extras import require
from flash_frac.files import check_file, check_folder, decode_text

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="FRAC: sequence models whose memory fades as a power law.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flash-frac {__version__}")
        raise typer.Exit


@app.callback()
def frac(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
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
TokenizerName = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Folder or hub id, bytes or dna; else the checkpoint's own."),
]
State = Annotated[Path | None, typer.Option(help="A saved state to begin with.")]
SaveState = Annotated[Path | None, typer.Option(help="Where to save the state at the end.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Only the k most likely tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(help="Only the likely tokens that hold this share.")]
MinP = Annotated[float, typer.Option(help="Only tokens of this share of the likeliest.")]
Penalty = Annotated[float, typer.Option(help="Above 1, tokens seen before are less likely.")]


def _tokenizer(name: str | None) -> Any:
    """The tokenizer of the option, or None for that of the checkpoint."""
    if name is None:
        return None
    from flash_frac.data import load_tokenizer

    return load_tokenizer(name, needs_eos=False)


def _piped_text() -> str:
    """Standard input without its last line break, if it is piped; else nothing."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return decode_text(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _with_stream(command: Callable[..., None]) -> Callable[..., None]:
    """Add a checkpoint, states and sampling to the options of command(stream, sampling, ...)."""

    def run(
        checkpoint: Checkpoint,
        state: State = None,
        save_state: SaveState = None,
        tokenizer: TokenizerName = None,
        temperature: Temperature = 0.8,
        top_k: TopK = 0,
        top_p: TopP = 1.0,
        min_p: MinP = 0.0,
        repetition_penalty: Penalty = 1.0,
        **options: Any,
    ) -> None:
        from flash_frac.inference import SamplingSettings
        from flash_frac.inference.chat import open_stream, saving

        # Before a model is loaded, which takes its time.
        if options.get("prompt") == "":
            options["prompt"] = _piped_text()
            if not options["prompt"] and state is None:
                raise ValueError(
                    "there is nothing to continue: give --prompt, --state or both, or pipe a text"
                )
        if options["max_new_tokens"] < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {options['max_new_tokens']}")
        if save_state is not None:
            check_file(save_state, "--save-state")
        sampling = SamplingSettings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        stream = open_stream(checkpoint, state, tokenizer=_tokenizer(tokenizer))
        with saving(stream, save_state, lambda line: typer.echo(line, err=True)):
            command(stream, sampling, **options)

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
    prompt: Annotated[
        str, typer.Option(help="What to continue; else standard input, if it is piped.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 200,
    seed: Annotated[
        int | None, typer.Option(help="Random seed for sampling.", min=0, max=2**63 - 1)
    ] = None,
) -> None:
    """Continue a text, as the tokens come; Ctrl-C ends it and loses nothing."""
    from flash_frac.inference.chat import continue_text

    continue_text(
        stream,
        prompt,
        _say,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        echo=True,
    )
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
def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    tokenizer: TokenizerName = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto: a GPU if any.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights; auto: the checkpoint's.")] = "auto",
    slots: Annotated[int, typer.Option(help="Requests answered at once.")] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer at most; attention layers need memory."),
    ] = None,
    piece: Annotated[int, typer.Option(help="Tokens of prompts read between two steps.")] = 2048,
    max_waiting: Annotated[int, typer.Option(help="Requests in the queue; then 429.")] = 1024,
    prefix_device_gib: Annotated[float, typer.Option(help="Prefix states on the device.")] = 1.0,
    prefix_host_gib: Annotated[float, typer.Option(help="Prefix states in host memory.")] = 0.0,
    prefix_disk_gib: Annotated[float, typer.Option(help="Prefix states on disk.")] = 0.0,
    prefix_folder: Annotated[Path | None, typer.Option(help="Where those on disk are.")] = None,
    prefix_spacing: Annotated[int, typer.Option(help="Tokens between prefix states.")] = 512,
    cors: Annotated[bool, typer.Option("--cors", help="Let pages of other sites ask.")] = False,
    log_level: Annotated[str, typer.Option(help="Of the HTTP server.")] = "info",
    sequential: Annotated[
        bool,
        typer.Option("--sequential", help="Use transformers' server; takes all its options."),
    ] = False,
) -> None:
    """Answer OpenAI's API over HTTP, many requests at once: frac serve CHECKPOINT."""
    own = ("checkpoint", "tokenizer", "sequential")
    given: dict[str, Any] = {n: value for n, value in context.params.items() if n not in own}
    if sequential:
        from flash_frac.inference.server.sequential import options_for, serve_sequentially

        typed = {n: value for n, value in given.items() if _is_typed(context, n)}
        options = [*options_for(typed), *context.args]
        serve_sequentially(checkpoint, options, tokenizer=_tokenizer(tokenizer))
        return
    if context.args:
        raise ValueError(
            f"frac serve has no option {context.args[0]}; with --sequential it takes those of "
            "transformers serve"
        )
    from flash_frac.inference.server.serving import ServerOptions
    from flash_frac.inference.server.serving import serve as run

    run(checkpoint, ServerOptions(**given), tokenizer=_tokenizer(tokenizer))


def _is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


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
    tokenizer: TokenizerName = None,
) -> None:
    """Show the memory law of a trained model: OUT/index.html, figures, report.json."""
    from flash_frac.inspect import inspect_checkpoint
    from flash_frac.quickstart import corpus

    if text is None:
        name, passage = "State of the Union address", corpus.load()[-1].text
    else:
        name, passage = text.name, decode_text(text.read_bytes(), text)
    check_folder(out, "--out")
    inspect_checkpoint(
        checkpoint,
        out,
        text=passage,
        text_name=name,
        num_tokens=tokens,
        tokenizer=_tokenizer(tokenizer),
    )
    print(f"Open {out / 'index.html'}; every number is in {out / 'report.json'}.")


app.add_typer(evals, name="eval", help="Measure what the paper measures: frac eval CHECKPOINT.")


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
    """Tokens/s of prefill, decoding and training with random weights.

    The paper's numbers stand below those of a 1.3B model on a GPU.
    """
    from flash_frac.bench import bench as measure
    from flash_frac.bench import choose_config, choose_sizes
    from flash_frac.bench.timing import exit_if_ours_failed

    if out is not None:
        check_file(out, "--out")
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
    checkpoint: Annotated[
        str | None, typer.Argument(help="Folder or hub id of a model to examine instead.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Leave out the longer checks.")] = False,
) -> None:
    """Check that everything works on this machine, or a checkpoint; say what to do if not."""
    from flash_frac.doctor import doctor as examine

    raise typer.Exit(examine(checkpoint, quick=quick))


def main() -> None:
    """Run the command; an error that the user can fix is one line, without a traceback."""
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"frac: {error}")
    except RuntimeError as error:
        # Errors of a run that say what to do; others are ours, and keep their traceback.
        if type(error).__name__ not in ("CheckpointError", "LostRankError", "NotFiniteError"):
            raise
        sys.exit(f"frac: {error}")


if __name__ == "__main__":
    main()
