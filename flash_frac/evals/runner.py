"""Run suites on a checkpoint, and save each result at once, so that a run can be resumed.

    OUT/<suite>/<unit>.json     one result, and the settings of its measurement
    OUT/results.json            all results
    OUT/results.md              the paper's tables with a row for this model
    OUT/hashes.json             hashes of the checkpoint's files

An existing result is not measured again; one with other settings or another model is an error.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flash_frac.data import load_tokenizer
from flash_frac.evals import harness
from flash_frac.evals.examples import (
    fingerprints,
    how_to_get,
    missing_files,
    no_downloads,
    source_of,
)
from flash_frac.evals.identity import identity_in_memory, identity_of_checkpoint
from flash_frac.evals.report import UNIT, markdown
from flash_frac.evals.suites import SUITES, Request, Suite, Unit, check_suites
from flash_frac.extras import require
from flash_frac.files import read_record, write_record, write_text
from flash_frac.models.loading import Found, find_checkpoint, find_tokenizer
from flash_frac.provenance import provenance, version_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an evaluation.

    Args:
        suites: names of suites.
        tasks: run only these tasks; all by default. For suites that accept your own files, also
            the names of files in `data_dir`.
        lengths: context lengths, instead of the suites' own.
        data_dir: folder of local files; if set, nothing is downloaded.
        skip_missing: skip tasks whose local files are missing, which is otherwise an error.
        limit: use only the first N examples of each task, for a trial; such numbers mean little.
        max_length: maximum number of tokens, instead of the suites' own; ignored by suites with
            lengths.
        truncate: cut off the beginning of longer requests, which are otherwise an error, and
            report how many.
        batch_size: a number, or "auto".
        seed: random seed.
        tokenizer: a name for `flash_frac.data.load_tokenizer`, instead of the checkpoint's own
            tokenizer.
        trust_remote_code: run Python code that comes with the checkpoint.
        quantize: "int8" or "fp8" for weights of 8 bits.
    """

    suites: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    data_dir: Path | None = None
    skip_missing: bool = False
    limit: int | None = None
    max_length: int | None = None
    truncate: bool = False
    batch_size: int | str = "auto"
    seed: int = 0
    trust_remote_code: bool = False
    tokenizer: str | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        check_suites(self.suites)
        known = self._known()
        strange = [name for name in self.tasks if name not in known]
        if strange and (self.data_dir is None or not any(SUITES[n].own for n in self.suites)):
            raise ValueError(f"tasks must be among {', '.join(sorted(known))}; got {strange}")
        numbers = {"limit": self.limit, "max_length": self.max_length}
        numbers |= {f"lengths[{n}]": length for n, length in enumerate(self.lengths)}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        size = str(self.batch_size)
        if not (size == "auto" or (size.isdecimal() and int(size) > 0)):
            raise ValueError(f"batch_size must be auto or at least 1, got {self.batch_size!r}")
        if self.lengths and not any(SUITES[name].lengths for name in self.suites):
            raise ValueError(f"lengths were given, but {', '.join(self.suites)} has no lengths")

    def _known(self) -> set[str]:
        return {task.name for name in self.suites for task in SUITES[name].tasks}

    def units(self, suite: Suite) -> tuple[Unit, ...]:
        """The units of a suite to measure."""
        names = tuple(task.name for task in suite.tasks if task.name in self.tasks)
        if suite.own is not None:
            names += tuple(name for name in self.tasks if name not in self._known())
        if self.tasks and not names:
            return ()
        return suite.units(names, self.lengths if suite.lengths else ())


def evaluate(checkpoint: str, out: Path, settings: Settings, *, lm: Any = None) -> dict[str, Any]:
    """Evaluate a checkpoint, or resume an evaluation; return the content of OUT/results.json.

    Args:
        checkpoint: folder or hub id of any causal language model.
        out: folder for the results.
        settings: what to measure, and how.
        lm: the model as an lm-eval object, if it is already in memory.

    Example:
        >>> settings = Settings(suites=("lm",), tasks=("piqa",), data_dir=Path("data"))
        >>> evaluate("runs/frac/final", Path("evals/frac"), settings)
    """
    # Import it now, so that the first task's time does not include it.
    require("lm_eval.evaluator", "eval", "frac eval")
    # lm-eval's warnings are for its direct callers.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    plan = [
        (SUITES[name], unit) for name in settings.suites for unit in settings.units(SUITES[name])
    ]
    plan, left_out = _available(plan, settings)
    with ExitStack() as stack:
        if settings.data_dir is not None:
            stack.enter_context(no_downloads())
        # Check the model before downloading data.
        model, load = _model(checkpoint, out, settings, lm)
        where_data = {suite.name: _data_of(suite, settings, out) for suite, _ in plan}
        done = [
            _kept(_place(out, suite, unit), _conditions(suite, unit, settings, where_data), model)
            for suite, unit in plan
        ]
        for index, (suite, unit) in enumerate(plan):
            where = f"[{index + 1}/{len(plan)}] {suite.name}/{unit.name}"
            if done[index]:
                print(f"{where}: already measured")
                continue
            lm = lm or load()
            conditions = _conditions(suite, unit, settings, where_data)
            request = Request(
                lm=lm,
                suite=suite,
                unit=unit,
                data_dir=where_data[suite.name],
                limit=settings.limit,
                seed=settings.seed,
            )
            record = {"model": model, **_measure(where, request, conditions)}
            write_record(_place(out, suite, unit), record)
            _report(out, checkpoint, left_out)
    return _report(out, checkpoint, left_out)


