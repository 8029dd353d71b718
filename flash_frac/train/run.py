"""Train the model of a recipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryFile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, TrainerCallback, set_seed
from transformers.utils import logging

from flash_frac.beginning import beginning, set_beginning
from flash_frac.data import (
    LaneDataset,
    PackedDataset,
    check_vocabulary,
    fingerprint_of,
    load_tokenizer,
    prepare,
    stream,
)
from flash_frac.files import read_object, write_text
from flash_frac.lock import locked
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.models.loading import load_model
from flash_frac.models.quantizing import is_quantized
from flash_frac.provenance import provenance
from flash_frac.train import checkpoint as checkpoints
from flash_frac.train.arguments import ModelArguments
from flash_frac.train.course import AlreadyTrained, saying_what_is_kept
from flash_frac.train.heartbeat import Heartbeat, beating
from flash_frac.train.others import LEFT_OUT, describe_model
from flash_frac.train.parallel import naming_lost_ranks, on_main
from flash_frac.train.recipe import Recipe
from flash_frac.train.resuming import check_asked, newest_whole
from flash_frac.train.saving import finishing
from flash_frac.train.trainer import FracTrainer
from flash_frac.train.watching import draw_curves

RUN_NAME = "run.json"
# Settings that determine the sequences of a step, and the model: a run only resumes if they are
# unchanged. Trainer changes use_cache, which does not matter here.
_FIXED = ("seed", "data_seed", "per_device_train_batch_size", "gradient_accumulation_steps")
# Settings that a checkpoint's optimizer keeps, so a resumed run cannot change them. It may change
# the schedule, for example to decay from here: checkpoints only keep the schedule's step.
_OPTIMIZER = ("optim", "optim_args", "learning_rate", "weight_decay")
_OPTIMIZER += ("adam_beta1", "adam_beta2", "adam_epsilon")
_NOT_DATA = ("cache_dir", "add_bos_token")
_NOT_MODEL = ("use_cache",)


@dataclass(frozen=True)
class TrainResult:
    """The result of a run: the model, its tokenizer, the data and all logs.

    Attributes:
        splits: `train` and `held_out`, token stores (or streams).
        history: the logs, each with its `step`.
        final: the folder of the final model, for `from_pretrained`.
        is_main: whether this process writes files and prints.
    """

    model: Any
    tokenizer: Any
    splits: Any
    history: list[dict[str, Any]]
    output_dir: Path
    final: Path
    is_main: bool


def train(recipe: Recipe, callbacks: Sequence[TrainerCallback] = ()) -> TrainResult:
    """Train a recipe, or resume it from its last checkpoint, and save the result.

    Args:
        callbacks: transformers callbacks, called after flash-frac's own.

    Example:
        >>> result = train(load_recipe("small"))
        >>> result.model.generate(...)
    """
    # Progress bars for loading and saving files would bury that of the run.
    logging.disable_progress_bar()
    output_dir = _output_folder(recipe)
    args = recipe.training
    with naming_lost_ranks(args), beating(args) as heart, ExitStack() as stack:
        on_main(args, lambda: stack.enter_context(locked(output_dir)))
        return _run(recipe, output_dir, callbacks, heart)


def _run(
    recipe: Recipe,
    output_dir: Path,
    callbacks: Sequence[TrainerCallback],
    heart: Heartbeat | None,
) -> TrainResult:
    """Do the work of `train` once output_dir is locked."""
    args = recipe.training
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    set_beginning(tokenizer, recipe.data.add_bos_token)
    set_seed(args.seed)
    model = build_model(recipe.model, tokenizer)
    order = _order(recipe, tokenizer)
    resume = on_main(args, lambda: _resume_point(recipe, order, model.config, output_dir))
    with saying_what_is_kept(args):
        build = partial(build_data, recipe, tokenizer)
        # One process tokenises, and the others read its cache.
        splits, train_dataset, eval_dataset = heart.in_turn(build) if heart else build()
    order["content"] = on_main(args, lambda: _content(recipe, splits, resume, output_dir))
    _check_size(recipe, train_dataset)
    trainer = FracTrainer(
        model,
        recipe,
        tokenizer=tokenizer,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    for callback in callbacks:
        trainer.add_callback(callback)
    if args.should_save:
        checkpoints.clear_leftovers(output_dir)
        _write_run(recipe, order, model, output_dir / RUN_NAME)
        print(_describe(model, splits, None if resume else output_dir), flush=True)
    with saying_what_is_kept(args, trainer), finishing(trainer.saver):
        final = _train(trainer, resume, output_dir)
    if args.should_save and (why := draw_curves(output_dir)) is not None:
        print(why, flush=True)
    history = trainer.state.log_history
    return TrainResult(
        trainer.frac_model(), tokenizer, splits, history, output_dir, final, args.should_save
    )


def _train(trainer: FracTrainer, resume: Path | None, output_dir: Path) -> Path:
    """Run the remaining steps and the last evaluation; save the final model and return its path."""
    args = trainer.args
    try:
        trainer.train_from(resume)
    except AlreadyTrained:
        if args.should_save:
            print(f"This run is finished: {resume} is its last checkpoint", flush=True)
            # The run may have been killed after its last checkpoint, before this line.
            best = trainer.state.best_model_checkpoint
            checkpoints.rotate(output_dir, args.save_total_limit, best)
        trainer.load_best()
    except UnpicklingError as error:
        raise ValueError(
            f"{resume} is refused: a torch file in it is damaged, or holds code, which is not run"
        ) from error
    seen = [log["step"] for log in trainer.state.log_history if "eval_loss" in log]
    wanted = trainer.eval_dataset is not None and args.eval_strategy != "no"
    if wanted and trainer.state.global_step not in seen:
        trainer.evaluate()
    return trainer.save_final()


def _describe(model: Any, splits: Any, new: Path | None) -> str:
    """The console's summary of a starting run; `new` is the folder of one that does not resume."""
    lines = [f"Model: {describe_model(model.config, model.num_parameters())}"]
    if not isinstance(model, FracForCausalLM):
        lines.append(LEFT_OUT)
    for name, store in (("Training text", splits.train), ("Held out", splits.held_out)):
        # Streams have no counts.
        if hasattr(store, "num_tokens"):
            documents = f"{store.num_documents:,} document{'s' * (store.num_documents != 1)}"
            lines.append(f"{name}: {store.num_tokens:,} tokens in {documents}")
    return "\n".join([*lines, *([f"New run in {new}"] if new else [])])


