"""Measure models in sequence: check the kernels, then build each on the device, measure, free it.

Letters: B batch, T time.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from flash_frac.bench.growth import growth_rows
from flash_frac.bench.parts import (
    SMALL,
    Sizes,
    decode_rows,
    forward_rows,
    prefill_rows,
    small_rows,
    stream_rows,
    train_rows,
)
from flash_frac.bench.peers import MODEL_PEERS, ModelPeer, available
from flash_frac.bench.subjects import Subject, build, count, our_subject, set_backend
from flash_frac.bench.timing import OURS, attempt
from flash_frac.extras import require
from flash_frac.layers.plain import stored
from flash_frac.models import FracConfig
from flash_frac.models.quantizing import quantization_config
from flash_frac.ops.testing import relative_error

Part = Callable[[Subject, Sizes, list[str]], list[dict]]
PARTS: dict[str, Part] = {
    "prefill": prefill_rows,
    "forward": forward_rows,
    "decode": decode_rows,
    "train": train_rows,
    "growth": growth_rows,
}


# Decoded tokens per prompt that are checked, and their batches, which divide the number of prompts:
# one vector, a few, and more than the decoding kernels of linear layers take.
CHECKED_STEPS, CHECKED_BATCHES = 4, (1, 3, 6)


def check(device: str, backend: str, dtype: torch.dtype) -> float:
    """Worst error of a small model in training and inference; exits if it is too large.

    Errors are those of logits, gradients, `Generator`'s logits and a prefill's against float64; the
    limit is twice that of torch in the same dtype.
    """
    model, ids = _small(device, dtype), _small_ids(device)

    def outputs(model: Any, backend: str) -> list[Tensor]:
        output = set_backend(model, backend)(ids, labels=ids, use_cache=False)
        weight = model.get_input_embeddings().weight
        return [output.logits.detach(), *torch.autograd.grad(output.loss, [weight])]

    exact = outputs(copy.deepcopy(model).double(), "torch")
    pairs = zip(outputs(model, backend), outputs(model, "torch"), exact, strict=True)
    named = zip(("logits", "gradients"), pairs, strict=True)
    try:
        worst = max(_error(name, backend, dtype, *three) for name, three in named)
        return max(worst, check_inference(device, backend, dtype))
    except ValueError as error:
        raise SystemExit(str(error)) from None


@torch.no_grad()
def check_inference(
    device: str, backend: str, dtype: torch.dtype, kind: str | None = None
) -> float:
    """Worst error of a small model's prefill and decoded logits; ValueError if it is too large.

    Decoded are tokens that `Generator` chose, on a GPU by replaying its graphs.

    Args:
        kind: quantise the weights, "int8" or "fp8"; the others have the same weights dequantised.
    """
    model, ids = _small(device, dtype), _small_ids(device)
    if kind is not None:
        quantise(model, kind)
    usual, exact = (
        set_backend(_dequantised(model, wide), "torch") for wide in (dtype, torch.float64)
    )
    name = "prefill" if kind is None else f"prefill with {kind}"
    set_backend(model, backend)
    worst = 0.0
    for batch in CHECKED_BATCHES if device == "cuda" else CHECKED_BATCHES[:1]:
        tokens, logits = decoded(model, ids, batch)
        cut = slice(-1 - CHECKED_STEPS, -1)
        three = (logits, usual(tokens).logits[:, cut], exact(tokens).logits[:, cut])
        decoding = f"{name.replace('prefill', 'decoding')} at batch {batch}"
        worst = max(worst, _error(decoding, backend, dtype, *three))
    read = model(ids, use_cache=True).logits
    return max(worst, _error(name, backend, dtype, read, usual(ids).logits, exact(ids).logits))


def decoded(model: Any, ids: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Prompts (B, T) with CHECKED_STEPS tokens by `Generator`, and the logits of those, (B, S, V).

    Prompts are decoded `batch` at a time.
    """
    from flash_frac.inference import Generator

    # Not late: otherwise a token comes when the logits are those of the next.
    generator, texts, logits = Generator(model, late=False), [], []
    for prompts in ids.split(batch):
        text, found = prompts, []
        for token in generator.stream(prompts, max_new_tokens=CHECKED_STEPS):
            assert generator._slots is not None
            text = torch.cat([text, token[:, None]], 1)
            found.append(generator._slots.logits.clone())
        texts.append(text)
        logits.append(torch.stack(found, 1))
    return torch.cat(texts), torch.cat(logits)


def _small(device: str, dtype: torch.dtype) -> Any:
    """A small model; weights of scale 0.1 instead of 0.02 make controls vary between tokens."""
    torch.manual_seed(0)
    return build(FracConfig(**SMALL, num_hidden_layers=4, initializer_range=0.1), dtype, device)


