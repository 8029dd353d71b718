"""Loading for the commands: a checkpoint is found first, and loaded whole or refused by name.

`from_pretrained` draws random numbers for tensors that a checkpoint lacks and logs a warning. That
suits Python, where the caller reads the log; `load_model` makes it an error, and so it does with
tensors that are left over, have another shape, or hold NaN or inf. Weights of a checkpoint with a
manifest must be those that were written. Python code that comes with a checkpoint never runs unless
the caller says so: transformers would ask on standard input, where the first line of a piped text
counts as an answer.
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from flash_frac.files import read_json
from flash_frac.manifest import MANIFEST, ManifestError, check_manifest

logger = logging.get_logger(__name__)
# How the files of a tokenizer begin, or end; one of them is there if there is a tokenizer.
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "spiece*", "*.model", "*.tiktoken")
_SETTINGS_FILES = ("config.json", "generation_config.json")
# Weights that are verified at each load, in under a second: 501 MB took 0.6 to 0.7 s on a core.
VERIFIED_BYTES = 1 << 29
# Names of tensors in an error, at most.
_NAMED = 5


class Found(NamedTuple):
    """A checkpoint that is there: a folder, or a model of the hub."""

    name: str
    # None for a model of the hub.
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
    """Decide whether a name is a folder or a model of the hub; ValueError if it is neither.

    The rule is that of `from_pretrained`: a folder that exists is read, and any other name must be
    the id of a model on the hub, NAME or OWNER/NAME. The hub is asked once, without retries; where
    it cannot be reached, a copy in the local cache will do.

    Args:
        argument: what the caller calls it, for the error.
        revision: branch, tag or commit of a model of the hub.
        needs_config: whether it must have a config.json, as a model has and a tokenizer may not.
        trust_remote_code: run the Python code that comes with it, if it has any.

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
            "of the hub, whose ids are NAME or OWNER/NAME"
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
            f"{both} the model {name} of the hub asks for a login: run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{both} the hub has no model {name} that you may read") from error
    except EntryNotFoundError as error:
        if not needs_config:
            return found
        raise ValueError(f"{both} the model {name} of the hub has no config.json") from error
    # A network has many errors, of classes that differ between releases of the hub's client.
    except Exception as error:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            raise ValueError(
                f"{both} the hub cannot be reached to look for a model of that name "
                f"({one_line(error)}), which is not in the local cache either"
            ) from error
        logger.warning(f"The hub cannot be reached; {name} is read from the local cache.")
        commit, options["local_files_only"] = Path(cached).parent.name, True
    else:
        commit = file.commit_hash
    # All files come from one commit, whatever is pushed meanwhile.
    options |= {} if commit is None else {"revision": commit}
    return found


def load_model(
    checkpoint: str | Path | Found, *, argument: str = "checkpoint", **options: Any
) -> Any:
    """A causal language model with all its weights; ValueError that names what is wrong with them.

    Args:
        checkpoint: a folder, a model of the hub, or what `find_checkpoint` has returned.
        argument: what the caller calls it, for the error.
        options: of `AutoModelForCausalLM.from_pretrained`.

    Example: `load_model("quickstart/final", dtype="auto")`
    """
    known = isinstance(checkpoint, Found)
    found = checkpoint if known else find_checkpoint(checkpoint, argument=argument)
    if (damage := damaged_weights(found.folder)) is not None:
        raise ValueError(f"{argument} {found.name} is refused: {damage}")
    model, problems = read_model(found, argument=argument, **options)
    if problems:
        raise ValueError(f"{argument} {found.name} is refused: {'; '.join(problems)}")
    _warn_of_changes(found.folder, _SETTINGS_FILES)
    return model


