"""`frac train --dry_run`: show the plan of a run and its first batch without running it.

The model is built on the meta device, only the first documents are tokenised, and nothing is
written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from flash_frac.beginning import set_beginning
from flash_frac.data import (
    Collator,
    PackedDataset,
    check_vocabulary,
    load_tokenizer,
    prepare,
    stream,
)
from flash_frac.data.encoding import mark_held_out
from flash_frac.data.hub import HubDocuments
from flash_frac.data.sources import find_files, read_documents
from flash_frac.data.streaming import StreamingDataset
from flash_frac.train.memory import GIB
from flash_frac.train.parallel import naming_lost_ranks, on_main
from flash_frac.train.plan import PAPER_MEMORY, config_of, plan_run
from flash_frac.train.recipe import Recipe

# Number of sequences shown from the batch, and of characters from each one's start and end.
SHOWN, CHARACTERS = 4, 100


def dry_run(recipe: Recipe) -> list[str]:
    """Lines for the console: the plan, then the decoded first batch; the same on all processes.

    Example: `print("\\n".join(dry_run(load_recipe("small"))))`
    """
    args = recipe.training
    with naming_lost_ranks(args):
        return on_main(args, lambda: [*_plan_lines(recipe), *_batch_lines(recipe)])


def _plan_lines(recipe: Recipe) -> list[str]:
    memory = PAPER_MEMORY
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(recipe.training.device).total_memory / GIB
    return plan_run(recipe, gpu_memory=round(memory, 1)).lines()


def _batch_lines(recipe: Recipe) -> list[str]:
    data, args = recipe.data, recipe.training
    tokenizer = load_tokenizer(data.tokenizer)
    set_beginning(tokenizer, data.add_bos_token)
    check_vocabulary(tokenizer, config_of(recipe).vocab_size)
    size = args.per_device_train_batch_size
    dataset = _first_rows(recipe, tokenizer)
    items = list(islice(dataset, size))
    if len(items) < size:
        raise ValueError(
            f"the training text gives {len(items)} sequences of {data.sequence_length} tokens, "
            f"fewer than one batch of {size}: add more text, or lower sequence_length or "
            "per_device_train_batch_size"
        )
    # Lanes are assigned once all documents are known, so this is not their first batch.
    batch = Collator(data.separate_documents)(items)
    rows = batch["input_ids"].reshape(size, -1)
    begins = sum(len(item["document_starts"]) for item in items)
    order = "as the first GPU reads it" if data.streaming else "in the order of the text"
    rest = "" if data.streaming else " (a run shuffles)"
    lines = [
        f"batch     {size} x {rows.shape[1]} tokens, in which {begins} documents begin; {order}"
        f"{rest}:"
    ]
    for number, row in enumerate(rows[:SHOWN].tolist(), 1):
        text = tokenizer.decode(row)
        lines.append(f"    {number}     {text[:CHARACTERS]!r} ... {text[-CHARACTERS:]!r}")
    return lines


def _first_rows(recipe: Recipe, tokenizer: Any) -> Iterable[Any]:
    data = recipe.data
    if data.streaming:
        return _stream(recipe, tokenizer)
    if data.prepared_data is not None:
        train = prepare(data, tokenizer, seed=recipe.training.seed).train
        rows = PackedDataset(train, data.sequence_length)
        return (rows[n] for n in range(len(rows)))
    return _beginning(recipe, tokenizer)


def _stream(recipe: Recipe, tokenizer: Any) -> StreamingDataset:
    """The stream that the first worker of this process would read."""
    args, workers = recipe.training, max(recipe.training.dataloader_num_workers, 1)
    # Held-out files would all be tokenised and written to the cache.
    data = dataclasses.replace(recipe.data, held_out_files=None)
    ranks, rank = args.world_size * workers, args.process_index * workers
    return stream(data, tokenizer, seed=args.seed, rank=rank, ranks=ranks, progress=False).train


def _beginning(recipe: Recipe, tokenizer: Any) -> StreamingDataset:
    """The first training documents, in the order of their source."""
    data = recipe.data
    share = 0.0 if data.held_out_files is not None else data.held_out or 0.0
    texts = mark_held_out(_texts(recipe), seed=recipe.training.seed, share=share)
    documents = (text for held_out, text in texts if not held_out)
    return StreamingDataset(documents, tokenizer, data.sequence_length)


def _texts(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    if data.data_files is not None:
        for file in find_files(data.data_files, argument="data_files"):
            yield from read_documents(file, text_field=data.text_field)
    else:
        assert data.dataset_name is not None
        # Streaming fetches only the beginning of the dataset.
        yield from HubDocuments(
            data.dataset_name,
            data.dataset_config,
            split=data.dataset_split,
            streaming=True,
            text_field=data.text_field,
        )
