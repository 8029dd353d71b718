"""From a recipe to a trained model."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryFile
from typing import Any

from transformers import set_seed
from transformers.utils import logging

from flash_frac.beginning import beginning, set_beginning
from flash_frac.data import (
    LaneDataset,
    PackedDataset,
    check_vocabulary,
    load_tokenizer,
    prepare,
    stream,
)
from flash_frac.files import read_object, write_text
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models.loading import load_model
from flash_frac.provenance import provenance
from flash_frac.train import checkpoint as checkpoints
from flash_frac.train.arguments import ModelArguments
from flash_frac.train.course import AlreadyTrained, saying_what_is_kept
from flash_frac.train.lock import locked
from flash_frac.train.parallel import naming_lost_ranks, on_main
from flash_frac.train.recipe import Recipe
from flash_frac.train.resuming import check_asked, newest_whole
from flash_frac.train.trainer import FracTrainer

RUN_NAME = "run.json"
# Settings that decide which sequences a step sees, and those that make the model: a run goes on
# with the same ones only. Trainer changes use_cache, which is of no consequence here.
_FIXED = ("seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps")
_NOT_DATA = ("cache_dir", "add_bos_token")
_MODEL_FIELDS = tuple(name for name in FracConfig.__annotations__ if name != "use_cache")


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves: the model, its tokenizer, the data and all logs.

    Attributes:
        splits: `train` and `held_out`, token stores (or streams).
        history: the logs, each with its `step`.
        final: the folder for `from_pretrained`.
        is_main: whether this process is the one that writes and prints.
    """

    model: FracForCausalLM
    tokenizer: Any
    splits: Any
    history: list[dict[str, Any]]
    output_dir: Path
    final: Path
    is_main: bool


def train(recipe: Recipe) -> TrainResult:
    """Train by a recipe, or go on from its last checkpoint, and save the result.

    Example:
        >>> result = train(load_recipe("small"))
        >>> result.model.generate(...)
    """
    # Of loading and saving files; a bar for each would bury that of the run.
    logging.disable_progress_bar()
    output_dir = _output_folder(recipe)
    with naming_lost_ranks(recipe.training), ExitStack() as stack:
        on_main(recipe.training, lambda: stack.enter_context(locked(output_dir)))
        return _run(recipe, output_dir)


