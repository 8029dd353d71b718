"""The suite "recall": find an answer in the text before the question, as a cloze.

These are the six tasks of Just Read Twice (JRT, Arora et al., 2024): a document, then a sentence
that stops where its answer belongs. A generation scores if it contains an answer, ignoring case.

A document is cut to a window of W = C - 50 tokens, C = 2048, around the answer. With t tokens
before the answer's first occurrence, and S tokens in the document, the window is

    [s, min(S, s + W)),    s = max(0, t - W // 2),

so text more than W // 2 tokens before the answer is cut even if the document would fit. For
TriviaQA and DROP, t = 0. An answer that does not occur counts as being at the document's end. If
the window depends on the answer, examples whose answer has fewer than two letters are left out.
The prompt and 48 new tokens must fit in 2048 tokens; a longer prompt loses its first tokens, as in
JRT's code. The numbers of cut and left-out examples are reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_frac.evals.examples import Source, prepare_from_hub, read_records
from flash_frac.evals.harness import measure_records, shorten
from flash_frac.evals.suites import Metric, Request, Suite, Task

MAX_NEW_TOKENS = 48
# Tokens of C reserved for the answer.
ANSWER_TOKENS = 50
# In SWDE, a list of attributes follows this line; the question asks for one of them.
SUMMARY = "Summary of information above..."

Record = Mapping[str, Any]


def _without_ending(text: str, ending: str) -> str:
    """Remove all repetitions of an ending from a text, ignoring case."""
    while ending and text.lower().endswith(ending.lower()):
        text = text[: -len(ending)]
    return text


def _attribute(record: Record) -> str:
    key = record["key"]
    return f" {key[0].upper()}{key[1:]}:"


def _swde(record: Record, text: str) -> str:
    text = _without_ending(text, record["key"] + ":")
    return text.strip().strip(".") + "." + _attribute(record)


def _fda(record: Record, text: str) -> str:
    text = _without_ending(text, record["key"] + ":")
    return text.strip("\n").strip(".") + "." + _attribute(record)


def _squad(record: Record, text: str) -> str:
    return text.strip()


def _triviaqa(record: Record, text: str) -> str:
    return _drop(record, re.sub(r"\[(PAR|DOC|TLE)\]", "", text.strip()))


def _nq(record: Record, text: str) -> str:
    question = record["question"].strip()
    return text.strip().removesuffix(question).strip().strip(".") + ". " + question


def _drop(record: Record, text: str) -> str:
    question = record["question"].strip()
    return _without_ending(text.strip(), question).strip().strip(".") + ". " + question


@dataclass(frozen=True, kw_only=True)
class Format:
    """The fields of a task's examples, and how they become a prompt.

    Args:
        source: its dataset.
        document: field of the document.
        clean: extracts the document from that field.
        centre: fields whose first occurrence is the centre of the window; () for the start.
        answers: field of the answer, or of a list of answers.
        prompt: builds the prompt from an example and its document, already cut.
        context_length: C.
    """

    source: Source
    document: str = "context"
    clean: Callable[[str], str] = str.strip
    centre: tuple[str, ...] = ()
    answers: str = "answers"
    prompt: Callable[[Record, str], str]
    context_length: int = 2048


def _source(dataset: str, config: str | None = None) -> Source:
    return Source(dataset=f"hazyresearch/{dataset}", config=config, split="validation")


FORMATS = {
    "swde": Format(
        source=_source("based-swde-v2", "default"),
        document="text",
        clean=lambda text: text.split(SUMMARY)[0].strip(),
        centre=("key", "value"),
        answers="value",
        prompt=_swde,
    ),
    "squad": Format(
        source=_source("based-squad", "default"),
        document="text",
        centre=("value",),
        answers="value",
        prompt=_squad,
    ),
    "fda": Format(
        source=_source("based-fda", "default"),
        document="text",
        centre=("key", "value"),
        answers="value",
        prompt=_fda,
    ),
    "triviaqa": Format(source=_source("based_triviaqa"), prompt=_triviaqa),
    "nq": Format(
        source=_source("based_nq_2048"), centre=("answers",), prompt=_nq, context_length=2000
    ),
    "drop": Format(source=_source("based_drop"), prompt=_drop),
}


def contains(generation: str, answers: Sequence[str]) -> float:
    """1 if the generation contains an answer, ignoring case, else 0.

    Example: `contains("It was in Paris.", ["paris", "the capital"]) == 1.0`
    """
    return float(any(re.search(re.escape(a), generation, re.IGNORECASE) for a in answers))


def answer_position(record: Record, document: str, fields: Sequence[str]) -> int | None:
    """Character position of the first occurrence of any of the fields' values in the document.

    Of a list, the first element counts. If no value occurs, `alt_answers` are tried, which some
    examples have. Returns None if none of them occurs.
    """
    if not fields:
        return 0
    values = [_first(record[field]) for field in fields]
    found = [match.start() for value in values if (match := _find(value, document))]
    if found:
        return min(found)
    others = (_find(value, document) for value in record.get("alt_answers") or ())
    return next((match.start() for match in others if match), None)


def window(
    tokenizer: Any, document: str, position: int | None, size: int, *, fallback: int | None = None
) -> tuple[str, bool]:
    """At most `size` tokens of a document around a position, and whether any were cut.

    Args:
        tokenizer: tokenizer of the model.
        document: text without surrounding white space.
        position: position in characters; None if unknown, which means the end.
        size: W.
        fallback: position in tokens for documents longer than W if `position` is None.

    Example: `window(tokenizer, text, text.index("Paris"), 1998)`
    """
    tokens = tokenizer(document)["input_ids"]
    end = len(document) - 1 if position is None else position
    before = len(tokenizer(document[: max(end, 0)])["input_ids"])
    if position is None and fallback is not None and before > size:
        before = fallback
    start = max(0, before - size // 2)
    kept = tokens[start : start + size]
    if len(kept) == len(tokens):
        return document, False
    return tokenizer.decode(kept, skip_special_tokens=True), True


def prompted(lm: Any, record: Record, form: Format) -> dict[str, Any] | None:
    """Turn an example into a prompt that fits the model, or None for one that JRT leaves out.

    Returns:
        "prompt", "answers", and "cut": whether tokens were left out.
    """
    if any(len(_first(record[field])) <= 1 for field in form.centre):
        return None
    document = form.clean(record[form.document])
    position = answer_position(record, document, form.centre)
    text, cut = window(
        lm.tokenizer,
        document,
        position,
        form.context_length - ANSWER_TOKENS,
        fallback=record.get("tok_pos"),
    )
    whole = form.prompt(record, text)
    prompt = shorten(lm, whole, lm.max_length - MAX_NEW_TOKENS, lambda ids, size: [ids[-size:]])
    answers = record[form.answers]
    answers = [answers] if isinstance(answers, str) else list(answers)
    return {"prompt": prompt, "answers": answers, "cut": cut or prompt != whole}


def measure(request: Request) -> dict[str, Any]:
    """Measure the fraction of examples whose generation contains an answer.

    Returns:
        "contains,none", "num_examples", "num_cut", "num_left_out" and their names "left_out";
        "note" if the examples are not JRT's.
    """
    form = FORMATS[request.unit.task.name]
    records = read_records(request, form.source)
    every = [prompted(request.lm, record, form) for record in records]
    examples = [example for example in every if example is not None]
    if not examples:
        raise ValueError(
            f"all {len(records)} examples of {request.unit.name} have answers of fewer than two "
            "letters, which JRT leaves out: raise --limit, or prepare the file again"
        )
    config = {
        "metadata": {"version": 1.0},
        "doc_to_target": "{{answers}}",
        "process_results": _scores,
        "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {
            "until": ["\n"], "max_gen_toks": MAX_NEW_TOKENS, "do_sample": False,
        },
    }  # fmt: skip
    counts = {
        "left_out": [
            f"example {n} (an answer of fewer than two letters)"
            for n, example in enumerate(every, 1)
            if example is None
        ],
        "num_cut": sum(example["cut"] for example in examples),
        "num_left_out": len(records) - len(examples),
    }
    notes = {}
    if any(record.get("form") == "question" for record in records):
        notes["note"] = "questions, an approximation of JRT's clozes"
    return measure_records(request, examples, config) | counts | notes


def prepare(data_dir: Path) -> list[Path]:
    """Download missing files `data_dir/recall/<task>.jsonl` from the hub; return the new files."""
    sources = {name: form.source for name, form in FORMATS.items()}
    return prepare_from_hub(data_dir / "recall", sources)


def _first(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else value[0]


def _find(value: str, document: str) -> re.Match[str] | None:
    return re.search(re.escape(value), document, re.IGNORECASE)


def _scores(doc: Record, results: Sequence[str]) -> dict[str, float]:
    return {"contains": contains(results[0], doc["answers"])}


_COLUMNS = {
    "swde": "SWDE", "squad": "SQD", "fda": "FDA", "triviaqa": "TQA", "nq": "NQ", "drop": "Drop",
}  # fmt: skip

SUITE = Suite(
    name="recall",
    title="Real-world recall",
    tasks=tuple(
        Task(
            name=name,
            metrics=(Metric(key="contains,none", column=column, unit="cont."),),
            splits=("validation",),
        )
        for name, column in _COLUMNS.items()
    ),
    max_length=2048,
    paper={
        "Transformer": (42.8, 39.6, 27.4, 65.7, 27.3, 28.3, 38.5),
        "Mamba-2": (32.8, 31.0, 13.6, 60.5, 20.4, 20.8, 29.9),
        "GDN": (32.7, 35.1, 12.2, 58.4, 22.1, 24.6, 30.9),
        "Mamba-3-SISO": (32.2, 39.8, 26.7, 61.5, 24.8, 25.7, 35.1),
        "Mamba-3-MIMO": (34.5, 41.2, 28.9, 64.2, 25.8, 26.1, 36.8),
        "FRAC": (43.2, 39.0, 20.0, 64.0, 25.9, 26.2, 36.4),
    },
    measure=measure,
    prepare=prepare,
    reads_files=True,
)
