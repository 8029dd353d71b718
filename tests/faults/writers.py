"""Everything that the library writes, and how to read it back.

`write(material, folder)` does the work of a command in a folder, and resumes unfinished work.
`read(material, folder)` returns what a user gets from it, as comparable values. Both raise a
ValueError or OSError that names the file if a file is bad.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from experiments.table import Table
from flash_frac.bench.rows import append_rows, read_rows
from flash_frac.data import DataArguments, byte_tokenizer, prepare
from flash_frac.evals.report import compare
from flash_frac.evals.runner import Settings, evaluate
from flash_frac.inference import Engine, FracStream, PrefixStates, Request
from flash_frac.manifest import check_manifest, write_manifest
from flash_frac.models.export import export
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model
from flash_frac.train.checkpoint import checkpoints
from flash_frac.train.monitor import LOG_NAME, read_lines
from tests.commands import frac, make_checkpoint
from tests.evals.known import SAMPLES
from tests.faults.damage import WAYS, WAYS_OF_TEXTS
from tests.train.runs import make_recipe, make_text

STEPS = 8
STATEFUL = {"separate_documents": True, "stateful": True}
BEST = {"load_best_model_at_end": True, "eval_steps": 2, "save_total_limit": 2}
STREAMING = {"data_files": None, "streaming": True, "sequence_length": 256}
STREAMING |= {"held_out": 0.0, "held_out_documents": 4}
RECIPES = {
    "plain": {"gradient_accumulation_steps": 2},
    "stateful": STATEFUL,
    "best": BEST,
    "streaming": STREAMING,
}
# Numbers of a log that depend on the clock or the machine.
_NOT_RESULTS = ("tokens_per_second", "peak_memory_gib")


def make_material(folder: Path) -> Path:
    """What the writers work on: a text, recipes, a model."""
    logging.disable_progress_bar()
    (folder / "text").mkdir()
    text, cache = make_text(folder / "text"), folder / "cache"
    for name, changes in RECIPES.items():
        (folder / name).mkdir()
        source = {"dataset_name": str(text)} if "streaming" in changes else {}
        make_recipe(folder / name, text, cache, max_steps=STEPS, **changes, **source)
    torch.manual_seed(0)
    make_checkpoint(folder / "model")
    write_manifest(folder / "model")
    shutil.copytree(SAMPLES / "lm", folder / "data" / "lm")
    return folder


class Writer(NamedTuple):
    """A command, or a function of the library, that writes files.

    Attributes:
        begun: makes of a finished folder what it was on the way there, for writers that go on from
            there before their results are read.
        ways: in which files are damaged.
    """

    write: Callable[[Path, Path], None]
    read: Callable[[Path, Path], Any]
    begun: Callable[[Path], None] | None = None
    ways: tuple[str, ...] = tuple(WAYS)


def command(*arguments: object) -> None:
    """A command of ours, which raises what it ends with."""
    done = frac(*arguments)
    print(done.stdout, end="")
    if done.returncode:
        raise ValueError(done.stderr.removeprefix("frac: ").removesuffix("\n"))
    print(done.stderr, end="")


def training(recipe: str) -> Writer:
    """`frac train` by one of the recipes."""
    return Writer(_Recipe(recipe).write, _Recipe(recipe).read, _undo_the_end)


class _Recipe(NamedTuple):
    name: str

    def write(self, material: Path, folder: Path) -> None:
        command("train", material / self.name / "recipe.yaml", "--output_dir", folder)

    def read(self, material: Path, folder: Path) -> Any:
        """Files of the final model, and the numbers of the log that do not depend on the clock."""
        check_manifest(folder / "final")
        for checkpoint in checkpoints(folder):
            check_manifest(checkpoint)
        # The last line of a process tells its time, and none that was killed has one.
        lines = [line for line in read_lines(folder / LOG_NAME) if "train_runtime" not in line]
        return _files(folder / "final"), [_results_of(line) for line in lines]


def _results_of(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.startswith(_NOT_RESULTS)}


def _undo_the_end(folder: Path) -> None:
    shutil.rmtree(folder / "final")
    shutil.rmtree(checkpoints(folder)[-1])


def _files(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _prepare(material: Path, folder: Path) -> Any:
    data = DataArguments(data_files=[str(material / "text")], held_out=0.1)
    data.cache_dir = str(folder / "cache")
    return prepare(data, byte_tokenizer(), seed=0, progress=False)


def _tokens(material: Path, folder: Path) -> Any:
    splits = _prepare(material, folder)
    stores = (splits.train, splits.held_out)
    return [(x.tokens(0, x.num_tokens).tolist(), x.starts.tolist()) for x in stores]


def _write_tokens(material: Path, folder: Path) -> None:
    _prepare(material, folder)


def _model(material: Path) -> Any:
    return load_model(material / "model").eval()


def _write_stream(material: Path, folder: Path) -> None:
    """A text in three pieces, each read on from the state after the one before."""
    model, path = _model(material), folder / "a.stream"
    ids = torch.arange(3, 63).view(3, 20)
    for number, piece in enumerate(ids):
        stream = FracStream.load(path, model) if path.exists() else FracStream(model)
        if stream.num_tokens == piece.numel() * number:
            stream.feed(piece[None]).save(path)


def _read_stream(material: Path, folder: Path) -> Any:
    stream = FracStream.load(folder / "a.stream", _model(material))
    logits = stream.logits.tolist()
    return stream.lengths, logits, [x.tolist() for x in stream.generate(max_new_tokens=5)]


def _ask(material: Path, folder: Path) -> list[list[int]]:
    """Answers of an engine to prompts that share beginnings; it keeps their states in a folder."""
    states = PrefixStates(
        device_bytes=0, host_bytes=0, disk_bytes=2**24, folder=folder / "states", spacing=None
    )
    # Without closing, the folder stays locked until the garbage collector runs.
    with closing(states):
        engine = Engine(_model(material), slots=2, max_length=64, piece=16, prefixes=states)
        prompts = [[*range(3, 20), n] for n in (40, 41, 42)]
        ids = [engine.submit(Request(prompt=prompt, max_new_tokens=4)) for prompt in prompts]
        answers: dict[Any, list[int]] = {id: [] for id in ids}
        for update in engine.run_until_idle():
            answers[update.id] += update.tokens
        states.save()
    return [answers[id] for id in ids]


def _write_states(material: Path, folder: Path) -> None:
    _ask(material, folder)


def _write_evaluation(material: Path, folder: Path) -> None:
    settings = Settings(
        suites=("lm",), tasks=("piqa", "openbookqa"), data_dir=material / "data", limit=2
    )
    evaluate(str(material / "model"), folder, settings)


def _read_evaluation(material: Path, folder: Path) -> Any:
    compare([folder], folder.with_name("compared"))
    text = (folder.with_name("compared") / "compare.md").read_text()
    _write_evaluation(material, folder)
    units = json.loads((folder / "results.json").read_text())["units"]
    keys = ("task", "results", "conditions", "model")
    return text, [{key: unit[key] for key in keys} for unit in units]


_COLUMNS = ("model", "seed", "accuracy")


def _write_table(material: Path, folder: Path) -> None:
    table = Table(folder / "results.csv", _COLUMNS, num_key=2)
    for seed in range(6):
        if ("frac", seed) not in table:
            table.append([{"model": "frac", "seed": seed, "accuracy": 0.125 * seed}])


def _read_table(material: Path, folder: Path) -> Any:
    _write_table(material, folder)
    return sorted(Table(folder / "results.csv", _COLUMNS, num_key=2).rows.items())


def _write_rows(material: Path, folder: Path) -> None:
    """Rows of a benchmark, which are made again if not all are there."""
    path = folder / "cpu.csv"
    rows = read_rows(path, _COLUMNS) if path.exists() else []
    for seed in range(len(rows), 6):
        append_rows([{"model": "frac", "seed": seed, "accuracy": 0.125}], path, _COLUMNS)


def _read_rows(material: Path, folder: Path) -> Any:
    _write_rows(material, folder)
    return read_rows(folder / "cpu.csv", _COLUMNS)


def _write_copy(material: Path, folder: Path) -> None:
    if not (folder / "copy").exists():
        export(material / "model", folder / "copy")


@torch.no_grad()
def _read_copy(material: Path, folder: Path) -> Any:
    found = find_checkpoint(folder / "copy")
    ids = find_tokenizer(found)("To be, or not to be", return_tensors="pt").input_ids
    model = load_model(found).eval()
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    return ids.tolist(), model(ids).logits.tolist(), generated.tolist()


def _write_page(material: Path, folder: Path) -> None:
    command("inspect", material / "model", "--tokens", 64, "--out", folder / "page")


def _read_page(material: Path, folder: Path) -> Any:
    return (folder / "page" / "index.html").read_text()


WRITERS = {
    "training": training("plain"),
    "stateful training": training("stateful"),
    "training for the best model": training("best"),
    "training on a stream": training("streaming"),
    "token cache": Writer(_write_tokens, _tokens),
    "stream state": Writer(_write_stream, _read_stream),
    "prefix states": Writer(_write_states, _ask),
    "evaluation": Writer(_write_evaluation, _read_evaluation),
    "table of an experiment": Writer(_write_table, _read_table, ways=WAYS_OF_TEXTS),
    "rows of a benchmark": Writer(_write_rows, _read_rows, ways=WAYS_OF_TEXTS),
    "exported model": Writer(_write_copy, _read_copy),
    "inspection": Writer(_write_page, _read_page),
}