def _available(
    plan: list[tuple[Suite, Unit]], settings: Settings
) -> tuple[list[tuple[Suite, Unit]], list[str]]:
    """The part of a plan whose local files exist, and the names of the other tasks.

    Missing files are an error unless `skip_missing` is set; this runs before anything is loaded.
    """
    if settings.data_dir is None:
        return plan, []
    if not settings.data_dir.is_dir():
        raise ValueError(f"--data-dir {settings.data_dir} is not a folder")
    lacking: dict[str, list[Path]] = {}
    kept = []
    for suite, unit in plan:
        missing = missing_files(settings.data_dir, suite, [unit.task])
        lacking.setdefault(suite.name, []).extend(missing)
        if not missing:
            kept.append((suite, unit))
    lacking = {name: list(dict.fromkeys(paths)) for name, paths in lacking.items() if paths}
    lines = [
        f"missing {', '.join(map(str, paths))}: {how_to_get(settings.data_dir, name)}"
        for name, paths in lacking.items()
    ]
    if lines and not settings.skip_missing:
        raise ValueError("; ".join([*lines, "or skip these tasks with --skip-missing"]))
    for line in lines:
        print(f"left out, {line}")
    if not kept:
        raise ValueError(f"no task is left: --data-dir {settings.data_dir} has none of their files")
    there = {(suite.name, unit.task.name) for suite, unit in kept}
    wanted = dict.fromkeys((suite.name, unit.task.name) for suite, unit in plan)
    return kept, [f"{suite}/{task}" for suite, task in wanted if (suite, task) not in there]


