"""Examples from local files, cut to what the model may read, as a task of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from flash_frac.evals.harness import Rows, measure_task
from flash_frac.evals.offline import how_to_get, read_rows
from flash_frac.evals.suites import Request
from flash_frac.extras import require
from flash_frac.files import write_rows

# Which runs of tokens stay when only so many may: (tokens, how many) -> runs.
Keep = Callable[[list[int], int], list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the examples of a task are on the Hugging Face hub.

    Args:
        dataset: its id.
        config: name of a part of it.
        split: of the part.
        text: the one field that is wanted, as "text"; all fields as they are by default.
    """

    dataset: str
    config: str | None = None
    split: str = "test"
    text: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Download the examples.

        Example: `next(Source(dataset="hazyresearch/based-fda", split="validation").rows())["key"]`
        """
        load = require("datasets", "eval", "frac eval").load_dataset
        try:
            rows = load(self.dataset, self.config, split=self.split)
        except ConnectionError as error:
            raise ValueError(
                f"{self.dataset} cannot be downloaded ({error}); run `frac eval prepare` on a "
                "machine with a network, and give its files by --data-dir"
            ) from error
        for row in rows:
            yield dict(row) if self.text is None else {"text": row[self.text]}


def read_records(request: Request, source: Source | None) -> list[dict[str, Any]]:
    """The examples of the request's task: all, or the first `limit`.

    They are read from the local files of `request.data_dir`, and downloaded from the source only
    if it is None.

    Example: `read_records(request, SOURCES["pg19"])[0]["text"]`
    """
    suite, task = request.suite.name, request.unit.task
    if request.data_dir is None:
        if source is None:
            raise ValueError(f"task {task.name} is a local file: give its folder by --data-dir")
        return list(islice(source.rows(), request.limit))
    path = task.files(request.data_dir / suite)[task.splits[0]]
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: write it by {how_to_get(request.data_dir, suite)}"
        )
    return read_rows(path)[: request.limit]


def prepare_from_hub(folder: Path, sources: Mapping[str, Source]) -> list[Path]:
    """Write `folder/<task>.jsonl` for each task whose file is not there, and return the new files.

    Example: `prepare_from_hub(Path("data/recall"), {"fda": Source(dataset="...")})`
    """
    paths = {task: folder / f"{task}.jsonl" for task in sources}
    lacking = [task for task, path in paths.items() if not path.is_file()]
    return [write_rows(paths[task], sources[task].rows()) for task in lacking]


def shorten(lm: Any, text: str, max_tokens: int, keep: Keep) -> str:
    """The text, or, if it has more than `max_tokens` tokens, what `keep` leaves of it.

    Pieces of a text may have more tokens once they are joined and encoded again; then more is left
    out, so that the prompt fits for certain.

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
    """Put examples to the model through lm-eval, and return the numbers that it gives.

    Args:
        request: the model and the task.
        records: examples with a "prompt", which goes to the model as it is, and what the metric
            needs.
        config: fields of lm-eval's TaskConfig: generation_kwargs, process_results, metric_list.
    """
    own = {
        "task": request.unit.task.name,
        "custom_dataset": Rows({"test": list(records)}),
        "test_split": "test",
        "doc_to_text": "prompt",
    }
    task = require("lm_eval.api.task", "eval", f"suite {request.suite.name}").ConfigurableTask
    return measure_task(request, task(config={**config, **own}))
