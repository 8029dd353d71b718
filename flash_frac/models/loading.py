"""Load checkpoints for the commands: find a checkpoint, then load it completely or raise an error.

`from_pretrained` initialises missing tensors at random and logs a warning. That is fine in Python,
where the caller reads the log. `load_model` raises an error instead, also for tensors that are left
over, have another shape, or contain NaN or inf. Weights of a checkpoint with a manifest must match
it. Python code of a checkpoint never runs unless the caller allows it: transformers would ask on
standard input, where the first line of a piped text would count as the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from flash_frac.files import read_json
from flash_frac.layers.plain import parts_of
from flash_frac.manifest import MANIFEST, ManifestError, check_manifest
from flash_frac.models.quantizing import quantization_config

logger = logging.get_logger(__name__)
# Starts or ends of tokenizer file names; a tokenizer has at least one of these files.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "spiece*", "*.model", "*.tiktoken")
_SETTINGS_FILES = ("config.json", "generation_config.json")
# Bytes of weights verified at each load, in under a second: 501 MB took 0.6 to 0.7 s on a core.
VERIFIED_BYTES = 1 << 29
# Maximum number of tensor names in an error.
_NAMED = 5


class Found(NamedTuple):
    """An existing checkpoint: a folder, or a model on the hub."""

    name: str
    # None for a model on the hub.
    folder: Path | None
    # Arguments of from_pretrained.
    options: dict[str, Any]


def find_checkpoint(
    name: str | Path,
    *,
    argument: str = "checkpoint",
    revision: str | None = None,
    needs_config: bool = True,
    trust_remote_code: bool = False,
) -> Found:
    """Decide whether a name is a folder or a model on the hub; ValueError if it is neither.

    The rule is that of `from_pretrained`: an existing folder is read, and any other name must be
    the id of a model on the hub, NAME or OWNER/NAME. The hub is asked once, without retries; if it
    cannot be reached, a copy in the local cache is used.

    Args:
        argument: the caller's name for it, for errors.
        revision: branch, tag or commit of a model on the hub.
        needs_config: whether config.json is required, as for a model; a tokenizer may have none.
        trust_remote_code: run the checkpoint's own Python code, if it has any.

    Example: `find_checkpoint("quickstart/final").folder`
    """
    name = str(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file() or not needs_config:
            return Found(str(folder), folder, options)
        hint = f"; did you mean {folder / 'final'}?" if (folder / "final").is_dir() else ""
        raise ValueError(f"{argument} {name} cannot be loaded: it has no config.json{hint}")
    if folder.exists():
        raise ValueError(f"{argument} {name} is a file; name the folder that holds config.json")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(
            f"{argument} {name} was not found: there is no such folder, and it cannot be a model "
            "on the hub, where ids are NAME or OWNER/NAME"
        ) from None
    options |= {} if revision is None else {"revision": revision}
    return _find_on_hub(Found(name, None, options), argument, needs_config)


def _find_on_hub(found: Found, argument: str, needs_config: bool) -> Found:
    name, _, options = found
    revision = options.get("revision")
    both = f"{argument} {name} was not found: there is no such folder, and"
    try:
        file = get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except GatedRepoError as error:
        raise ValueError(
            f"{both} the model {name} on the hub requires a login: run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{both} the hub has no model {name} that you may read") from error
    except EntryNotFoundError as error:
        if not needs_config:
            return found
        raise ValueError(f"{both} the model {name} on the hub has no config.json") from error
    # Network errors have many classes, which differ between releases of the hub's client.
    except Exception as error:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise ValueError(
                f"{both} the hub cannot be reached to look for a model of that name "
                f"({one_line(error)}), nor is it in the local cache"
            ) from error
        logger.warning(f"The hub cannot be reached; {name} is read from the local cache.")
        commit, options["local_files_only"] = Path(cached).parent.name, True
    else:
        commit = file.commit_hash
    # Read all files from one commit, even if someone pushes meanwhile.
    options |= {} if commit is None else {"revision": commit}
    return found


def load_model(
    checkpoint: str | Path | Found,
    *,
    argument: str = "checkpoint",
    quantize: str | None = None,
    **options: Any,
) -> Any:
    """Load a causal language model with all its weights; a ValueError says what is wrong with them.

    Args:
        checkpoint: a folder, a model on the hub, or the result of `find_checkpoint`.
        argument: the caller's name for it, for errors.
        quantize: "int8" or "fp8" for 8-bit weights, as in `quantizing.quantization_config`.
        options: options of `AutoModelForCausalLM.from_pretrained`.

    Example: `load_model("quickstart/final", dtype="auto")`
    """
    known = isinstance(checkpoint, Found)
    found = checkpoint if known else find_checkpoint(checkpoint, argument=argument)
    if (damage := damaged_weights(found.folder)) is not None:
        raise ValueError(f"{argument} {found.name} is refused: {damage}")
    if quantize is not None:
        options["quantization_config"] = _quantization(found, quantize, argument)
    model, problems = read_model(found, argument=argument, **options)
    if problems:
        raise ValueError(f"{argument} {found.name} is refused: {'; '.join(problems)}")
    _warn_of_changes(found.folder, _SETTINGS_FILES)
    return model


def _quantization(found: Found, quantize: str, argument: str) -> Any:
    # transformers would leave the weights of such a checkpoint as they are.
    settings, _ = PreTrainedConfig.get_config_dict(found.name, **found.options)
    if "quantization_config" in settings:
        raise ValueError(
            f"{argument} {found.name} already has quantised weights; omit quantize {quantize}"
        )
    return quantization_config(quantize)


def read_model(
    found: Found, *, argument: str = "checkpoint", **options: Any
) -> tuple[Any, list[str]]:
    """Load a model with `from_pretrained`; return it with the problems of its weights, if any."""
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                found.name,
                output_loading_info=True,
                # We report these ourselves, with all other problems.
                ignore_mismatched_sizes=True,
                **found.options,
                **options,
            )
    except UnpicklingError as error:
        raise ValueError(
            f"{argument} {found.name} is refused: its pickled weights (.bin) are damaged, or "
            "contain code, which is not run"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        why = damaged_file(_folder_of(found)) or reason_of(error)
        if (change := _changed(found.folder, _SETTINGS_FILES)) is not None:
            why = f"{why}; {change}"
        raise ValueError(f"{argument} {found.name} cannot be loaded: {why}") from error
    model, report = loaded
    return model, weight_problems(model, report)


def weight_problems(model: torch.nn.Module, report: dict[str, Any]) -> list[str]:
    """Problems of the weights of a model that was just loaded.

    Args:
        report: from from_pretrained with output_loading_info=True.
    """
    shapes = (
        f"{name} ({tuple(there)} in the file, {tuple(wanted)} in the model)"
        for name, there, wanted in report["mismatched_keys"]
    )
    strange = {
        "missing tensors": report["missing_keys"],
        "unexpected tensors": report["unexpected_keys"],
        "tensors of another shape": shapes,
        "tensors with NaN or inf": _not_finite(model),
    }
    found = {what: sorted(names) for what, names in strange.items()}
    problems = [f"{what}: {_some(names)}" for what, names in found.items() if names]
    return problems + [one_line(message) for message in report.get("error_msgs", [])]


def _not_finite(model: torch.nn.Module) -> Iterator[str]:
    seen = set()
    weights = model.state_dict().items()
    for name, x in ((name, part) for name, weight in weights for part in parts_of(weight)):
        # Offloaded weights are not available to check.
        if x.is_meta or not x.is_floating_point() or (x.data_ptr() in seen and x.numel()):
            continue
        seen.add(x.data_ptr())
        # 8-bit dtypes have no isfinite.
        x = x.float() if x.itemsize == 1 else x
        if not bool(x.isfinite().all()):
            yield name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def find_tokenizer(found: Found) -> Any:
    """The tokenizer of a checkpoint; a ValueError says what to do if it has none.

    Example: `find_tokenizer(find_checkpoint("quickstart/final")).decode([7])`
    """
    advice = "pass --tokenizer, or save one next to it"
    if found.folder is not None and not _has_tokenizer(found.folder):
        raise ValueError(f"{found.name} has no tokenizer; {advice}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.name, **found.options)
    # Every kind of tokenizer file fails in its own way, and each needs the same advice.
    except Exception as error:
        why = _changed(found.folder, _TOKENIZER_FILES) or _broken_json(found.folder)
        raise ValueError(
            f"the tokenizer of {found.name} cannot be loaded ({why or reason_of(error)}); {advice}"
        ) from error
    _warn_of_changes(found.folder, _TOKENIZER_FILES)
    return tokenizer


def find_device(name: str) -> str:
    """A device of this machine; auto is a GPU if there is one. A ValueError names those it has.

    Example: `load_model("quickstart/final").to(find_device("auto"))`
    """
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if name == "auto":
        return "cuda" if gpus else "cpu"
    known = ["cpu", *(["cuda"] if gpus else []), *gpus]
    if name not in known:
        raise ValueError(f"device must be auto or one of {', '.join(known)}, got {name!r}")
    return name


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES)


def damaged_weights(folder: Path | None) -> str | None:
    """A message about weights that do not match the folder's manifest, or None.

    Checksums of at most VERIFIED_BYTES are compared, and beyond that only sizes: `frac doctor`
    compares everything. Settings are not compared, because people edit them.
    """
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    try:
        check_manifest(folder, "model*.safetensors", most_bytes=VERIFIED_BYTES)
    except ManifestError as error:
        return f"{error}; copy it again, or delete {MANIFEST} there if you changed it yourself"
    return None


def _changed(folder: Path | None, patterns: Sequence[str]) -> str | None:
    """A message about the first file that does not match the folder's manifest, or None."""
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    try:
        for pattern in patterns:
            check_manifest(folder, pattern)
    except ManifestError as error:
        return str(error)
    return None