def _model(
    checkpoint: str, out: Path, settings: Settings, lm: Any
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The description of a model for its results, and a function that loads it."""
    if lm is not None and settings.quantize is not None:
        raise ValueError("quantize is for a checkpoint that is loaded here; quantise lm before")
    if lm is not None and not Path(checkpoint).is_dir():
        return {"checkpoint": checkpoint, **identity_in_memory(lm)}, lambda: lm
    found = find_checkpoint(checkpoint, trust_remote_code=settings.trust_remote_code)
    if lm is not None:
        tokenizer = lm.tokenizer
    elif settings.tokenizer is None:
        tokenizer = find_tokenizer(found)
    else:
        tokenizer = load_tokenizer(settings.tokenizer, needs_eos=False)
    identity = identity_of_checkpoint(found, tokenizer, out)
    return {"checkpoint": checkpoint, **identity}, lambda: _load(found, tokenizer, settings)


def _load(found: Found, tokenizer: Any, settings: Settings) -> Any:
    from flash_frac.evals.language_model import FracLM

    lm = FracLM(
        found.name,
        revision=found.options.get("revision", "main"),
        tokenizer=tokenizer,
        strict=True,
        quantize=settings.quantize,
        batch_size=settings.batch_size,
        truncate=settings.truncate,
        trust_remote_code=settings.trust_remote_code,
    )
    if lm.world_size > 1:
        raise ValueError(
            f"frac eval runs in one process, got {lm.world_size}; for several GPUs, run it several "
            "times, with different --suite, --tasks or --lengths and the same --out"
        )
    return lm


def _place(out: Path, suite: Suite, unit: Unit) -> Path:
    return out / suite.name / f"{unit.name}.json"


def _data_of(suite: Suite, settings: Settings, out: Path) -> Path | None:
    """The folder of a suite's local files: as given, or downloaded if the suite needs files."""
    if settings.data_dir is not None or not suite.reads_files:
        return settings.data_dir
    folder = out / "data"
    tasks = [unit.task for unit in settings.units(suite)]
    if missing_files(folder, suite, tasks):
        print(f"downloading the data of {suite.name} to {folder / suite.name}", flush=True)
        try:
            suite.prepare(folder)
        except ConnectionError as error:
            raise ValueError(
                f"the data of suite {suite.name} cannot be downloaded ({error}); run `frac eval "
                "prepare` on a machine with a network, and pass its files with --data-dir"
            ) from error
    return folder


def _conditions(
    suite: Suite, unit: Unit, settings: Settings, where_data: Mapping[str, Path | None]
) -> dict[str, Any]:
    """Everything that a result depends on, except the model."""
    folder = where_data[suite.name]
    return {
        "data": "hub" if folder is None else fingerprints(suite.files(folder, unit.task)),
        "limit": settings.limit,
        "max_length": (None if unit.length else settings.max_length) or suite.tokens(unit),
        "truncate": settings.truncate,
        "num_fewshot": suite.num_fewshot,
        # Older results may start texts with a bos token that the tokenizer would not add.
        "texts_begin": "as the tokenizer begins them",
        "seed": settings.seed,
        "tokenizer": settings.tokenizer,
        "quantize": settings.quantize,
    }


def _kept(place: Path, conditions: dict[str, Any], model: dict[str, Any]) -> bool:
    """Whether a result exists; raises ValueError if it is for other conditions or models."""
    if not place.is_file():
        return False
    record = _read_record(place)
    now = {**conditions, **model}
    before = {**record["conditions"], **record["model"]}
    # The same model may have moved.
    del now["checkpoint"]
    differ = [key for key in now if now[key] != before.get(key)]
    if differ:
        changes = ", ".join(f"{key} {before.get(key)} there and {now[key]} now" for key in differ)
        raise ValueError(
            f"{place} was measured differently ({changes}): delete it, or choose another --out"
        )
    return True


def _read_record(place: Path) -> dict[str, Any]:
    try:
        return read_record(place, {**UNIT, "model": dict})
    except ValueError as error:
        raise ValueError(f"{error}; delete it to measure again") from error


def _measure(where: str, request: Request, conditions: dict[str, Any]) -> dict[str, Any]:
    suite, unit, lm = request.suite, request.unit, request.lm
    print(f"{where}: at most {conditions['max_length']:,} tokens", flush=True)
    lm.allow(conditions["max_length"])
    on_gpu = lm.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(lm.device)
    start = time.perf_counter()
    try:
        results = dict((suite.measure or harness.measure)(request))
    except OverflowError as error:
        raise ValueError(
            f"{suite.name}/{unit.name}: a perplexity overflows ({error}), so the weights are "
            "damaged or were never trained; `frac doctor CHECKPOINT` verifies them"
        ) from error
    # Requests cut by the suite's own rule, or at their beginning.
    results["num_truncated"] = results.get("num_cut", 0) + lm.num_truncated
    results["tokens_read"] = results.get("tokens_read", lm.tokens_read)
    seconds = time.perf_counter() - start
    strange = [k for k, x in results.items() if isinstance(x, float) and not math.isfinite(x)]
    # JSON stores NaN and inf as null, so record which values they are.
    results |= {"not_finite": strange} if strange else {}
    shown = ", ".join(f"{m.unit} {results[m.key] * m.scale:.4g}" for m in unit.task.metrics)
    cut = f", {results['num_truncated']:,} cut short" if results["num_truncated"] else ""
    print(f"{where}: {shown} on {results['num_examples']:,} examples{cut}, {seconds:.0f} s")
    return {
        "suite": suite.name,
        "task": unit.task.name,
        "length": unit.length,
        "conditions": conditions,
        "source": None if request.data_dir is None else source_of(request.data_dir / suite.name),
        "results": results,
        "seconds": round(seconds, 2),
        "peak_memory_mib": torch.cuda.max_memory_allocated(lm.device) >> 20 if on_gpu else None,
        "made_with": {**provenance(), "lm_eval": version_of("lm_eval")},
    }


def _report(out: Path, checkpoint: str, left_out: list[str]) -> dict[str, Any]:
    """Write results.json and results.md from all results in the folder."""
    found: list[dict[str, Any]] = []
    for name in SUITES:
        if (out / name).is_dir():
            suite = SUITES[name]
            order = {task.name: n for n, task in enumerate(suite.tasks)}
            records = [_read_record(path) for path in (out / name).glob("*.json")]
            if suite.own is None:
                records = [record for record in records if record["task"] in order]
            last = len(order)
            found += sorted(
                records, key=lambda r: (order.get(r["task"], last), r["task"], r["length"] or 0)
            )
    report = {"model": model_name(checkpoint), "checkpoint": checkpoint, "units": found}
    report |= {"left_out": left_out} if left_out else {}
    write_record(out / "results.json", report)
    write_text(out / "results.md", markdown([report]))
    return report


def model_name(checkpoint: str) -> str:
    """The name of a model in tables and of its result folder.

    Example: `model_name("runs/frac-130m/final") == "frac-130m"`
    """
    path = Path(checkpoint).resolve() if Path(checkpoint).is_dir() else Path(checkpoint)
    # `frac train` saves its model in RUN/final, and the name of the run says more.
    return path.parent.name if path.name == "final" else path.name


def names_of(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names.

    Example: `names_of("piqa, boolq") == ("piqa", "boolq")`
    """
    return tuple(name.strip() for name in text.split(",") if name.strip())


def suite_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of suites; "all" means every suite."""
    names = names_of(text)
    return tuple(SUITES) if names == ("all",) else names


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Split a comma-separated list of numbers, in which K means 1024.

    Example: `whole_numbers("--lengths", "512,4K") == (512, 4096)`
    """
    numbers = []
    for name in names_of(text):
        digits, thousands = name.upper().removesuffix("K"), name.upper().endswith("K")
        if not digits.isdecimal():
            raise ValueError(f"{option} must be whole numbers such as 512,4K; got {name!r}")
        numbers.append(int(digits) * (1024 if thousands else 1))
    return tuple(numbers)
