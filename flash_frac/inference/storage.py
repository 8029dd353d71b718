"""State files: safetensors with a checksum and the fingerprint of their model.

The fingerprint contains the settings that affect a model's output, the names, shapes and dtypes of
its tensors, and a hash over 256 elements of each tensor. Training changes almost all elements, so
another model is detected; a manual edit of a few elements may not be.
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
from flash_frac.layers.plain import parts_of
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.mixers import MLP_EXPAND


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name, version: as written in the file.
        content: description of the content, for messages.
        writer: the function that writes it, for messages.
    """

    name: str
    version: str
    content: str
    writer: str


STREAM = Format("flash_frac.stream", "1", "stream", "FracStream.save")
SAMPLES = 256
# A prime: its multiples modulo the size of a tensor spread over all rows and columns.
STRIDE = 2654435761

_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "frac_num_modes", "frac_conv_kernel", "frac_gate_bias_init"),
    *("rms_norm_eps", "tie_word_embeddings"),
)
# Only for models with attention, so that files of other models do not change.
_ATTENTION_FIELDS = (
    *("attention_layers", "attention_head_dim", "attention_key_value_heads"),
    *("attention_intermediate_size", "attention_rope_parameters"),
)
# Included only if they differ from the behaviour before these fields existed.
_LATER_FIELDS = (
    *("mlp_intermediate_size", "attention_positions", "attention_temperature_length"),
    *("attention_temperature_slope", "sliding_window", "delta_num_heads", "delta_head_dim"),
    *("delta_expand_v", "delta_conv_kernel"),
)
# For each model, the addresses and versions of its tensors when they were hashed.
_HASHES: WeakKeyDictionary[nn.Module, tuple[list[tuple[int, int]], dict[str, str]]] = (
    WeakKeyDictionary()
)


@torch.no_grad()
def fingerprint(model: FracForCausalLM) -> dict[str, str]:
    """Identify a model: "settings" as JSON, and the hashes "structure" and "weights".

    The hashes are cached until a tensor of the model is written or replaced.

    Example: `fingerprint(model)["weights"]`
    """
    # One walk over the modules: named_parameters and named_buffers would take ten times as long.
    owned = [x for y in model.modules() for x in (*y._parameters.values(), *y._buffers.values())]
    owned = [part for x in owned if x is not None for part in parts_of(x)]
    # Tensors created in inference mode have no version counter.
    counted = not any(x.is_inference() for x in owned)
    versions = [(x.data_ptr(), x._version) for x in owned] if counted else []
    known, hashes = _HASHES.get(model, ([], {}))
    if not counted or known != versions:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        parts = [(name, part) for name, x in tensors.items() for part in parts_of(x)]
        shapes = [[name, list(x.shape), str(x.dtype)] for name, x in parts]
        weights = hashlib.sha256()
        for _, x in parts:
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
    # For the others, attention_layers is enough.
    if {"delta", "sliding_attention"} & set(config.mixer_types or ()):
        found["mixer_types"] = config.mixer_types
    return found


def _sample(x: Tensor) -> Tensor:
    """SAMPLES elements of a tensor, or all if it has fewer."""
    # torch cannot index 8-bit floats.
    x = x.view(torch.uint8) if x.itemsize == 1 else x
    positions = torch.arange(min(SAMPLES, x.numel()), device=x.device)
    if x.numel() > SAMPLES:
        positions = positions * STRIDE % x.numel()
    return torch.take(x, positions)


def fixed_tensors(cache: BufferedCache) -> dict[str, Tensor]:
    """States, windows and ring buffers of a cache, by names that start with the layer number."""
    tensors = {}
    for index, state in zip(cache.state_layers, states_of(cache), strict=True):
        tensors |= {f"{index}.recurrent": state.recurrent, f"{index}.conv": state.conv}
    return tensors | _by_name(cache.rings)


def growing_tensors(cache: BufferedCache) -> dict[str, Tensor]:
    """Keys and values of full-attention layers, by names as in `fixed_tensors`."""
    return _by_name(cache.full.layers)


