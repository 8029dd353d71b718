"""`frac quickstart`: train a small byte-level language model in minutes on a CPU, and inspect it.

The project's trainer trains it on presidents' addresses (`corpus`), with the recipe and model
configuration in this folder. It is then compared with a trigram model on later addresses, with
contexts up to 64 times as long as in training.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flash_frac.extras import require
from flash_frac.files import check_folder, write_bytes, write_json, write_text
from flash_frac.quickstart import corpus

if TYPE_CHECKING:
    from flash_frac.inspect import MemoryReport
    from flash_frac.train import TrainResult

HERE = Path(__file__).parent
# Approximate time of training on two cores, with the steps of `recipe.yaml`.
MINUTES = 3.0
CONTEXTS = (1, 4, 16, 64)
PROMPT = "My fellow Americans, "
SAMPLE_BYTES = 400
# Tokens on which the model's memory is measured; also the largest lag.
MEMORY_TOKENS = 4096


def run(
    output_dir: str | Path, minutes: float = MINUTES, *, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Train and evaluate the model, and write everything to a folder.

    Args:
        output_dir: folder for the model (`final`), figures, `results.json`, logs and the recipe.
        minutes: approximate time of training on two cores; it only sets the number of steps.
        overrides: arguments of `frac train` on top of the recipe, such as "--learning_rate=1e-3".

    Returns:
        The content of `results.json`.

    Example: `run("quickstart")["trigram_bits_per_byte"]`
    """
    if not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    # A missing package must be reported before training, not after it.
    require("accelerate", "train", "the quickstart")
    require("matplotlib", "plot", "the quickstart")
    from flash_frac.train import load_recipe, train

    folder = Path(output_dir)
    recipe = load_recipe(_prepare(folder, minutes), overrides)
    started = time.perf_counter()
    result = train(recipe)
    seconds = time.perf_counter() - started
    say("\nReading the validation text in windows up to 64 times as long as in training ...")
    length = recipe.data.sequence_length
    results = {
        "parameters": result.model.num_parameters(),
        "steps": result.history[-1]["step"],
        "training_seconds": round(seconds, 1),
        "sequence_length": length,
        **_bits(result, length),
        "sample": _sample(result),
    }
    write_json(folder / "results.json", results)
    _draw(result, results, folder)
    say(_closing(results, folder))
    return results


def say(text: str) -> None:
    """Print and flush."""
    print(text, flush=True)


def _prepare(folder: Path, minutes: float) -> Path:
    """Write the texts, the model configuration and the complete recipe; return its path."""
    data = folder / "data"
    training, validation = corpus.split(corpus.load())
    text = (HERE / "recipe.yaml").read_text(encoding="utf-8")
    steps = int(require("yaml", "train", "the quickstart").safe_load(text)["max_steps"])
    paths = {
        "config_name": folder / "config.json",
        "data_files": [data / "train.jsonl"],
        "held_out_files": [data / "validation.jsonl"],
        "cache_dir": data / "tokens",
        "output_dir": folder,
    }
    lines = [text.rstrip(), "", "# Paths of this run."]
    # JSON is valid YAML.
    lines += [f"{key}: {json.dumps(value, default=_absolute)}" for key, value in paths.items()]
    path = folder / "recipe.yaml"
    chosen = max(1, round(steps * minutes / MINUTES))
    whole = "\n".join(lines).replace(f"max_steps: {steps}", f"max_steps: {chosen}")
    _check_folder(folder, whole + "\n")
    corpus.write(training, data / "train.jsonl")
    corpus.write(validation, data / "validation.jsonl")
    write_bytes(folder / "config.json", (HERE / "config.json").read_bytes())
    write_text(path, whole + "\n")
    years = [address.year for address in validation]
    say(
        f"{len(training)} addresses for training, {len(validation)} from {min(years)} to "
        f"{max(years)} for validation."
    )
    return path


def _check_folder(folder: Path, recipe: str) -> None:
    """Raise ValueError unless a folder is empty or has this recipe, with any number of steps."""
    check_folder(folder, "output_dir")
    if not folder.exists() or not any(folder.iterdir()):
        return
    path = folder / "recipe.yaml"
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    texts = [re.sub(r"(?m)^max_steps: \d+$", "", text) for text in (before, recipe)]
    if texts[0] != texts[1]:
        raise ValueError(
            f"output_dir {folder} already holds something else, so nothing was written to it: "
            "name a new folder with --output-dir"
        )


def _absolute(path: Path) -> str:
    return str(path.resolve())


