"""Draw ``loss.csv`` of a training run: training and held-out loss over tokens seen.

python -m models.demo.plot_loss models/demo/loss.csv models/demo/loss.png
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def plot_loss(log: Path, picture: Path, title: str) -> None:
    """Read the log that ``train_target`` wrote and save a picture."""
    with log.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    held_out = [row for row in rows if row["held_out"]]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([int(row["tokens"]) / 1e6 for row in rows], [float(row["train"]) for row in rows], lw=0.8, label="train")
    axes.plot(
        [int(row["tokens"]) / 1e6 for row in held_out],
        [float(row["held_out"]) for row in held_out],
        "o-",
        ms=3,
        label="held-out packages",
    )
    axes.set(xlabel="tokens seen (millions)", ylabel="loss (nats a token)", title=title, ylim=(0.9, 3.5))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="Demo target")
    options = parser.parse_args()
    plot_loss(options.log, options.picture, options.title)


if __name__ == "__main__":
    main()
