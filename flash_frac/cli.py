"""The `frac` command: parse options, call the library, print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from flash_frac import __version__
from flash_frac.cli_bench import bench
from flash_frac.cli_data import data
from flash_frac.cli_eval import evals
from flash_frac.cli_inspect import inspect
from flash_frac.cli_options import Checkpoint, TokenizerName, check_given, named_tokenizer
from flash_frac.cli_plan import plan
from flash_frac.cli_train import consolidate, train
from flash_frac.files import check_file, decode_text

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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
    """FRAC: sequence models whose memory fades as a power law.

    Example: frac quickstart --minutes 3
    """


# They also accept every field of TrainingArguments, the model and the data.
for command in (train, plan):
    app.command(
        options_metavar="[OPTIONS] [--any_field VALUE]...",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(command)
app.command()(consolidate)


@app.command()
def quickstart(
    output_dir: Annotated[Path, typer.Option(help="Folder for all output.")] = Path("quickstart"),
    minutes: Annotated[
        float,
        typer.Option(help="Approximate training time on two cores; evaluation comes on top."),
    ] = 3.0,
) -> None:
    """Train a small language model in minutes on a CPU, and inspect it.

    Example: frac quickstart --output-dir quickstart --minutes 3
    """
    from flash_frac.quickstart import run

    run(output_dir, minutes)


Quantize = Annotated[str | None, typer.Option(help="Quantise weights to int8 or fp8.")]
State = Annotated[Path | None, typer.Option(help="Saved state file to continue from.")]
SaveState = Annotated[Path | None, typer.Option(help="File to save the final state to.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.")]
TopP = Annotated[
    float, typer.Option(help="Sample from the top tokens with this total probability.")
]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this fraction of the top probability.")
]
Penalty = Annotated[float, typer.Option(help="Above 1, makes repeated tokens less likely.")]


def _piped_text() -> str:
    """Piped standard input without its last line break; empty if nothing is piped."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return decode_text(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _with_stream(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for checkpoint, state and sampling to a command.

    It is called as command(stream, sampling, keep, ...). When the block `with keep(stream)` ends,
    the state is saved to the file of --save-state.
    """

    def run(
        checkpoint: Checkpoint,
        state: State = None,
        save_state: SaveState = None,
        tokenizer: TokenizerName = None,
        quantize: Quantize = None,
        temperature: Temperature = 0.8,
        top_k: TopK = 0,
        top_p: TopP = 1.0,
        min_p: MinP = 0.0,
        repetition_penalty: Penalty = 1.0,
        **options: Any,
    ) -> None:
        from flash_frac.inference import SamplingSettings
        from flash_frac.inference.chat import open_stream, saving

        # Check the options before loading a model, which is slow.
        if options.get("prompt") == "":
            options["prompt"] = _piped_text()
            if not options["prompt"] and state is None:
                raise ValueError(
                    "there is nothing to continue: give --prompt, --state or both, or pipe in text"
                )
        if options["max_new_tokens"] < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {options['max_new_tokens']}")
        if state is not None:
            check_given(state, "--state")
        if save_state is not None:
            check_file(save_state, "--save-state")
        sampling = SamplingSettings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
        )
        given = {"tokenizer": named_tokenizer(tokenizer), "quantize": quantize}
        stream = open_stream(checkpoint, state, **given)
        command(stream, sampling, lambda kept: saving(kept, save_state, _note), **options)

    *shared, _ = signature(run, eval_str=True).parameters.values()
    _, _, _, *own = signature(command, eval_str=True).parameters.values()
    named: Any = update_wrapper(run, command, ("__name__", "__doc__"), ())
    named.__signature__ = Signature([*shared, *own])
    return named


@app.command()
@_with_stream
def generate(
    stream: Any,
    sampling: Any,
    keep: Any,
    *,
    prompt: Annotated[
        str, typer.Option(help="Text to continue; by default, piped standard input.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 200,
    seed: Annotated[
        int | None, typer.Option(help="Random seed for sampling.", min=0, max=2**63 - 1)
    ] = None,
) -> None:
    """Continue a text and print tokens as they come; Ctrl-C stops early.

    With --save-state, Ctrl-C also saves the state.

    Example: frac generate my-frac --prompt "Once upon a time" --max-new-tokens 100
    """
    from flash_frac.inference.chat import continue_text

    with keep(stream):
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
    keep: Any,
    *,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per answer.")] = 400,
    template: Annotated[bool, typer.Option(help="Use the tokenizer's chat template.")] = True,
) -> None:
    """Chat with a model; type /help to list the chat commands.

    Example: frac chat my-frac --temperature 0.7
    """
    from flash_frac.inference.conversation import Conversation
    from flash_frac.inference.terminal import talk

    conversation = Conversation(
        stream, _say, _note, sampling=sampling, max_new_tokens=max_new_tokens, template=template
    )
    with keep(conversation):
        talk(conversation)


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    tokenizer: TokenizerName = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:1; auto uses a GPU if any.")
    ] = "auto",
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API; default: CHECKPOINT.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weight dtype; auto keeps the saved one.")] = "auto",
    quantize: Quantize = None,
    slots: Annotated[int, typer.Option(help="Requests decoded concurrently.")] = 64,
    max_length: Annotated[
        int | None,
        typer.Option(help="Maximum tokens of prompt and answer; sizes the KV cache."),
    ] = None,
    piece: Annotated[
        int, typer.Option(help="Maximum prompt tokens processed between decode steps.")
    ] = 2048,
    max_waiting: Annotated[int, typer.Option(help="Queue length; beyond it, HTTP 429.")] = 1024,
    prefix_device_gib: Annotated[
        float, typer.Option(help="Prefix cache on the device, in GiB.")
    ] = 1.0,
    prefix_host_gib: Annotated[
        float, typer.Option(help="Prefix cache in host memory, in GiB.")
    ] = 0.0,
    prefix_disk_gib: Annotated[float, typer.Option(help="Prefix cache on disk, in GiB.")] = 0.0,
    prefix_folder: Annotated[
        Path | None, typer.Option(help="Folder of the prefix cache on disk.")
    ] = None,
    prefix_spacing: Annotated[int, typer.Option(help="Tokens between cached states.")] = 512,
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds to finish running requests before stopping.", min=0)
    ] = 300,
    cors: Annotated[bool, typer.Option("--cors", help="Allow requests from other sites.")] = False,
    log_level: Annotated[str, typer.Option(help="Log level of the HTTP server.")] = "info",
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Use transformers' own server, with all its options and --trust-remote-code.",
        ),
    ] = False,
) -> None:
    """Serve OpenAI's HTTP API with continuous batching: frac serve CHECKPOINT.

    Example: frac serve my-frac --port 8000 --slots 64
    """
    own = ("checkpoint", "tokenizer", "sequential")
    given: dict[str, Any] = {n: value for n, value in context.params.items() if n not in own}
    if sequential:
        from flash_frac.inference.server.sequential import options_for, serve_sequentially

        typed = {n: value for n, value in given.items() if _is_typed(context, n)}
        options = [*options_for(typed), *context.args]
        serve_sequentially(checkpoint, options, tokenizer=named_tokenizer(tokenizer))
        return
    if context.args:
        raise ValueError(
            f"frac serve has no option {context.args[0]}; with --sequential it accepts those of "
            "transformers serve"
        )
    from flash_frac.inference.server.serving import ServerOptions
    from flash_frac.inference.server.serving import serve as run

    run(checkpoint, ServerOptions(**given), tokenizer=named_tokenizer(tokenizer))


def _is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a Frac model.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the copy.")],
) -> None:
    """Copy a checkpoint so that plain transformers can load it, with trust_remote_code.

    Example: frac export my-frac my-frac-exported
    """
    from flash_frac.models.export import export as copy

    print(f"{copy(checkpoint, folder)} can be loaded by transformers with trust_remote_code.")


app.command()(inspect)
app.command()(bench)
app.add_typer(data, name="data")
app.add_typer(evals, name="eval")


@app.command()
def doctor(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Folder or hub id of a model to check, instead of this machine.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Skip the slow checks.")] = False,
) -> None:
    """Check this machine, or a checkpoint, and say how to fix each problem.

    Example: frac doctor my-frac --quick
    """
    from flash_frac.doctor import doctor as examine

    raise typer.Exit(examine(checkpoint, quick=quick))


def main() -> None:
    """Run the command; an error that the user can fix prints one line, without a traceback."""
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"frac: {error}")
    except RuntimeError as error:
        # These errors tell the user what to do. Any other is a bug and keeps its traceback.
        if type(error).__name__ not in ("CheckpointError", "LostRankError", "NotFiniteError"):
            raise
        sys.exit(f"frac: {error}")


if __name__ == "__main__":
    main()
