"""The suite "longbench": fourteen English tasks of LongBench (Bai et al., 2024).

Prompts, answer lengths and metrics are those of lm-evaluation-harness; the examples are local. A
prompt that does not fit is cut in the middle, as LongBench does, which keeps the instruction at the
beginning and the question at the end:

    kept tokens = the first and the last (max_length - new tokens) // 2 of the prompt

The number of cut prompts is reported. The average is over tasks, as in the paper, not over groups.

lm-eval ends the answers of trec, triviaqa and samsum at a newline. LongBench's own code first drops
leading newlines, so an answer that starts with one scores there but not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flash_frac.evals.examples import Source, prepare_from_hub, read_records
from flash_frac.evals.harness import measure_records, shorten
from flash_frac.evals.suites import Metric, Request, Suite, Task
from flash_frac.extras import require

# Groups of the paper's table in order, with tasks and their columns.
GROUPS = {
    "Single-Doc QA": {"narrativeqa": "NQA", "qasper": "QQA", "multifieldqa_en": "MFQ"},
    "Multi-Doc QA": {"hotpotqa": "HQA", "2wikimqa": "2WM", "musique": "Mus"},
    "Summarization": {"gov_report": "GvR", "qmsum": "QMS", "multi_news": "MNs"},
    "Few-shot": {"trec": "TRC", "triviaqa": "TQA", "samsum": "SSM"},
    "Code": {"lcc": "LCC", "repobench-p": "RBP"},
}
SOURCES = {
    name: Source(dataset="Xnhyacinth/LongBench", config=name)
    for tasks in GROUPS.values()
    for name in tasks
}


def ends(tokens: list[int], size: int) -> list[list[int]]:
    """The first and the last `size // 2` tokens.

    Example: `ends([1, 2, 3, 4, 5], 4) == [[1, 2], [4, 5]]`
    """
    half = size // 2
    return [tokens[:half], tokens[len(tokens) - half :]]


def harness_config(name: str) -> dict[str, Any]:
    """lm-eval's configuration of a task, with functions resolved.

    Example: `harness_config("qasper")["generation_kwargs"]["max_gen_toks"] == 128`
    """
    # The metrics import these, and their own error would name another package's extra.
    for module in ("jieba", "fuzzywuzzy", "rouge"):
        require(module, "eval", "suite longbench")
    folder = Path(require("lm_eval.tasks", "eval", "suite longbench").__path__[0])
    load = require("lm_eval.tasks._yaml_loader", "eval", "suite longbench").load_yaml
    return load(folder / "longbench" / f"{name}.yaml")


def prompted(lm: Any, record: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn an example into a prompt that fits the model.

    Args:
        lm: the model.
        record: "context", "input" ("question" in the copy on the hub), "answers", and
            "all_classes" if there are classes.
        config: from `harness_config`.

    Returns:
        "prompt", "answers", "all_classes", and "cut": whether tokens were left out.
    """
    render = require("lm_eval.utils", "eval", "suite longbench").apply_template
    question = record["question"] if "question" in record else record["input"]
    whole = render(config["doc_to_text"], {"context": record["context"], "question": question})
    max_tokens = lm.max_length - config["generation_kwargs"]["max_gen_toks"]
    prompt = shorten(lm, whole, max_tokens, ends)
    return {
        "prompt": prompt,
        "answers": list(record["answers"]),
        "all_classes": list(record.get("all_classes") or ()),
        "cut": prompt != whole,
    }


def measure(request: Request) -> dict[str, Any]:
    """Measure the task's own score, from 0 to 1: F1, ROUGE-L, accuracy or code similarity.

    Returns:
        "score,none", the same under the metric's own name, "num_examples" and "num_cut".
    """
    name = request.unit.task.name
    config = harness_config(name)
    records = read_records(request, SOURCES[name])
    examples = [prompted(request.lm, record, config) for record in records]
    # The data is local, and a tag would make lm-eval search for other tasks with it.
    unwanted = ("dataset_path", "dataset_name", "tag")
    config = {key: value for key, value in config.items() if key not in unwanted}
    counts = {"num_cut": sum(example["cut"] for example in examples)}
    return measure_records(request, examples, config) | counts


def prepare(data_dir: Path) -> list[Path]:
    """Download missing `data_dir/longbench/<task>.jsonl` from the hub; return the new files."""
    return prepare_from_hub(data_dir / "longbench", SOURCES)


_UNITS = {
    "gov_report": "R-L", "qmsum": "R-L", "multi_news": "R-L", "samsum": "R-L", "trec": "acc",
    "lcc": "sim", "repobench-p": "sim",
}  # fmt: skip

# The paper's table: one number per task in the order of GROUPS, then the average.
_TABLE = """
Transformer   8.7 10.6 19.0  6.1 15.5  4.0  7.2 16.6 11.2 25.0 19.1 11.3 26.0 25.6 14.7
Mamba-2       4.4 11.4 16.3  4.5 13.8  2.7  7.8 12.7  6.3 17.0 10.9 10.5 23.4 26.5 12.0
GDN          11.5 10.1 24.4  7.3 14.8  4.8  7.9 18.9 14.3 40.0 21.6 13.2 18.7 16.9 16.0
Mamba-3-SISO 11.2 12.4 22.6  8.4 16.3  6.4  9.8 19.3  9.6 13.5 18.2 14.5 20.6 18.3 14.4
Mamba-3-MIMO  5.0 10.4 15.3  8.2 12.5  5.6 10.5 14.3  8.4  8.5  8.6 11.6 20.7 19.9 11.4
FRAC         13.2 14.0 25.8  8.5 12.2  5.1 13.8 18.9 16.3 39.0 24.5 28.2 11.0 19.5 17.9
"""
_PAPER = {
    name: tuple(map(float, numbers))
    for name, *numbers in map(str.split, _TABLE.strip().splitlines())
}

SUITE = Suite(
    name="longbench",
    title="LongBench",
    tasks=tuple(
        Task(
            name=name,
            metrics=(Metric(key="score,none", column=column, unit=_UNITS.get(name, "F1")),),
        )
        for tasks in GROUPS.values()
        for name, column in tasks.items()
    ),
    max_length=65536,
    paper=_PAPER,
    measure=measure,
    prepare=prepare,
    reads_files=True,
)