def _bits(result: TrainResult, length: int) -> dict[str, Any]:
    """Bits per byte of the model at each context, and of the trigram, on the same bytes.

    A token is a byte; for both models, the end of a document counts as one too.
    """
    from flash_frac.evals import bits_per_byte, loss_by_length, scored_tokens
    from flash_frac.quickstart.ngram import ByteNgram

    held_out, train = result.splits.held_out, result.splits.train
    lengths = [factor * length for factor in CONTEXTS]
    nats = loss_by_length(result.model, held_out, lengths)
    num_tokens = scored_tokens(held_out, lengths)
    trigram = ByteNgram(_bytes_of(train, train.num_tokens))
    # Neither model predicts the first byte.
    log2 = trigram.log2_probabilities(_bytes_of(held_out, num_tokens + 1))[1:]
    return {
        "bits_per_byte": {str(n): bits_per_byte(loss, 1.0) for n, loss in nats.items()},
        "trigram_bits_per_byte": float(-log2.mean()),
        "validation_bytes": num_tokens,
    }


def _bytes_of(store: Any, num_tokens: int) -> Any:
    """The first tokens of a store as (num_tokens,) uint8; eos becomes 0, which no text contains."""
    from flash_frac.data.tokenizer import FIRST_BYTE

    return (store.tokens(0, num_tokens) - FIRST_BYTE).clip(0).astype("uint8")


def _sample(result: TrainResult) -> str:
    """A text generated by the model."""
    import torch

    model: Any = result.model.eval()
    prompt = result.tokenizer(PROMPT, return_tensors="pt").input_ids.to(model.device)
    # Generate the same text each time, and leave the caller's random state unchanged.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ids = model.generate(
            prompt, max_new_tokens=SAMPLE_BYTES, do_sample=True, temperature=0.8, top_k=0
        )
    return result.tokenizer.decode(ids[0], skip_special_tokens=True)


def _draw(result: TrainResult, results: dict[str, Any], folder: Path) -> None:
    import numpy as np

    from flash_frac.quickstart.figures import draw_context, draw_loss, draw_memory

    def curve(key: str) -> list[tuple[int, float]]:
        return [(log["step"], log[key] / math.log(2)) for log in result.history if key in log]

    trigram, length = results["trigram_bits_per_byte"], results["sequence_length"]
    draw_loss(folder / "loss.svg", curve("loss"), curve("eval_loss"), trigram)
    bits = {int(n): value for n, value in results["bits_per_byte"].items()}
    draw_context(folder / "context.svg", bits, length, trigram)

    trained, untrained = _memory(result)

    def relative(report: MemoryReport) -> dict[int, Any]:
        heads = {x.number: np.array([head.response for head in x.heads]) for x in report.layers}
        return {number: x[:, 1:] / x[:, :1] for number, x in heads.items()}

    lags = np.array(trained.lags[1:])
    draw_memory(folder / "memory.svg", lags, relative(trained), relative(untrained))


def _memory(result: TrainResult) -> tuple[MemoryReport, MemoryReport]:
    """Reports of `frac inspect` on the validation text: after training, and before."""
    import torch

    from flash_frac.inspect import inspect_model
    from flash_frac.models import FracForCausalLM

    model, held_out = result.model, result.splits.held_out
    ids = held_out.tokens(0, min(MEMORY_TOKENS, held_out.num_tokens))
    ids = torch.from_numpy(ids)[None].to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained: Any = FracForCausalLM(model.config)
    return inspect_model(model, ids), inspect_model(untrained.to(model.device), ids)


def _closing(results: dict[str, Any], folder: Path) -> str:
    rows = [
        f"  {int(n):>8,} bytes of context   {bits:.3f}"
        for n, bits in results["bits_per_byte"].items()
    ]
    return "\n".join(
        [
            "\nBits per byte on the validation text, over the same bytes in each row:",
            *rows,
            f"  trigram model              {results['trigram_bits_per_byte']:.3f}",
            f"\nThe model writes:\n\n{results['sample']}",
            f"\nEverything is in {folder}:",
            "  loss.svg       loss during training",
            "  context.svg    loss against context length",
            "  memory.svg     how its memory decays, after and before training",
            "  final          the model and its tokenizer, for from_pretrained",
            "  recipe.yaml    all settings; results.json, log.jsonl  all numbers",
            "\nWhat to try next:",
            f"  frac chat {folder}/final",
            f"  frac inspect {folder}/final --out law      # then open law/index.html",
            f"  frac train {folder}/recipe.yaml --output_dir longer --max_steps 5000",
            f"  frac train {folder}/recipe.yaml --output_dir mine --data_files MINE.txt "
            "--held_out_files OTHER.txt",
            "  and in Python, after `import flash_frac.models`:",
            f'  AutoModelForCausalLM.from_pretrained("{folder}/final")',
        ]
    )
