"""Models one after another: the kernels checked, each made on the device, measured, and gone.

Letters: B batch, T time.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_frac.bench.parts import (
    SMALL,
    Sizes,
    Subject,
    build,
    count,
    decode_rows,
    our_subject,
    prefill_rows,
    set_backend,
    small_rows,
    stream_rows,
    train_rows,
)
from flash_frac.bench.peers import MODEL_PEERS, ModelPeer, available
from flash_frac.bench.timing import OURS, attempt
from flash_frac.models import FracConfig
from flash_frac.ops.testing import relative_error

PARTS: dict[str, Callable[[Subject, Sizes, list[str]], list[dict]]] = {
    "prefill": prefill_rows,
    "decode": decode_rows,
    "train": train_rows,
}


def check(device: str, backend: str, dtype: torch.dtype) -> float:
    """Worst error of logits and gradients in a dtype; no timing past twice that of torch.

    Weights of 0.1 instead of 0.02 make controls and gates differ from token to token.
    """
    torch.manual_seed(0)
    config = FracConfig(**SMALL, num_hidden_layers=4, initializer_range=0.1)
    model = build(config, dtype, device)
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
        shown = str(dtype).removeprefix("torch.")
        print(f"a small model in {shown}: {name} off by {error:.1e}, on torch by {allowed:.1e}")
        # Not "if above", because an error of NaN is above nothing.
        if not error <= 2 * (allowed + torch.finfo(dtype).eps / 4):
            raise SystemExit(f"{name} on {backend} are wrong by {error:.1e}: no timing")
        worst = max(worst, error)
    return worst


def machine() -> tuple[str, str, torch.dtype]:
    """Device, backend and dtype that models are measured with here."""
    if torch.cuda.is_available():
        return "cuda", "triton", torch.bfloat16
    return "cpu", "torch", torch.float32


def measure_models(
    config: FracConfig,
    *,
    parts: Iterable[str],
    peers: Iterable[str],
    sizes: Sizes,
    failures: list[str],
    weights: str | None = None,
) -> Iterator[list[dict]]:
    """Rows of a model with random weights and of its peers, part by part; ours checked first.

    A model is gone before the next is made, because two might not fit.

    Args:
        config: of our model; peers take its size.
        parts: of PARTS, and "small", which are models of their own.
        peers: names in `flash_frac.bench.peers.MODEL_PEERS`.
        sizes: lengths and batches.
        failures: gets why models or ways were left out.
        weights: "int8" or "fp8" for linear layers of ours that torchao quantises.
    """
    device, backend, dtype = machine()
    error = check(device, backend, dtype)
    if "small" in parts:
        yield small_rows(device, dtype, sizes, error, failures)
    chosen = [part for part in PARTS if part in parts]
    others = available(MODEL_PEERS, peers, config, failures) if chosen else []

    if weights is not None:
        # `Generator` calls quantised layers one by one too, and needs no more tokens than eager.
        sizes = replace(sizes, steps=sizes.eager_steps)

    def ours() -> Subject:
        subject = our_subject(build(config, dtype, device), error)
        return subject if weights is None else quantised(subject, weights)

    def theirs(peer: ModelPeer) -> Subject:
        return Subject(peer.name, build(peer.config, dtype, device), peer.note, peer.shape)

    makers = {OURS: ours, **{peer.name: partial(theirs, peer) for peer in others}}
    for name, make in makers.items() if chosen else ():
        yield from _measure(name, make, chosen, sizes, failures)
        gc.collect()
        torch.cuda.empty_cache()


# What torchao calls weights of 8 bits that are multiplied in the dtype of the model.
WEIGHTS = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}


def quantised(subject: Subject, weights: str) -> Subject:
    """The model with weights of this kind, whose error is not known."""
    from torchao import quantization  # pyright: ignore[reportMissingImports]

    quantization.quantize_(subject.model, getattr(quantization, WEIGHTS[weights])())
    return subject._replace(name=f"{subject.name} {weights}", error=None)


def measure_stream(config: FracConfig, sizes: Sizes) -> Iterator[dict]:
    """Rows of a FracStream around a model with random weights in bfloat16; checked first."""
    device, backend, _ = machine()
    error = check(device, backend, torch.bfloat16)
    subject = our_subject(build(config, torch.bfloat16, device), error)
    with tempfile.TemporaryDirectory() as folder:
        yield from stream_rows(subject, sizes, Path(folder))


def _measure(
    name: str,
    make: Callable[[], Subject],
    parts: Iterable[str],
    sizes: Sizes,
    failures: list[str],
) -> Iterator[list[dict]]:
    """Rows of one model, which only this function holds."""
    for subject in attempt(name, make, failures):
        print(f"{name}: {count(subject.model)} parameters")
        for part in parts:
            yield PARTS[part](subject, sizes, failures)
