"""The suite "niah": one needle in a haystack, at lengths from 1K to 64K tokens.

RULER's single needles, as lm-eval makes and scores them: S-NIAH-1 hides a number among repeated
sentences, S-NIAH-2 a number and S-NIAH-3 a UUID in essays. Every length is measured by itself, so
that a limit on examples holds for each, and with 500 examples as lm-eval has them.

The prompt of an example, without the beginning of the answer that is put in the model's mouth, has
at most the length less 128 tokens. Essays are cut in steps of 500 words, so that it may be shorter:
`mean_tokens` in the results says how long prompts were.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flash_frac.evals import harness
from flash_frac.evals.examples import SOURCE, no_downloads
from flash_frac.evals.suites import Metric, Request, Suite, Task
from flash_frac.extras import require
from flash_frac.files import decode_text, write_text

NUM_EXAMPLES = 500
ANSWER_TOKENS = 128
# RULER's name of the hidden value, and whether it is hidden in essays.
_KINDS = {
    "niah_single_1": ("numbers", False),
    "niah_single_2": ("numbers", True),
    "niah_single_3": ("uuids", True),
}
_PUNKT = "tokenizers/punkt_tab"


@contextmanager
def _ruler(folder: Path | None) -> Iterator[Any]:
    """lm-eval's module that hides needles, which must not fetch anything if there is a folder."""
    nltk = require("nltk", "eval", "suite niah")
    if folder is None:
        yield require("lm_eval.tasks.ruler.prepare_niah", "eval", "suite niah")
        return
    with patch.object(nltk.data, "path", [str(folder / "nltk_data"), *nltk.data.path]):
        # Importing it downloads rules for the ends of sentences, where there are none, and says so.
        silence = patch.object(nltk, "download", lambda *_, **__: False)
        with silence, no_downloads(), redirect_stdout(StringIO()):
            ruler = require("lm_eval.tasks.ruler.prepare_niah", "eval", "suite niah")
        if _knows_sentences(nltk):
            yield ruler
        else:
            with patch.object(ruler, "cached_sent_tokenize", split_sentences):
                yield ruler


def _knows_sentences(nltk: Any) -> bool:
    try:
        nltk.data.find(_PUNKT)
    except LookupError:
        return False
    return True


def split_sentences(text: str) -> list[str]:
    """Sentences by a simple rule, for when NLTK's are not to be had: . ? or ! and a capital.

    Example: `split_sentences("It is so. Is it? No.") == ["It is so.", "Is it?", "No."]`
    """
    return re.split(r"(?<=[.!?])\s+(?=[\"'“(]?[A-Z0-9])", text)


def essays(folder: Path) -> list[Path]:
    """The texts in which needles are hidden; ValueError if there is none."""
    paths = _texts(folder)
    if not paths:
        raise ValueError(
            f"there is no text in {folder}: put essays, or any other long text, there as *.txt; "
            f"`frac eval prepare {folder.parent} --suite niah` fetches Paul Graham's"
        )
    return paths


def _texts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.txt") if path.name != SOURCE)


def _local(folder: Path, task: Task) -> list[Path]:
    return (_texts(folder) or [folder / "*.txt"]) if _KINDS[task.name][1] else []


def _haystack(request: Request, ruler: Any) -> Any:
    """What the needle is hidden in: a sentence to repeat, or the words of the essays."""
    if not _KINDS[request.unit.task.name][1]:
        return ruler.get_haystack("repeat")
    if request.data_dir is None:
        words = ruler.get_haystack("essay")
    else:
        texts = [decode_text(p.read_bytes(), p) for p in essays(request.data_dir / "niah")]
        words = " ".join(texts).split()
    # Without this, lm-eval takes what there is: 4K tokens would be called 64K.
    assert request.unit.length is not None
    # A word has at least one token, so that many words need not be counted.
    enough = len(words) >= request.unit.length
    num_tokens = 0 if enough else len(request.lm.tokenizer(" ".join(words)).input_ids)
    if not enough and num_tokens < request.unit.length:
        raise ValueError(
            f"the essays have {num_tokens} tokens, too few for lengths of {request.unit.length}: "
            "add text to DIR/niah, or give shorter --lengths"
        )
    return words


def examples(request: Request) -> list[dict[str, Any]]:
    """Prompts of a task at a length, as lm-eval makes them from this seed."""
    folder = None if request.data_dir is None else request.data_dir / "niah"
    value, in_essays = _KINDS[request.unit.task.name]
    with _ruler(folder) as ruler:
        haystack = _haystack(request, ruler)
        template = require("lm_eval.tasks.ruler.niah_utils", "eval", "suite niah").TEMPLATE
        random.seed(request.seed)
        return ruler.generate_samples(
            haystack,
            max_seq_length=request.unit.length,
            template=template,
            type_haystack="essay" if in_essays else "repeat",
            type_needle_k="words",
            type_needle_v=value,
            num_samples=request.limit or NUM_EXAMPLES,
            tokens_to_generate=ANSWER_TOKENS,
            TOKENIZER=request.lm.tokenizer,
        )


def measure(request: Request) -> dict[str, Any]:
    """The share of needles that are found at one length, as "accuracy"."""
    rows = examples(request)
    make: Callable[..., Any] = harness.Rows({"test": rows})
    found = harness.measure_task(request, harness.build(request, make))
    # RULER counts the answer with the prompt.
    lengths = [row["length"] - ANSWER_TOKENS for row in rows]
    return {
        "accuracy": found[f"{request.unit.length},none"],
        "mean_tokens": sum(lengths) / len(lengths),
        "num_examples": found["num_examples"],
        "version": found["version"],
    }


def prepare(data_dir: Path) -> list[Path]:
    """Fetch Paul Graham's essays, and NLTK's rules for sentences."""
    rows = require("datasets", "eval", "frac eval prepare").load_dataset(
        "baber/paul_graham_essays", split="train"
    )
    folder = data_dir / "niah"
    require("nltk", "eval", "frac eval prepare").download(
        Path(_PUNKT).name, download_dir=str(folder / "nltk_data")
    )
    return [write_text(folder / "essays.txt", "\n".join(rows["text"]))]


def _task(number: int) -> Task:
    metric = Metric(key="accuracy", column=f"S-NIAH-{number}", unit="acc")
    return Task(name=f"niah_single_{number}", metrics=(metric,), folder="ruler")


SUITE = Suite(
    name="niah",
    title="NIAH",
    tasks=tuple(_task(number) for number in (1, 2, 3)),
    # On top of the length: the beginning of the answer, which RULER does not count.
    max_length=256,
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    measure=measure,
    prepare=prepare,
    local=_local,
)