def build_model(arguments: ModelArguments, tokenizer: Any) -> Any:
    """The model of a recipe; a fresh one gets the tokenizer's special tokens."""
    if arguments.model_name_or_path is not None:
        model = load_model(arguments.model_name_or_path, argument="model_name_or_path")
        if not isinstance(model, FracForCausalLM):
            raise ValueError(
                f"model_name_or_path must be a Frac language model, got {type(model).__name__}"
            )
        if is_quantized(model):
            raise ValueError(
                f"model_name_or_path {arguments.model_name_or_path} has quantised weights, which "
                "have no gradient; name the checkpoint that they were made from"
            )
        check_vocabulary(tokenizer, model.config.vocab_size)
        return model
    config = arguments.config()
    check_vocabulary(tokenizer, config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    if isinstance(config, FracConfig):
        return FracForCausalLM(config)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def build_data(recipe: Recipe, tokenizer: Any) -> tuple[Any, Any, Any]:
    """The splits of a recipe's text, the training dataset and the evaluation dataset."""
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
    if splits.held_out is None and args.eval_strategy != "no":
        # The recipe has already refused this for text files.
        raise ValueError(
            f"eval_strategy is set, but {data.prepared_data} has no held-out documents: prepare "
            "the data with --held-out-documents, or set eval_strategy to 'no'"
        )
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
            f"tokens, fewer than one batch of {batch}: add more text, or lower sequence_length "
            "or per_device_train_batch_size"
        )


def _output_folder(recipe: Recipe) -> Path:
    folder = Path(recipe.training.output_dir or "trainer_output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # An unnamed file, so that a killed process leaves nothing behind.
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"output_dir {folder} cannot be written to: {error}") from error
    return folder


