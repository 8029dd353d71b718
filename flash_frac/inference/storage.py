"""States as files: safetensors with a checksum and the fingerprint of their model.

The fingerprint has the settings that change what a model computes, the names, shapes and dtypes of
its tensors, and a hash over 256 elements of each. Training changes almost all elements, so that
another model is recognised; an edit of a few elements by hand may not be.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from flash_frac.files import drafted
from flash_frac.inference.state import StreamMark, empty_cache, mixers, states_of
from flash_frac.inference.text import TextTail
from flash_frac.layers import FracMixer
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.mixers import MLP_EXPAND


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name, version: as they stand in the file.
        content: what it holds.
        writer: which function writes it.
    """

    name: str
    version: str
    content: str
    writer: str


STREAM = Format("flash_frac.stream", "1", "stream", "FracStream.save")
SAMPLES = 256
# A prime, whose multiples modulo the size of a tensor are spread over all rows and columns.
STRIDE = 2654435761

_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "frac_num_modes", "frac_conv_kernel", "frac_gate_bias_init"),
    *("rms_norm_eps", "tie_word_embeddings"),
)
# Of models with attention only, so that files of others stay what they were.
_ATTENTION_FIELDS = (
    *("attention_layers", "attention_head_dim", "attention_key_value_heads"),
    *("attention_intermediate_size", "attention_rope_parameters"),
)
# Where they are not what they were before these fields were there.
_LATER_FIELDS = (
    *("mlp_intermediate_size", "attention_positions", "attention_temperature_length"),
    *("attention_temperature_slope", "sliding_window", "delta_num_heads", "delta_head_dim"),
    *("delta_expand_v", "delta_conv_kernel"),
)
# For each model, at which addresses and versions its tensors were when they were hashed.
_HASHES: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]], dict[str, str]]] = (
    WeakKeyDictionary()
)


@torch.no_grad()
def fingerprint(model: FracForCausalLM) -> dict[str, str]:
    """What tells a model from others: "settings" as JSON, and hashes "structure" and "weights".

    The hashes are kept until a tensor of the model is written or replaced.

    Example: `fingerprint(model)["weights"]`
    """
    # One walk over the modules: named_parameters and named_buffers would take ten times as long.
    owned = [x for y in model.modules() for x in (*y._parameters.values(), *y._buffers.values())]
    owned = [x for x in owned if x is not None]
    # Tensors made in inference mode do not count how often they were written.
    counted = not any(x.is_inference() for x in owned)
    versions = [(x.data_ptr(), x._version) for x in owned] if counted else []
    known, hashes = _HASHES.get(model, ([], {}))
    if not counted or known != versions:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        shapes = [[name, list(x.shape), str(x.dtype)] for name, x in tensors.items()]
        weights = hashlib.sha256()
        for x in tensors.values():
            weights.update(_bytes(_sample(x)))
        structure = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
        hashes = {"structure": structure, "weights": weights.hexdigest()}
        _HASHES[model] = (versions, hashes)
    settings = {name: getattr(model.config, name) for name in _FIELDS}
    if model.config.attention_layers:
        settings |= {name: getattr(model.config, name) for name in _ATTENTION_FIELDS}
    settings |= _later_settings(model.config)
    settings["dtype"] = str(model.lm_head.weight.dtype)
    controls = (mixer.settings for mixer in mixers(model) if isinstance(mixer, FracMixer))
    for number, control in enumerate(dict.fromkeys(controls)):
        named = asdict(control).items()
        settings |= {f"{key}.{number}" if number else key: value for key, value in named}
    return {"settings": json.dumps(settings), **hashes}


def _later_settings(config: FracConfig) -> dict[str, Any]:
    found = {name: getattr(config, name) for name in _LATER_FIELDS}
    found = {name: value for name, value in found.items() if value != getattr(FracConfig, name)}
    # attention_layers tells the others apart.
    if {"delta", "sliding_attention"} & set(config.mixer_types or ()):
        found["mixer_types"] = config.mixer_types
    return found