def _small_ids(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (6, 300) if device == "cuda" else (2, 40)
    return torch.randint(3, SMALL["vocab_size"], size, generator=generator).to(device)


def _dequantised(model: Any, dtype: torch.dtype) -> Any:
    """A copy in another dtype, with plain weights instead of quantised ones."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        weight = stored(layer.weight) if type(layer) is nn.Linear else None
        if weight is not None and weight.scale is not None:
            values = weight.values.double() * weight.scale.double()[:, None]
            layer.weight = nn.Parameter(values, requires_grad=False)
    return plain.to(dtype)


def _error(
    name: str, backend: str, dtype: torch.dtype, value: Tensor, usual: Tensor, exact: Tensor
) -> float:
    """Error against float64; ValueError if above twice the usual one."""
    error, allowed = relative_error(value, exact), relative_error(usual, exact)
    shown = str(dtype).removeprefix("torch.")
    print(f"a small model in {shown}: {name} off by {error:.1e}, on torch by {allowed:.1e}")
    # Not "if above", because comparisons with NaN are false.
    if not error <= 2 * (allowed + torch.finfo(dtype).eps / 4):
        raise ValueError(f"{name} on {backend} are wrong by {error:.1e}: not timed")
    return error


def machine() -> tuple[str, str, torch.dtype]:
    """Device, backend and dtype for measurements on this machine."""
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
    modes: Iterable[int] = (),
    quantize: Sequence[str] = (),
    table: Mapping[str, Part] = MappingProxyType(PARTS),
) -> Iterator[list[dict]]:
    """Rows of a model with random weights and of its peers, part by part; ours is checked first.

    Each model is freed before the next is built, because two might not fit.

    Args:
        config: configuration of our model; peers are built in its size.
        parts: names in PARTS, and "small", which uses separate models.
        peers: names in `flash_frac.bench.peers.MODEL_PEERS`.
        sizes: lengths and batches.
        failures: receives the reasons for skipped models or ways to run them.
        modes: also measure our model with these numbers of modes, except in growth.
        quantize: "int8", "fp8" or both: also measure our model so quantised, except in training and
            growth, if its inference is right.
        table: what a part does, PARTS or `flash_frac.bench.profiling.PROFILED`.
    """
    device, backend, dtype = machine()
    error = check(device, backend, dtype)
    if "small" in parts:
        yield small_rows(device, dtype, sizes, error, failures)
    chosen = [part for part in table if part in parts]
    others = available(MODEL_PEERS, peers, config, failures) if chosen else []

    def ours(modes: int | None = None, kind: str | None = None) -> Subject:
        changed = config if modes is None else with_modes(config, modes)
        subject = our_subject(build(changed, dtype, device), error)
        if modes is not None:
            subject = subject._replace(name=f"{OURS} M {modes}")
        if kind is not None:
            error_of_kind = check_inference(device, backend, dtype, kind)
            quantise(subject.model, kind)
            subject = subject._replace(name=f"{OURS} {kind}", error=error_of_kind)
        return subject

    def theirs(peer: ModelPeer) -> Subject:
        model = build(peer.config, dtype, device)
        fixed = None if peer.make_cache is None else partial(peer.make_cache, peer.config)
        about = {"prefill_options": peer.prefill_options, "make_cache": fixed}
        return Subject(peer.name, model, peer.note, peer.shape, **about)

    makers: dict[str, Callable[[], Subject]] = {OURS: ours}
    makers |= {f"{OURS} M {number}": partial(ours, number) for number in modes}
    makers |= {f"{OURS} {kind}": partial(ours, kind=kind) for kind in quantize}
    makers |= {f"{peer.name} {peer.note}": partial(theirs, peer) for peer in others}
    # Growth is a property of the model, whatever its modes and weights.
    skipped = {f"{OURS} M {number}": ("growth",) for number in modes}
    skipped |= {f"{OURS} {kind}": ("growth", "train") for kind in quantize}
    for name, make in makers.items() if chosen else ():
        own = [part for part in chosen if part not in skipped.get(name, ())]
        yield from _measure(name, make, [table[part] for part in own], sizes, failures)
        gc.collect()
        torch.cuda.empty_cache()


def with_modes(config: FracConfig, modes: int) -> FracConfig:
    """The same model with another number of modes."""
    return FracConfig(**{**config.to_dict(), "frac_num_modes": modes})


def quantise(model: Any, kind: str) -> None:
    """Quantise the weights of a model, except the head."""
    torchao = require("torchao.quantization", "quant", f"quantize {kind}")
    torchao.quantize_(model.model, quantization_config(kind).quant_type)


def measure_stream(config: FracConfig, sizes: Sizes) -> Iterator[dict]:
    """Rows of a FracStream on a model with random weights in bfloat16; it is checked first."""
    device, backend, _ = machine()
    error = check(device, backend, torch.bfloat16)
    subject = our_subject(build(config, torch.bfloat16, device), error)
    with tempfile.TemporaryDirectory() as folder:
        yield from stream_rows(subject, sizes, Path(folder))


def _measure(
    name: str,
    make: Callable[[], Subject],
    parts: Iterable[Part],
    sizes: Sizes,
    failures: list[str],
) -> Iterator[list[dict]]:
    """Rows of one model; only this function holds it, so that it is freed."""
    for subject in attempt(name, make, failures):
        print(f"{name}: {count(subject.model)} parameters")
        for part in parts:
            yield part(subject, sizes, failures)