def _resume_point(
    recipe: Recipe, order: dict[str, Any], config: PreTrainedConfig, folder: Path
) -> Path | None:
    """The checkpoint to resume from, if the folder holds one of the same run."""
    asked = recipe.training.resume_from_checkpoint
    if asked is not None:
        found = check_asked(Path(asked))
        _check_optimizer(recipe, found.parent / RUN_NAME)
        return found
    last = checkpoints.last_checkpoint(folder)
    if last is None or not (folder / RUN_NAME).exists():
        return newest_whole(folder)
    before = _settings_of_run(folder / RUN_NAME)
    # Compare the content of the configuration, not its path, which differs between machines.
    now = _model_settings(config) | order
    changed = [
        f"{key} {before.get(key)!r} -> {now[key]!r}" for key in now if before.get(key) != now[key]
    ]
    if changed:
        raise ValueError(
            f"output_dir {folder} holds a run with other settings ({'; '.join(changed)}) in its "
            f"{RUN_NAME}: choose another output_dir, or resume it anyway with "
            f"--resume_from_checkpoint {last}"
        )
    _check_optimizer(recipe, folder / RUN_NAME)
    return newest_whole(folder)


def _check_optimizer(recipe: Recipe, path: Path) -> None:
    """ValueError if settings differ from those of the run of this file, and would not act."""
    if not path.exists():
        return
    before = read_object(path, {}).get("recipe", {}).get("training", {})
    now = json.loads(json.dumps(recipe.training.to_dict(), default=str))
    changed = [
        f"{name} {before[name]!r} -> {now[name]!r}"
        for name in _OPTIMIZER
        if name in before and before[name] != now[name]
    ]
    if changed:
        raise ValueError(
            f"{'; '.join(changed)}: a run that resumes keeps the optimizer of its checkpoint. "
            "Restore the settings, or start a run from its weights with --model_name_or_path and "
            "another --output_dir"
        )


def _content(recipe: Recipe, splits: Any, resume: Path | None, folder: Path) -> str | None:
    """What identifies the training text, which must not change when a run resumes.

    Runs of earlier versions did not record it, so theirs is not compared.
    """
    content, record = splits.content, folder / RUN_NAME
    if resume is None or recipe.training.resume_from_checkpoint or not record.exists():
        return content
    if _settings_of_run(record).get("content", content) != content:
        name = "dataset_name" if recipe.data.data_files is None else "data_files"
        raise ValueError(
            f"output_dir {folder} holds a run on other training text: the content of {name} or the "
            f"tokenizer has changed since {RUN_NAME} was written. Restore it, choose another "
            f"output_dir, or resume on the new text with --resume_from_checkpoint {resume}"
        )
    return content


def _model_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The configuration fields that define the model, as JSON values."""
    names = [name for name in type(config).__annotations__ if name not in _NOT_MODEL]
    return json.loads(json.dumps({name: getattr(config, name) for name in names}, default=str))


def _settings_of_run(path: Path) -> dict[str, Any]:
    try:
        written = read_object(path, {"model": dict, "order": dict})
    except ValueError as error:
        raise ValueError(
            f"{error}; it records the settings of the run: restore it, or delete it to resume "
            "without comparing them"
        ) from error
    return {**written["model"], **written["order"]}


def _order(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """All settings that determine which sequences each step sees, and the initial weights."""
    data = {k: v for k, v in dataclasses.asdict(recipe.data).items() if k not in _NOT_DATA}
    # Replaces add_bos_token; None equals runs of versions that did not record it.
    data["beginning"] = beginning(tokenizer) or None
    if recipe.data.prepared_data is not None:
        # Compare its content: its path may differ on another machine.
        data["prepared_data"] = fingerprint_of(recipe.data.prepared_data)
    args = recipe.training
    fixed = {name: getattr(args, name) for name in _FIXED}
    parallel = {"processes": args.world_size, "context_parallel_size": args.context_parallel_size}
    if recipe.data.streaming:
        # Every checkpoint of a stream records it with its position, and `Reading` compares it.
        del parallel["processes"]
    start = {"model_name_or_path": recipe.model.model_name_or_path}
    return {**start, **data, **fixed, **parallel}


def _write_run(recipe: Recipe, order: dict[str, Any], model: Any, path: Path) -> None:
    """Write the resolved recipe, versions and commit, so that the run can be reproduced."""
    content = {
        "recipe": recipe.as_dict(),
        "order": order,
        "model": {"parameters": model.num_parameters(), **model.config.to_dict()},
        "made_with": provenance(),
    }
    write_text(path, json.dumps(content, indent=2, default=str))