def _run(recipe: Recipe, output_dir: Path) -> TrainResult:
    """`train`, in a folder that no other run writes to."""
    args = recipe.training
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    set_beginning(tokenizer, recipe.data.add_bos_token)
    set_seed(args.seed)
    model = build_model(recipe.model, tokenizer)
    order = _order(recipe, tokenizer)
    resume = on_main(args, lambda: _resume_point(recipe, order, model.config, output_dir))
    # The first process tokenises; the others find its cache.
    with saying_what_is_kept(args), args.main_process_first(desc="tokenising"):
        splits, train_dataset, eval_dataset = build_data(recipe, tokenizer)
    _check_size(recipe, train_dataset)
    trainer = FracTrainer(
        model,
        recipe,
        tokenizer=tokenizer,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    if args.should_save:
        checkpoints.clear_leftovers(output_dir)
        _write_run(recipe, order, model, output_dir / RUN_NAME)
        print(_describe(model, splits, None if resume else output_dir), flush=True)
    with saying_what_is_kept(args, trainer):
        final = _train(trainer, resume, output_dir)
    history = trainer.state.log_history
    return TrainResult(
        trainer.frac_model(), tokenizer, splits, history, output_dir, final, args.should_save
    )


def _train(trainer: FracTrainer, resume: Path | None, output_dir: Path) -> Path:
    """All steps that are left, the last evaluation if it is wanted, and the final model."""
    args = trainer.args
    try:
        trainer.train_from(resume)
    except AlreadyTrained:
        if args.should_save:
            print(f"This run is finished: {resume} is its last checkpoint", flush=True)
            # It may have been killed between its last checkpoint and this.
            best = trainer.state.best_model_checkpoint
            checkpoints.rotate(output_dir, args.save_total_limit, best)
        trainer.load_best()
    except UnpicklingError as error:
        raise ValueError(
            f"{resume} is refused: a file of torch in it is damaged or holds code, which is not run"
        ) from error
    seen = [log["step"] for log in trainer.state.log_history if "eval_loss" in log]
    wanted = trainer.eval_dataset is not None and args.eval_strategy != "no"
    if wanted and trainer.state.global_step not in seen:
        trainer.evaluate()
    return trainer.save_final()


def _describe(model: FracForCausalLM, splits: Any, new: Path | None) -> str:
    """What begins, for the console; `new` is the folder of a run that does not resume."""
    # In the order in which they first come.
    mixers = Counter(model.config.mixer_types).items()
    layers = ", ".join(f"{count} {name}" for name, count in mixers)
    lines = [f"Model: {model.num_parameters():,} parameters, layers: {layers}"]
    for name, store in (("Training text", splits.train), ("Held out", splits.held_out)):
        # A stream counts neither.
        if hasattr(store, "num_tokens"):
            documents = f"{store.num_documents:,} document{'s' * (store.num_documents != 1)}"
            lines.append(f"{name}: {store.num_tokens:,} tokens in {documents}")
    return "\n".join([*lines, *([f"New run in {new}"] if new else [])])


def build_model(arguments: ModelArguments, tokenizer: Any) -> FracForCausalLM:
    """The model of a recipe, its special tokens those of the tokenizer."""
    if arguments.model_name_or_path is not None:
        model = load_model(arguments.model_name_or_path, argument="model_name_or_path")
        if not isinstance(model, FracForCausalLM):
            raise ValueError(
                f"model_name_or_path must be a Frac language model, got {type(model).__name__}"
            )
        check_vocabulary(tokenizer, model.config.vocab_size)
        return model
    config = arguments.config()
    check_vocabulary(tokenizer, config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    return FracForCausalLM(config)


def build_data(recipe: Recipe, tokenizer: Any) -> tuple[Any, Any, Any]:
    """The splits of a recipe's text, and the datasets to train and to evaluate on."""
    data, args = recipe.data, recipe.training
    length = data.sequence_length
    if data.streaming:
        streams = stream(
            data,
            tokenizer,
            seed=args.seed,
            rank=args.process_index,
            ranks=args.world_size,
            progress=not args.disable_tqdm,
        )
        return streams, streams.train, streams.held_out
    splits = prepare(data, tokenizer, seed=args.seed, progress=not args.disable_tqdm)
    held_out = splits.held_out and PackedDataset(splits.held_out, length, keep_tail=True)
    if not data.stateful:
        return splits, PackedDataset(splits.train, length), held_out
    lanes = args.per_device_train_batch_size * args.world_size
    return splits, LaneDataset(splits.train, length, lanes, seed=args.seed), held_out


def _check_size(recipe: Recipe, dataset: Any) -> None:
    args = recipe.training
    if not hasattr(dataset, "__len__"):
        return
    replicas = args.world_size // args.context_parallel_size
    batch = args.per_device_train_batch_size * replicas
    if len(dataset) < batch:
        raise ValueError(
            f"the training text gives {len(dataset)} sequences of {recipe.data.sequence_length} "
            f"tokens, fewer than one batch of {batch}: bring more text, or lower sequence_length "
            "or per_device_train_batch_size"
        )


def _output_folder(recipe: Recipe) -> Path:
    folder = Path(recipe.training.output_dir or "trainer_output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name, so that a process that is killed leaves none.
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"output_dir {folder} cannot be written to: {error}") from error
    return folder


def _resume_point(
    recipe: Recipe, order: dict[str, Any], config: FracConfig, folder: Path
) -> Path | None:
    """The checkpoint to go on from, if this folder holds one of the same run."""
    asked = recipe.training.resume_from_checkpoint
    if asked is not None:
        return check_asked(Path(asked))
    last = checkpoints.last_checkpoint(folder)
    if last is None or not (folder / RUN_NAME).exists():
        return newest_whole(folder)
    before = _settings_of_run(folder / RUN_NAME)
    # The content of a configuration counts and not its path, which is another on other machines.
    now = {name: getattr(config, name) for name in _MODEL_FIELDS} | order
    changed = [
        f"{key} {before.get(key)!r} -> {now[key]!r}" for key in now if before.get(key) != now[key]
    ]
    if changed:
        raise ValueError(
            f"output_dir {folder} holds a run with other settings ({'; '.join(changed)}) in its "
            f"{RUN_NAME}: choose another output_dir, or resume it all the same with "
            f"--resume_from_checkpoint {last}"
        )
    return newest_whole(folder)


def _settings_of_run(path: Path) -> dict[str, Any]:
    try:
        written = read_object(path, {"model": dict, "order": dict})
    except ValueError as error:
        raise ValueError(
            f"{error}; it says which settings the run has: restore it, or delete it to resume "
            "without a comparison"
        ) from error
    return {**written["model"], **written["order"]}


def _order(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """All settings but the model's that decide which sequences it sees in which step."""
    data = {k: v for k, v in dataclasses.asdict(recipe.data).items() if k not in _NOT_DATA}
    # Instead of add_bos_token; None as in runs that were written before there was any.
    data["beginning"] = beginning(tokenizer) or None
    args = recipe.training
    fixed = {name: getattr(args, name) for name in _FIXED}
    parallel = {"processes": args.world_size, "context_parallel_size": args.context_parallel_size}
    if recipe.data.streaming:
        # Every checkpoint has it beside the position in the stream, and cannot do without.
        del parallel["processes"]
    start = {"model_name_or_path": recipe.model.model_name_or_path}
    return {**start, **data, **fixed, **parallel}


def _write_run(recipe: Recipe, order: dict[str, Any], model: FracForCausalLM, path: Path) -> None:
    """The resolved recipe, versions and commit, for whoever wants to repeat the run."""
    content = {
        "recipe": recipe.as_dict(),
        "order": order,
        "model": {"parameters": model.num_parameters(), **model.config.to_dict()},
        "made_with": provenance(),
    }
    write_text(path, json.dumps(content, indent=2, default=str))
