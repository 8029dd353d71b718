"""Models one after another: the kernels checked, each made on the device, measured, and gone.

Letters: B batch, T time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_frac.bench.parts import (
    Sizes,
    Subject,
    count,
    decode_rows,
    our_subject,
    prefill_rows,
    set_backend,
    train_rows,
)
from flash_frac.bench.peers import ModelPeer, build
from flash_frac.bench.timing import OURS, attempt
from flash_frac.models import FracConfig
from flash_frac.ops.testing import relative_error

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