def _sample(x: Tensor) -> Tensor:
    """SAMPLES elements of a tensor, or all if there are no more."""
    positions = torch.arange(min(SAMPLES, x.numel()), device=x.device)
    if x.numel() > SAMPLES:
        positions = positions * STRIDE % x.numel()
    return torch.take(x, positions)


def fixed_tensors(cache: BufferedCache) -> dict[str, Tensor]:
    """States, windows and rings of a cache, by names that begin with the number of the layer."""
    tensors = {}
    for index, state in zip(cache.state_layers, states_of(cache), strict=True):
        tensors |= {f"{index}.recurrent": state.recurrent, f"{index}.conv": state.conv}
    return tensors | _by_name(cache.rings)


def growing_tensors(cache: BufferedCache) -> dict[str, Tensor]:
    """Keys and values of the layers that see all tokens, by names as in `fixed_tensors`."""
    return _by_name(cache.full.layers)


def _by_name(layers: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    named = ({f"{n}.keys": keys, f"{n}.values": values} for n, (keys, values) in layers.items())
    return {name: x for pair in named for name, x in pair.items()}


def _to_tensors(cache: BufferedCache) -> dict[str, Tensor]:
    """Everything that a cache holds."""
    growing = growing_tensors(cache).items()
    return fixed_tensors(cache) | {name: x[:, :, : cache.longest] for name, x in growing}


def _from_tensors(
    model: FracForCausalLM, tensors: dict[str, Tensor], lengths: Sequence[int]
) -> BufferedCache:
    """The cache that `_to_tensors` was given, on the devices of the layers, in other memory."""
    cache = empty_cache(model, len(lengths))
    for index, state in zip(cache.state_layers, states_of(cache), strict=True):
        state.recurrent.copy_(tensors[f"{index}.recurrent"])
        state.conv.copy_(tensors[f"{index}.conv"])
    cache.reserve(max(lengths))
    cache.took(lengths)
    cache.lengths.copy_(torch.tensor(lengths))
    for index, buffers in {**cache.rings, **cache.full.layers}.items():
        for buffer, name in zip(buffers, ("keys", "values"), strict=True):
            # Absent in older files of streams without tokens.
            if (x := tensors.get(f"{index}.{name}")) is not None:
                x = _without_padding(x, tensors.get("real"))
                buffer[:, :, : x.shape[2]] = x.to(buffer.device)
    return cache


def _without_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Keys or values of older files, which had padding, False in real (B, T), between them."""
    if real is None:
        return x
    order = real.long().argsort(dim=1, descending=True, stable=True)
    return x.take_along_dim(order[:, None, :, None], 2)[:, :, : int(real.sum(1).max())]


def write_mark(path: Path, mark: StreamMark, model: FracForCausalLM) -> None:
    """Write a moment of a stream to a file that is there whole or not at all."""
    tensors = {"seen": mark.seen} | ({} if mark.logits is None else {"logits": mark.logits})
    tensors |= _to_tensors(mark.cache)
    tails = json.dumps([[tail.ids, tail.shown, tail.waiting] for tail in mark.tails])
    facts = fingerprint(model) | {"lengths": json.dumps(mark.lengths), "tails": tails}
    write_file(path, STREAM, facts, tensors)


def read_mark(path: Path, model: FracForCausalLM, *, text: bool) -> StreamMark:
    """What `write_mark` has written, on the devices of the model, which must be the same.

    Args:
        text: whether the stream shows text.
    """
    facts, tensors = read_file(path, STREAM)
    if difference := difference_of(facts, fingerprint(model)):
        raise ValueError(
            f"{path} was written with another model: {difference}. A state means nothing to "
            "another model; load the one that wrote it, or feed the text again"
        )
    device, logits = model.lm_head.weight.device, tensors.get("logits")
    lengths, tails = tuple(json.loads(facts["lengths"])), ()
    if text:
        # It may have been saved without a tokenizer.
        kept = json.loads(facts["tails"]) or [[[], 0, 0]] * len(lengths)
        tails = tuple(TextTail(tuple(ids), *rest) for ids, *rest in kept)
    # Copies, because on a CPU these would be the file itself, mapped into memory.
    logits = None if logits is None else logits.to(device, copy=True)
    seen = tensors["seen"].to(device, copy=True)
    return StreamMark(_from_tensors(model, tensors, lengths), logits, seen, lengths, tails)


def write_file(
    path: Path,
    form: Format,
    facts: dict[str, str],
    tensors: dict[str, Tensor],
    *,
    sync: bool = True,
) -> None:
    """Write a file that is there whole or not at all.

    Args:
        sync: wait until it is on the disk. Else a power cut may damage it, which a reader notices.
    """
    facts = {"format": form.name, "version": form.version, **facts}
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    size = sum(x.nbytes for x in tensors.values()) + len(json.dumps(facts))
    with drafted(path, size, durable=sync) as draft:
        save_file(tensors, draft, {**facts, "checksum": _checksum(facts, tensors)})


def read_file(path: Path, form: Format) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What `write_file` has written; ValueError if it is something else, or damaged."""
    facts, tensors = read_part(path, form)
    if facts.pop("checksum", None) != _checksum(facts, tensors):
        raise ValueError(f"{path} is damaged: its content does not match its checksum")
    return facts, tensors


def read_part(
    path: Path, form: Format, names: Sequence[str] | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """`read_file` without its checksum, for a look at some tensors of a large file."""
    try:
        with safe_open(path, "pt") as file:
            facts = dict(file.metadata() or {})
            # keys() is a method of a file, which is no dict.
            held = list(file.keys())
            wanted = held if names is None else [name for name in names if name in held]
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no whole safetensors file, as {form.writer} writes it: it is cut short, "
            f"damaged or of another kind. The reader said: {error}"
        ) from error
    if facts.get("format") != form.name:
        raise ValueError(
            f"{path} holds no {form.content}, but other tensors ({', '.join(held[:3])}); "
            f"expected a file that {form.writer} has written"
        )
    if facts.get("version") != form.version:
        raise ValueError(
            f"{path} has version {facts.get('version')} of the format, but this flash-frac reads "
            f"version {form.version}; read it with the flash-frac that wrote it"
        )
    return facts, tensors


def difference_of(there: dict[str, str], here: dict[str, str]) -> str | None:
    """What differs between two models, by their fingerprints; None if they are the same."""
    mine, theirs = (_settings(x) for x in (here, there))
    if mine != theirs:
        names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
        parts = (
            (x, *(y.get(x, getattr(FracConfig, x, None)) for y in (theirs, mine))) for x in names
        )
        return "; ".join(f"{name} is {old} there and {new} here" for name, old, new in parts)
    if here["structure"] != there["structure"]:
        return "its tensors have other names, shapes or dtypes"
    if here["weights"] != there["weights"]:
        return "it has the same shape and other weights"
    return None


def _settings(facts: dict[str, str]) -> dict[str, Any]:
    """The settings of a fingerprint, with what older ones left out."""
    settings = json.loads(facts["settings"])
    if settings.get("attention_layers") and settings["attention_intermediate_size"] is None:
        settings["attention_intermediate_size"] = MLP_EXPAND * settings["hidden_size"]
    return settings


def _checksum(facts: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """CRC-32 of everything in a file. It finds accidents; nothing here is secret or signed."""
    shapes = [[name, str(tensors[name].dtype), *tensors[name].shape] for name in sorted(tensors)]
    total = zlib.crc32(json.dumps([facts, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(_bytes(tensors[name]), total)
    return f"{total:08x}"


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.cpu().flatten().view(torch.uint8).numpy())  # pyright: ignore
