"""`frac data`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(
    no_args_is_help=True,
    help="Tokenise a corpus, or describe a tokenised one.\n\n"
    "Example: frac data prepare books tokens",
)


@data.command()
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files and folders as in data_files, or one hub dataset.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the tokens.")],
    tokenizer: Annotated[
        str, typer.Option(help="bytes, dna, or the folder or hub id of a tokenizer.")
    ] = "bytes",
    add_bos_token: Annotated[
        bool | None,
        typer.Option(
            help="Start each document with or without the bos token; default: what the tokenizer "
            "does.",
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="The field with the text in each row.")] = "text",
    dataset_config: Annotated[
        str | None, typer.Option(help="Configuration of a dataset; SOURCE is its id or folder.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the dataset; default: train.")] = None,
    held_out: Annotated[
        float, typer.Option(help="Fraction of the documents to hold out for evaluation.")
    ] = 0.0,
    held_out_documents: Annotated[
        int, typer.Option(help="Hold out the first N documents instead.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed for --held-out.")] = 0,
    processes: Annotated[
        int | None, typer.Option(help="Number of worker processes; default: one per core.")
    ] = None,
) -> None:
    """Tokenise a corpus once, for prepared_data in a recipe.

    If it is interrupted, the same command resumes the work.

    Example: frac data prepare books more.jsonl tokens --tokenizer my-tokenizer
    """
    from flash_frac.data import CorpusArguments, prepare_corpus
    from flash_frac.data.summary import summary

    arguments = CorpusArguments(
        sources=tuple(source),
        dataset_config=dataset_config,
        split=split,
        text_field=text_field,
        tokenizer=tokenizer,
        add_bos_token=add_bos_token,
        held_out=held_out,
        held_out_documents=held_out_documents,
        seed=seed,
    )
    try:
        prepared, finished = prepare_corpus(arguments, out, processes=processes)
    except KeyboardInterrupt:
        print("stopped; finished shards are kept, and the same command resumes from there")
        raise typer.Exit(130) from None
    if finished:
        print(f"{out} is already finished; there was nothing to do.")
    print(*summary(prepared), sep="\n")
    print(f"Train on it: frac train RECIPE --prepared_data {out} --tokenizer {out / 'tokenizer'}")


@data.command()
def info(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder written by frac data prepare.")
    ],
    samples: Annotated[int, typer.Option(help="Number of sample documents to show.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Random seed for choosing them.", min=0)] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Read all files and verify their checksums.")
    ] = False,
) -> None:
    """Show counts, lengths and samples of prepared data.

    Example: frac data info tokens --samples 5 --check
    """
    from flash_frac.data import PreparedData
    from flash_frac.data.summary import lengths, sample, summary

    prepared = PreparedData(out)
    print(*summary(prepared), "", *lengths(prepared.train), sep="\n")
    if samples:
        print("", *sample(prepared, samples, seed=seed), sep="\n")
    if check:
        print(f"\n{prepared.check()} files match their checksums in the manifest.")
