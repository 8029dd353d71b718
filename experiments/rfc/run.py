"""Train on the RFCs with recipe.yaml, and measure the held-out loss against context length.

    python experiments/rfc/run.py --out FOLDER [--any_training_argument VALUE] [--commit C]

Writes loss.csv (the logged losses of the run) and results.csv (loss and perplexity for windows of
1K to 64K tokens of the held-out documents, scoring the same tokens at each) to FOLDER, by default
next to this file. Finished results are not measured again.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path

from flash_frac.evals.perplexity import loss_by_length, scored_tokens
from flash_frac.provenance import provenance
from flash_frac.train import load_recipe, train
from flash_frac.train.monitor import LOG_NAME, read_lines

HERE = Path(__file__).parent
LENGTHS = [2**n for n in range(10, 17)]


def write(path: Path, rows: list[dict]) -> None:
    """Write rows with the same columns as a CSV, atomically."""
    draft = path.with_suffix(".draft")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draft.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--commit", help="commit to record if git is not available")
    options, overrides = parser.parse_known_args()
    if (options.out / "results.csv").exists():
        sys.exit(f"{options.out / 'results.csv'} exists; name another folder with --out")
    options.out.mkdir(parents=True, exist_ok=True)
    result = train(load_recipe(HERE / "recipe.yaml", overrides))
    lines = read_lines(result.output_dir / LOG_NAME)
    names = ("step", "loss", "eval_loss", "learning_rate", "tokens_per_second", "mfu")
    curve = [line for line in lines if "loss" in line or "eval_loss" in line]
    write(options.out / "loss.csv", [{n: line.get(n) for n in names} for line in curve])

    made_with, held_out = provenance(), result.splits.held_out
    losses = loss_by_length(result.model, held_out, LENGTHS, batch_tokens=16384)
    write(
        options.out / "results.csv",
        [
            {
                "context": length,
                "loss": round(loss, 5),
                "perplexity": round(math.exp(loss), 4),
                "tokens": scored_tokens(held_out, LENGTHS),
                "documents": held_out.num_documents,
                "parameters": result.model.num_parameters(),
                "train_tokens": result.splits.train.num_tokens,
                "steps": lines[-1]["step"],
                "commit": options.commit or made_with["commit"],
                "machine": made_with["machine"],
                "torch": made_with["torch"],
            }
            for length, loss in losses.items()
        ],
    )
    for length, loss in losses.items():
        print(f"{length:6} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.3f}")


if __name__ == "__main__":
    main()
