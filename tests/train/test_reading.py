"""A stream shared by ranks: which rank reads what, and how reading resumes."""

import json
import os
import signal
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

from flash_frac.data import Encoder, HubDocuments, StreamingDataset, byte_tokenizer, streaming
from flash_frac.train import FracTrainer, load_recipe, train
from flash_frac.train.reading import Reading
from tests.train.runs import (
    assert_same_weights,
    await_checkpoint,
    finish,
    losses,
    start_together,
    weights,
)
from tests.train.test_resuming import interrupted

# Four shards, the first with four documents more, which are held out. All have 59 tokens.
HELD_OUT = [f"held out {i} ".ljust(58, "h") for i in range(4)]
SHARDS = [[f"shard {k} document {i} ".ljust(58, "abcd"[k]) for i in range(6)] for k in range(4)]
TEXTS = sum(SHARDS, [])  # noqa: RUF017
# Four rows of 32 tokens a step, and the batch that is read ahead: one token in the last document.
STEPS, LENGTH = 10, 32


@pytest.fixture
def write_stream(write_recipe, tmp_path):
    """A function that writes the recipe of a stream, and gives its path."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number, texts in enumerate([HELD_OUT + SHARDS[0], *SHARDS[1:]]):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"part{number}.jsonl").write_text(lines)
    source = {"dataset_name": str(folder), "data_files": None, "streaming": True}
    source |= {"held_out": 0.0, "held_out_documents": len(HELD_OUT), "sequence_length": LENGTH}
    return partial(write_recipe, **source, max_steps=STEPS, save_steps=3, shuffle_buffer=4)


def record(folder, die_at=None):
    """Write what this rank tokenises into a file, and let it die in a step after the third."""
    encode, step = Encoder.encode, FracTrainer.training_step
    file = open(folder / os.environ["RANK"], "a")  # noqa: SIM115

    def recorded(self, texts):
        file.write("".join(json.dumps(text) + "\n" for text in texts))
        file.flush()
        return encode(self, texts)

    def deadly(self, *args, **kwargs):
        if self.state.global_step == die_at:
            # What the run is to go on from.
            await_checkpoint(self.args.output_dir, 3)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, *args, **kwargs)

    Encoder.encode, FracTrainer.training_step = recorded, deadly
    # No more text at a time than is needed.
    streaming.BATCH_CHARACTERS = 1


def run(path, ranks, output, *arguments, die_at=None):
    """The documents that each rank tokenised to train on, in their order."""
    read = output.parent / f"{output.name}-read"
    read.mkdir()
    size = ["--per_device_train_batch_size", 4 // ranks, "--output_dir", output]
    before = partial(record, read, die_at)
    for process in start_together(ranks, path, *size, *arguments, before=before):
        if die_at is None:
            finish(process)
        process.join(120)
    lines = [(read / str(rank)).read_text().splitlines() for rank in range(ranks)]
    texts = [list(map(json.loads, of_rank)) for of_rank in lines]
    for of_rank in texts:
        # All of them evaluate, and none trains on these.
        assert Counter(of_rank[:4]) == Counter(HELD_OUT) and not set(of_rank[4:]) & set(HELD_OUT)
    return [of_rank[4:] for of_rank in texts]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_document_is_tokenised_by_one_rank(write_stream, tmp_path, ranks):
    read = run(write_stream(), ranks, tmp_path / "run")
    assert [len(texts) for texts in read] == [len(TEXTS) // ranks] * ranks
    assert Counter(text for texts in read for text in texts) == Counter(TEXTS)
    assert len(losses(tmp_path / "run")) == STEPS


@pytest.mark.parametrize(
    ("ranks", "shards", "arguments"),
    [
        (2, 4, []),
        pytest.param(2, 3, [], marks=pytest.mark.slow),
        pytest.param(4, 4, ["--fsdp", "true"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_reads_on(write_stream, tmp_path, ranks, shards, arguments):
    """Bit for bit, and of what was read only the document that was begun is tokenised again.

    DDP rearranges its buckets after its first step, and with them the sums over three ranks or
    more: only two of them, or FSDP, find the same bits again.
    """
    path, whole, killed = write_stream(), tmp_path / "whole", tmp_path / "killed"
    for unwanted in range(shards, 4):
        (tmp_path / "source" / f"part{unwanted}.jsonl").unlink()
    read = run(path, ranks, whole, *arguments)
    run(path, ranks, killed, *arguments, die_at=5)
    assert [step for step, _ in losses(killed)] == [1, 2, 3, 4, 5]
    (tmp_path / "killed-read").rename(tmp_path / "before")
    again = run(path, ranks, killed, *arguments)
    trained = 3 * (4 // ranks) * LENGTH
    assert again == [texts[trained // 59 :] for texts in read]
    assert losses(killed) == losses(whole) and len(losses(whole)) == STEPS
    assert_same_weights(weights(killed), weights(whole))


@pytest.mark.parametrize(("shards", "fits"), [(1, True), (3, False), (4, True)])
def test_a_position_of_an_earlier_version(tmp_path, shards, fits):
    """Two readers divided rows then, unless the number of shards was even."""
    for number in range(shards):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    documents = HubDocuments(str(tmp_path), streaming=True)
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    settings |= {"dataloader_num_workers": 2}
    args = SimpleNamespace(**settings, world_size=1, process_index=0, ignore_data_skip=False)
    reading = Reading(StreamingDataset(documents, byte_tokenizer(), 4), args)
    reading.save(tmp_path)
    reading.load(tmp_path)
    before = {"settings": {"ranks": 1, **settings}, "bookmarks": []}
    (tmp_path / "stream_0.json").write_text(json.dumps(before))
    with nullcontext() if fits else pytest.raises(ValueError, match="divided_by rows -> shards"):
        reading.load(tmp_path)


def test_other_ranks_cannot_read_on(write_stream, tmp_path):
    path, folder = write_stream(max_steps=3), tmp_path / "run"
    run(path, 2, folder)
    arguments = ["--output_dir", str(folder), "--max_steps", "4", "--eval_strategy", "no"]
    message = (
        r"checkpoint-3 cannot resume .* \(ranks 2 -> 1\): use the same .* ranks, .* ignore_data"
    )
    with pytest.raises(ValueError, match=message):
        train(load_recipe(path, arguments))
    (folder / "checkpoint-3" / "stream_0.json").unlink()
    arguments += ["--resume_from_checkpoint", str(folder / "checkpoint-3")]
    (folder / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"stream_0.json is missing, as in checkpoints of earlier"):
        train(load_recipe(path, arguments))
    train(load_recipe(path, [*arguments, "--ignore_data_skip", "true"]))
    assert [step for step, _ in losses(folder)] == [1, 2, 3, 4]


def test_batches_of_the_first_rank_are_not_dispatched(write_stream):
    path = write_stream(max_steps=1, accelerator_config={"dispatch_batches": True})
    for process in start_together(2, path):
        process.join(120)
        assert process.exitcode == 1
        said = process.output.read_text()
        assert "stream: set its dispatch_batches to false" in said and "Traceback" not in said


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_is_exact_with_workers_and_passes(write_stream, tmp_path, monkeypatch, workers):
    """40 steps of two rows of 48 tokens are more than two passes over the documents."""
    changes = {"separate_documents": True, "gradient_accumulation_steps": 2, "sequence_length": 48}
    path = write_stream(max_steps=20, dataloader_num_workers=workers, **changes)
    train(load_recipe(path, ["--output_dir", str(tmp_path / "whole")]))
    outputs = ["--output_dir", str(tmp_path / "broken")]
    interrupted(monkeypatch, load_recipe(path, outputs), 19)
    assert (tmp_path / "broken" / "checkpoint-18" / "stream_0.json").exists()
    result = train(load_recipe(path, outputs))
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert_same_weights(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    # Each text, its end, but not what would follow the last.
    held_out = [log["eval_tokens"] for log in result.history if "eval_loss" in log]
    assert held_out == [4 * 58]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": {}, "bookmarks": [{"a": 1}]}'])
def test_a_damaged_position_is_named(write_stream, tmp_path, content):
    path = write_stream(max_steps=3)
    train(load_recipe(path))
    checkpoint = tmp_path / "run" / "checkpoint-3"
    written = json.loads((checkpoint / "stream_0.json").read_text())
    if "a" in content:
        content = json.dumps({**json.loads(content), "settings": written["settings"]})
    (checkpoint / "stream_0.json").write_text(content)
    (checkpoint / "manifest.json").unlink()
    recipe = load_recipe(path, ["--max_steps", "4", "--resume_from_checkpoint", str(checkpoint)])
    with pytest.raises(ValueError, match=r"stream_0\.json (is|must)"):
        train(recipe)
