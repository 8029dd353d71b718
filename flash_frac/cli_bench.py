"""`frac bench`: parse options, call the library, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flash_frac.files import check_file


def bench(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="An installed size (frac-130m) or a model folder; default frac-1.3b.",
        ),
    ] = None,
    parts: Annotated[str, typer.Option(help="Parts, comma-separated.")] = "prefill,decode,train",
    peers: Annotated[
        str,
        typer.Option(
            help="Models to compare, comma-separated, or none; missing packages are skipped."
        ),
    ] = "qwen3,transformers_mamba2,gated_deltanet,mamba2,mamba3,mamba3_d64,mamba3_mimo",
    modes: Annotated[
        str, typer.Option(help="Also measure Frac with other mode counts, such as 32.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="Prefill lengths in tokens.")] = "1024,4096,16384",
    out: Annotated[Path | None, typer.Option(help="JSON file for all numbers.")] = None,
) -> None:
    """Measure tokens/s of prefill, decoding and training with random weights.

    For a 1.3B model on a GPU, the table ends with the paper's numbers.

    Example: frac bench frac-130m --parts prefill,decode --out speed.json
    """
    from flash_frac.bench import bench as measure
    from flash_frac.bench import check_parts_and_peers, choose_config, choose_modes, choose_sizes
    from flash_frac.bench.timing import exit_if_ours_failed

    if out is not None:
        check_file(out, "--out")
    # Before the configuration, which may have to be downloaded.
    chosen = parts.split(","), [] if peers == "none" else peers.split(",")
    check_parts_and_peers(*chosen)
    sizes, with_modes = choose_sizes(lengths), choose_modes(modes)
    lines, left_out = measure(
        choose_config(config),
        parts=chosen[0],
        peers=chosen[1],
        sizes=sizes,
        modes=with_modes,
        out=out,
    )
    print("", *lines, sep="\n")
    exit_if_ours_failed(left_out)
