"""Time a FRAC language model beside its peers: prefill, decoding, a training step, small models.

    python benchmarks/model.py [--parts prefill decode train small] [--no-peers | --peers qwen3]

Random weights in bfloat16; on a CPU float32 and tiny sizes, for trying the script out.
    prefill  the backbone with its cache, batch 1: eagerly, and ours through `Generator` as well
    decode   tokens/s of steady greedy decoding after a prompt, batch 1 and 64: `generate` of
             transformers, and ours through `Generator` as well; T is the length of the prompt
    train    forward and backward with labels, gradients made anew, no optimizer; 8 x 4096 tokens
    small    forward and forward+backward of a model of width 256, our backends in turns
The kernels are checked in a small model against float64 first. Rows go to <gpu>.csv.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import (
    OURS,
    add_options,
    attempt,
    exit_if_ours_failed,
    row_keeper,
)
from model_parts import (
    CPU_SIZES,
    Sizes,
    Subject,
    count,
    decode_rows,
    our_subject,
    prefill_rows,
    set_backend,
    small_rows,
    train_rows,
)
from peers import MODEL_PEERS, ModelPeer, build, model_peers
from torch import Tensor

from flash_frac.models import FracConfig
from flash_frac.ops.testing import relative_error

CONFIG = Path(__file__).parents[1] / "recipes" / "models" / "frac-1.3b" / "config.json"
PARTS: dict[str, Callable[[Subject, Sizes, list[str]], list[dict]]] = {
    "prefill": prefill_rows,
    "decode": decode_rows,
    "train": train_rows,
}


def check(device: str, backend: str) -> float:
    """Worst error of logits and gradients in bfloat16; no timing past twice that of torch.

    Weights of 0.1 instead of 0.02 make controls and gates differ from token to token.
    """
    torch.manual_seed(0)
    config = FracConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        frac_num_modes=16,
        initializer_range=0.1,
    )
    model = build(config, torch.bfloat16, device)
    ids = our_subject(model, None).tokens(2, 300 if device == "cuda" else 40)

    def outputs(model: Any, backend: str) -> list[Tensor]:
        output = set_backend(model, backend)(ids, labels=ids, use_cache=False)
        weight = model.get_input_embeddings().weight
        return [output.logits.detach(), *torch.autograd.grad(output.loss, [weight])]

    exact = outputs(copy.deepcopy(model).double(), "torch")
    pairs = zip(outputs(model, backend), outputs(model, "torch"), exact, strict=True)
    worst = 0.0
    for name, (value, plain, reference) in zip(("logits", "gradients"), pairs, strict=True):
        error, allowed = relative_error(value, reference), relative_error(plain, reference)
        print(f"a small model in bfloat16: {name} off by {error:.1e}, on torch by {allowed:.1e}")
        # Not "if above", because an error of NaN is above nothing.
        if not error <= 2 * (allowed + 2**-9):
            raise SystemExit(f"{name} on {backend} are wrong by {error:.1e}: no timing")
        worst = max(worst, error)
    return worst


def makers(
    config: FracConfig, peers: Iterable[ModelPeer], device: str, dtype: torch.dtype, error: float
) -> dict[str, Callable[[], Subject]]:
    """What makes ours and the peers, each to be called when its turn comes."""

    def ours() -> Subject:
        return our_subject(build(config, dtype, device), error)

    def theirs(peer: ModelPeer) -> Subject:
        return Subject(peer.name, build(peer.config, dtype, device), peer.note, peer.shape)

    return {OURS: ours, **{peer.name: partial(theirs, peer) for peer in peers}}


def measure(
    name: str,
    make: Callable[[], Subject],
    parts: Iterable[str],
    sizes: Sizes,
    failures: list[str],
) -> Iterator[list[dict]]:
    """Rows of one model, part by part; it is gone afterwards, because two might not fit."""
    for subject in attempt(name, make, failures):
        print(f"{name}: {count(subject.model)} parameters")
        for part in parts:
            yield PARTS[part](subject, sizes, failures)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "small"], default=[*PARTS, "small"])
    parser.add_argument("--peers", nargs="+", choices=[*MODEL_PEERS], default=[*MODEL_PEERS])
    parser.add_argument("--config", type=Path, help="config.json of the model; default 1.3B")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.config is None and not torch.cuda.is_available():
        parser.error("without a GPU a tiny model must be given with --config")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    typed = sys.argv[1:] if arguments is None else arguments
    options = parse(typed)
    keep = row_keeper(__file__, typed, options)
    failures: list[str] = []
    device, backend, dtype, sizes = "cuda", "triton", torch.bfloat16, Sizes()
    if not torch.cuda.is_available():
        device, backend, dtype, sizes = "cpu", "torch", torch.float32, CPU_SIZES
    error = check(device, backend)
    if "small" in options.parts:
        keep(small_rows(device, dtype, sizes, error, failures))
    parts = [part for part in PARTS if part in options.parts]
    config = FracConfig.from_json_file(options.config or CONFIG)
    peers = model_peers([] if options.no_peers else options.peers, config, failures)
    for name, make in makers(config, peers, device, dtype, error).items() if parts else ():
        for rows in measure(name, make, parts, sizes, failures):
            keep(rows)
        gc.collect()
        torch.cuda.empty_cache()
    exit_if_ours_failed(failures)


if __name__ == "__main__":
    main()
