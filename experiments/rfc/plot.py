"""Draw loss.csv and results.csv as figure.svg: python experiments/rfc/plot.py"""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
INK, PALE = "#00707a", "#63bcc4"


def read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    losses, results = read("loss.csv"), read("results.csv")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in (("loss", {"color": PALE}), ("eval_loss", {"color": INK, "marker": "o"})):
        rows = [row for row in losses if row[name]]
        label = "training" if name == "loss" else "held-out documents"
        x, y = ([float(row[key]) for row in rows] for key in ("step", name))
        left.plot(x, y, label=label, **style)
    left.set(xlabel="step of 65,536 tokens", ylabel="loss, nats per token", ylim=(1.5, 5))
    left.legend(frameon=False)

    context = [int(row["context"]) for row in results]
    right.plot(context, [float(row["perplexity"]) for row in results], color=INK, marker="o")
    right.axvline(4096, color="#999999", lw=0.8)
    right.annotate("trained at 4K", (4096, 1), (4, -10), xycoords=("data", "axes fraction"),
                   textcoords="offset points", color="#666666")  # fmt: skip
    right.set_xscale("log", base=2)
    right.set_xticks(context, [f"{n // 1024}K" for n in context])
    right.set(xlabel="context, tokens", ylabel="held-out perplexity")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "figure.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