def _by_name(layers: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    named = ({f"{n}.keys": keys, f"{n}.values": values} for n, (keys, values) in layers.items())
    return {name: x for pair in named for name, x in pair.items()}


def _to_tensors(cache: BufferedCache) -> dict[str, Tensor]:
    """All tensors of a cache, by name."""
    growing = growing_tensors(cache).items()
    return fixed_tensors(cache) | {name: x[:, :, : cache.longest] for name, x in growing}


def _from_tensors(
    model: FracForCausalLM, tensors: dict[str, Tensor], lengths: Sequence[int]
) -> BufferedCache:
    """Rebuild a cache from `_to_tensors`, in new memory on the devices of the layers."""
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
    """Drop padding, where real (B, T) is False, from keys or values of older files."""
    if real is None:
        return x
    order = real.long().argsort(dim=1, descending=True, stable=True)
    return x.take_along_dim(order[:, None, :, None], 2)[:, :, : int(real.sum(1).max())]


def write_mark(path: Path, mark: StreamMark, model: FracForCausalLM) -> None:
    """Write a snapshot of a stream to a file, atomically."""
    tensors = {"seen": mark.seen} | ({} if mark.logits is None else {"logits": mark.logits})
    tensors |= _to_tensors(mark.cache)
    tails = json.dumps([[tail.ids, tail.shown, tail.waiting] for tail in mark.tails])
    facts = fingerprint(model) | {"lengths": json.dumps(mark.lengths), "tails": tails}
    write_file(path, STREAM, facts, tensors)


def read_mark(path: Path, model: FracForCausalLM, *, text: bool) -> StreamMark:
    """Read a file of `write_mark` onto the devices of the model, which must be the same model.

    Args:
        text: whether the stream shows text.
    """
    facts, tensors = read_file(path, STREAM)
    if difference := difference_of(facts, fingerprint(model)):
        raise ValueError(
            f"{path} was written with another model: {difference}. A state only works with its "
            "own model; load the one that wrote it, or feed the text again"
        )
    device, logits = model.lm_head.weight.device, tensors.get("logits")
    lengths, tails = tuple(json.loads(facts["lengths"])), ()
    if text:
        # It may have been saved without a tokenizer.
        kept = json.loads(facts["tails"]) or [[[], 0, 0]] * len(lengths)
        tails = tuple(TextTail(tuple(ids), *rest) for ids, *rest in kept)
    # Copy, because on a CPU these tensors are the memory-mapped file itself.
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
    """Write a file atomically.

    Args:
        sync: wait until it is on disk. Otherwise a power cut may damage it; readers detect that.
    """
    facts = {"format": form.name, "version": form.version, **facts}
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    size = sum(x.nbytes for x in tensors.values()) + len(json.dumps(facts))
    with drafted(path, size, durable=sync) as draft:
        save_file(tensors, draft, {**facts, "checksum": _checksum(facts, tensors)})


def read_file(path: Path, form: Format) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a file of `write_file`; raise a ValueError if it is damaged or of another kind."""
    facts, tensors = read_part(path, form)
    if facts.pop("checksum", None) != _checksum(facts, tensors):
        raise ValueError(f"{path} is damaged: its content does not match its checksum")
    return facts, tensors


def read_part(
    path: Path, form: Format, names: Sequence[str] | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Like `read_file`, without the checksum, to read some tensors of a large file."""
    try:
        with safe_open(path, "pt") as file:
            facts = dict(file.metadata() or {})
            # keys() is a method of the file object, which is not a dict.
            held = list(file.keys())
            wanted = held if names is None else [name for name in names if name in held]
            tensors = {name: file.get_tensor(name) for name in wanted}
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file of {form.writer}: it is cut short, "
            f"damaged or of another kind. The reader reports: {error}"
        ) from error
    if facts.get("format") != form.name:
        raise ValueError(
            f"{path} does not hold a {form.content}, but other tensors ({', '.join(held[:3])}); "
            f"expected a file written by {form.writer}"
        )
    if facts.get("version") != form.version:
        raise ValueError(
            f"{path} has format version {facts.get('version')}, but this flash-frac reads "
            f"version {form.version}; read it with the flash-frac that wrote it"
        )
    return facts, tensors


def difference_of(there: dict[str, str], here: dict[str, str]) -> str | None:
    """How two models differ, by their fingerprints; None if they are the same."""
    mine, theirs = (_settings(x) for x in (here, there))
    if mine != theirs:
        names = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
        parts = ((x, *(y.get(x, _default(x)) for y in (theirs, mine))) for x in names)
        return "; ".join(f"{name} is {old} there and {new} here" for name, old, new in parts)
    if here["structure"] != there["structure"]:
        return "its tensors have other names, shapes or dtypes"
    if here["weights"] != there["weights"]:
        return "it has the same shape but other weights"
    return None


def _default(name: str) -> Any:
    """What a field is that a file does not have; None for one that follows from others."""
    found = getattr(FracConfig, name, None)
    return None if isinstance(found, property) else found


def _settings(facts: dict[str, str]) -> dict[str, Any]:
    """The settings of a fingerprint, with fields that older files lack filled in."""
    settings = json.loads(facts["settings"])
    if settings.get("attention_layers") and settings["attention_intermediate_size"] is None:
        settings["attention_intermediate_size"] = MLP_EXPAND * settings["hidden_size"]
    return settings


def _checksum(facts: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """CRC-32 of everything in a file. It detects accidental damage, not tampering."""
    shapes = [[name, str(tensors[name].dtype), *tensors[name].shape] for name in sorted(tensors)]
    total = zlib.crc32(json.dumps([facts, shapes], sort_keys=True).encode())
    for name in sorted(tensors):
        total = zlib.crc32(_bytes(tensors[name]), total)
    return f"{total:08x}"


def _bytes(x: Tensor) -> memoryview:
    return memoryview(x.cpu().flatten().view(torch.uint8).numpy())  # pyright: ignore