def read_model(
    found: Found, *, argument: str = "checkpoint", **options: Any
) -> tuple[Any, list[str]]:
    """A model as `from_pretrained` loads it, and what is wrong with its weights, if anything."""
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                found.name,
                output_loading_info=True,
                # They are named by us, with all else.
                ignore_mismatched_sizes=True,
                **found.options,
                **options,
            )
    except UnpicklingError as error:
        raise ValueError(
            f"{argument} {found.name} is refused: its pickled weights (.bin) are damaged, or hold "
            "code, which is not run"
        ) from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        why = damaged_file(_folder_of(found)) or reason_of(error)
        if (change := _changed(found.folder, _SETTINGS_FILES)) is not None:
            why = f"{why}; {change}"
        raise ValueError(f"{argument} {found.name} cannot be loaded: {why}") from error
    model, report = loaded
    return model, weight_problems(model, report)


def weight_problems(model: torch.nn.Module, report: dict[str, Any]) -> list[str]:
    """Phrases on the weights of a model that has just been loaded, none if all is well.

    Args:
        report: what from_pretrained gives with output_loading_info=True.
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
    for name, x in model.state_dict().items():
        # Weights that were offloaded are not here to be looked at.
        if x.is_meta or not x.is_floating_point() or (x.data_ptr() in seen and x.numel()):
            continue
        seen.add(x.data_ptr())
        # Types of 8 bits have no isfinite.
        x = x.float() if x.itemsize == 1 else x
        if not bool(x.isfinite().all()):
            yield name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def find_tokenizer(found: Found) -> Any:
    """The tokenizer of a checkpoint; ValueError that says what to do if it has none.

    Example: `find_tokenizer(find_checkpoint("quickstart/final")).decode([7])`
    """
    advice = "pass --tokenizer, or save one beside it"
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


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES)


def damaged_weights(folder: Path | None) -> str | None:
    """A sentence on weights that are not those of the folder's manifest, None if they are.

    The checksums of at most VERIFIED_BYTES are compared, and beyond that the sizes: `frac doctor`
    compares all. Settings are not: people edit them.
    """
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    try:
        check_manifest(folder, "model*.safetensors", most_bytes=VERIFIED_BYTES)
    except ManifestError as error:
        return f"{error}; copy it again, or delete {MANIFEST} there if you have changed it yourself"
    return None


def _changed(folder: Path | None, patterns: Sequence[str]) -> str | None:
    """A sentence on the first file that is not as the folder's manifest has it, None if all are."""
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    try:
        for pattern in patterns:
            check_manifest(folder, pattern)
    except ManifestError as error:
        return str(error)
    return None


def _warn_of_changes(folder: Path | None, patterns: Sequence[str]) -> None:
    """People edit settings, so that they are taken as they are; damage would look the same."""
    if (change := _changed(folder, patterns)) is not None:
        logger.warning(f"{change}; if you have changed it yourself, delete {MANIFEST} there")


def _broken_json(folder: Path | None) -> str | None:
    """The same for a tokenizer's files that are not JSON, where there is no manifest."""
    for path in sorted(folder.glob("*token*.json")) if folder is not None else ():
        try:
            read_json(path)
        except (ValueError, OSError) as error:
            return one_line(error)
    return None


def damaged_file(folder: Path | None) -> str | None:
    """A sentence on the first safetensors file of a folder that cannot be read, None if all can."""
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            return f"{path} is cut short, damaged or no safetensors file ({one_line(error)})"
    return None


def _folder_of(found: Found) -> Path | None:
    """The files of a checkpoint on this machine, those of the hub's cache included."""
    if found.folder is not None:
        return found.folder
    path = try_to_load_from_cache(found.name, "config.json", revision=found.options.get("revision"))
    return Path(path).parent if isinstance(path, str) else None


def reason_of(error: Exception) -> str:
    """Why transformers cannot load something, in one line."""
    if "trust_remote_code" not in str(error):
        return one_line(error)
    return (
        "it needs Python code of its own, which is not run unless you trust it: read that code, "
        "then pass --trust-remote-code to frac eval or frac serve --sequential; the other commands "
        "run flash-frac's models only"
    )


def one_line(error: object) -> str:
    """A message without line breaks."""
    return " ".join(str(error).split())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' table of missing weights: our error has their names."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