def _warn_of_changes(folder: Path | None, patterns: Sequence[str]) -> None:
    """Warn about changed settings but accept them: people edit them, and damage looks the same."""
    if (change := _changed(folder, patterns)) is not None:
        logger.warning(f"{change}; if you changed it yourself, delete {MANIFEST} there")


def _broken_json(folder: Path | None) -> str | None:
    """A message about tokenizer files that are not valid JSON, for folders without a manifest."""
    for path in sorted(folder.glob("*token*.json")) if folder is not None else ():
        try:
            read_json(path)
        except (ValueError, OSError) as error:
            return one_line(error)
    return None


def damaged_file(folder: Path | None) -> str | None:
    """A message about the first safetensors file of a folder that cannot be read, or None."""
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path} is cut short, damaged or not a safetensors file ({one_line(error)})"
    return None


def _folder_of(found: Found) -> Path | None:
    """The local folder of a checkpoint, which may be in the hub's cache."""
    if found.folder is not None:
        return found.folder
    path = try_to_load_from_cache(found.name, "config.json", revision=found.options.get("revision"))
    return Path(path).parent if isinstance(path, str) else None


def reason_of(error: Exception) -> str:
    """Why transformers cannot load something, in one line."""
    if "trust_remote_code" not in str(error):
        return one_line(error)
    return (
        "it needs its own Python code, which is not run unless you trust it: read that code, "
        "then pass --trust-remote-code to frac eval or frac serve --sequential; the other commands "
        "only run flash-frac's models"
    )


def one_line(error: object) -> str:
    """A message without line breaks."""
    return " ".join(str(error).split())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' table of missing weights, because our error names them."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
