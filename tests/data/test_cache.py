import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from dataclasses import replace

import pytest

from flash_frac.data import (
    DataArguments,
    Encoder,
    StoreWriter,
    byte_tokenizer,
    dna_tokenizer,
    is_held_out,
    prepare,
    prepare_held_out,
)
from flash_frac.data.drafts import collect_drafts

TEXTS = [f"document {i} " * (i % 5 + 1) for i in range(200)]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def read(store):
    """The texts of a store, from its tokens."""
    ends = zip(store.starts[:-1], store.starts[1:], strict=True)
    documents = [store.tokens(a, b) for a, b in ends]
    assert all(ids[-1] == 2 for ids in documents)
    return [byte_tokenizer().decode(ids[:-1]) for ids in documents]


@pytest.fixture
def arguments(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    return DataArguments(data_files=[path], held_out=0.1, cache_dir=str(tmp_path / "cache"))


def run(arguments, *, seed=0, tokenizer=None):
    return prepare(arguments, tokenizer or byte_tokenizer(), seed=seed, progress=False)


def test_every_document_once(arguments):
    splits = run(arguments)
    held_out = [t for t in TEXTS if is_held_out(t, seed=0, share=0.1)]
    assert read(splits.held_out) == held_out and 5 < len(held_out) < 40
    assert read(splits.train) == [t for t in TEXTS if t not in held_out]
    assert splits.train.meta["sources"][0]["name"].endswith("a.jsonl")


def test_no_held_out(arguments):
    splits = run(replace(arguments, held_out=0.0))
    assert splits.held_out is None and read(splits.train) == TEXTS


def test_split_stays_when_documents_come_and_move(arguments, tmp_path):
    before = set(read(run(arguments).held_out))
    more = write_jsonl(tmp_path / "b.jsonl", [f"new {i}" for i in range(50)] + TEXTS[::-1])
    splits = run(replace(arguments, data_files=[more]))
    after, train = set(read(splits.held_out)), set(read(splits.train))
    assert before <= after and not after & train and not before & train
    assert set(read(run(arguments, seed=1).held_out)) != before


def test_several_files_and_kinds(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.txt").write_text("one\n")
    write_jsonl(tmp_path / "d/b.jsonl", ["two", "three"])
    arguments = DataArguments(data_files=[str(tmp_path / "d")], held_out=0, cache_dir=str(tmp_path))
    assert read(run(arguments).train) == ["one\n", "two", "three"]


def test_a_hit_does_not_tokenise(arguments, monkeypatch, tmp_path):
    first = run(arguments)

    def fail(*_):
        raise AssertionError("the tokenizer was called")

    monkeypatch.setattr(Encoder, "encode", fail)
    second = run(arguments)
    assert second.train.folder == first.train.folder
    # The same content elsewhere, and a tokenizer that was saved and loaded, are the same entry.
    byte_tokenizer().save_pretrained(tmp_path / "t")
    moved = write_jsonl(tmp_path / "moved.jsonl", TEXTS)
    tokenizer = type(byte_tokenizer()).from_pretrained(tmp_path / "t")
    third = run(replace(arguments, data_files=[moved]), tokenizer=tokenizer)
    assert third.held_out.folder == first.held_out.folder
    with pytest.raises(AssertionError, match="was called"):
        run(arguments, seed=1)


def test_whatever_matters_makes_another_entry(arguments, tmp_path):
    folders = {run(arguments).train.folder.parent, run(arguments, seed=1).train.folder.parent}
    folders.add(run(arguments, tokenizer=dna_tokenizer()).train.folder.parent)
    folders.add(run(replace(arguments, held_out=0.2)).train.folder.parent)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[1:])
    folders.add(run(arguments).train.folder.parent)
    assert len(folders) == 5
    # One content, read in three ways.
    rows = "".join(json.dumps({"text": text, "body": text[::-1]}) + "\n" for text in TEXTS)
    (tmp_path / "two.jsonl").write_text(rows)
    (tmp_path / "two.txt").write_text(rows)
    two = replace(arguments, data_files=[str(tmp_path / "two.jsonl")], held_out=0.0)
    plain = replace(two, data_files=[str(tmp_path / "two.txt")])
    assert read(run(two).train) == TEXTS
    assert read(run(replace(two, text_field="body")).train) == [text[::-1] for text in TEXTS]
    assert read(run(plain).train) == [rows]
    # Without a share the seed decides on nothing.
    whole = replace(arguments, held_out=0.0)
    assert run(whole).train.folder == run(whole, seed=1).train.folder


def test_held_out_files(arguments, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", ["x", "y"])
    named = replace(arguments, held_out_files=[other])
    splits = run(named)
    assert read(splits.train) == TEXTS and read(splits.held_out) == ["x", "y"]
    assert read(prepare_held_out(named, byte_tokenizer(), progress=False)) == ["x", "y"]
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    with pytest.raises(ValueError, match=r"held_out_files: .*copy\.jsonl has the same content"):
        run(replace(arguments, held_out_files=[str(tmp_path / "copy.jsonl")]))
    with pytest.raises(ValueError, match="held_out_files must be given"):
        prepare_held_out(arguments, byte_tokenizer())


def test_empty_splits_are_errors(arguments, tmp_path):
    train = next(t for t in TEXTS if not is_held_out(t, seed=0, share=0.1))
    held = next(t for t in TEXTS if is_held_out(t, seed=0, share=0.1))
    for text, message in [
        (train, "selects none of 1 documents"),
        (held, "selects all 1 documents"),
    ]:
        one = write_jsonl(tmp_path / "one.jsonl", [text])
        with pytest.raises(ValueError, match=rf"held_out is 0\.1.*{message}.*set held_out to 0"):
            run(replace(arguments, data_files=[one]))
    assert os.listdir(tmp_path / "cache") == []


def test_a_broken_file_leaves_nothing(arguments, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text"')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: malformed JSON"):
        run(arguments)
    assert os.listdir(tmp_path / "cache") == []


# Forked, a process need not import everything anew.
FORK = multiprocessing.get_context("fork")


def test_two_processes_at_once(arguments, tmp_path):
    barrier, answers = FORK.Barrier(2), FORK.SimpleQueue()

    def work():
        close = StoreWriter.close

        def close_together(writer, meta):
            # Neither has finished while the other has yet to begin.
            barrier.wait(timeout=60)
            close(writer, meta)

        StoreWriter.close = close_together
        store = run(arguments).train
        answers.put((store.num_tokens, str(store.folder)))

    both = [FORK.Process(target=work) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert answers.get() == answers.get()
    assert len(os.listdir(tmp_path / "cache")) == 1
    assert read(run(arguments).train) == [t for t in TEXTS if not is_held_out(t, seed=0, share=0.1)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interruption_leaves_nothing_to_read(arguments, tmp_path, how):
    reached = FORK.Event()

    def work():
        close = StoreWriter.close

        def close_one(writer, meta):
            close(writer, meta)
            reached.set()
            time.sleep(60)

        StoreWriter.close = close_one
        # A shell may have had its background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(arguments)

    process = FORK.Process(target=work)
    process.start()
    assert reached.wait(timeout=60)
    os.kill(process.pid, how)
    process.join(timeout=60)
    assert process.exitcode not in (0, None)
    left = os.listdir(tmp_path / "cache")
    # A kill leaves its draft, which is hidden and never looked at; an interruption cleans up.
    assert all(name.startswith(".") for name in left) and len(left) == (how == signal.SIGKILL)
    (tmp_path / "cache" / ".someone.else").mkdir()
    assert read(run(arguments).held_out) == [t for t in TEXTS if is_held_out(t, seed=0, share=0.1)]
    # The next run collects what was left, and nothing else.
    hidden = [name for name in os.listdir(tmp_path / "cache") if name.startswith(".")]
    assert hidden == [".someone.else"]


def test_the_draft_of_a_running_process_stays(arguments, tmp_path, monkeypatch):
    """Even when another run, for other data, looks for leftovers meanwhile."""
    write, seen = StoreWriter.write, []

    def meanwhile(writer, *pieces, **options):
        collect_drafts(tmp_path / "cache")
        seen.append(writer.folder.is_dir())
        return write(writer, *pieces, **options)

    monkeypatch.setattr(StoreWriter, "write", meanwhile)
    run(arguments)
    assert seen and all(seen) and len(os.listdir(tmp_path / "cache")) == 1


def test_a_cache_that_cannot_be_written(arguments, tmp_path):
    (tmp_path / "file").write_text("x")
    blocked = replace(arguments, cache_dir=str(tmp_path / "file/cache"))
    with pytest.raises(ValueError, match=r"cache_dir: cannot write tokens to .*file/cache.*set"):
        run(blocked)


def test_a_full_disk(arguments, tmp_path):
    """A limit on the size of files stands for the disk; a real write fails."""
    answers = FORK.SimpleQueue()

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            run(arguments)
        except ValueError as error:
            answers.put(str(error))

    process = FORK.Process(target=work)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0 and not answers.empty()
    message = answers.get()
    assert message.startswith(f"cache_dir: cannot write tokens to {tmp_path / 'cache'} (")
    assert "File too large; it needs more than" in message and "are free on that disk" in message
    assert "set cache_dir to another folder" in message
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_advice_on_a_damaged_entry_works(arguments, split):
    splits = run(arguments)
    texts, folder = read(splits.train), getattr(splits, split).folder
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[0] ^= 1
    (folder / "tokens.bin").write_bytes(content)
    advice = rf"{folder}/tokens\.bin is damaged.*; delete (\S+) to have it written again"
    with pytest.raises(ValueError, match=advice):
        run(arguments)
    # Half of it is not enough, and the advice stays true.
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"; delete (\S+) to have") as caught:
        run(arguments)
    shutil.rmtree(re.search(r"; delete (\S+) to have", str(caught.value))[1])
    assert read(run(arguments).train) == texts


def test_progress_bar_counts_bytes(arguments, capsys, monkeypatch):
    monkeypatch.setattr("flash_frac.data.cache.BAR_DELAY", 0)
    prepare(arguments, byte_tokenizer(), seed=0)
    shown = capsys.readouterr().err
    assert "tokenising: 100%" in shown
    run(replace(arguments, held_out=0.3))
    assert capsys.readouterr().err == ""


def test_streaming_has_no_store():
    arguments = DataArguments(dataset_name="user/books", streaming=True)
    with pytest.raises(ValueError, match=r"streaming: .*use flash_frac\.data\.stream"):
        run(arguments)
