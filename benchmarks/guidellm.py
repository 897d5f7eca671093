"""Hold ``foretoken bench`` against guidellm on one server, in pairs.

    python -m benchmarks.guidellm --url URL --tokenizer FOLDER --program ENVIRONMENT/bin/guidellm

guidellm is installed in an environment of its own (``make test-clients`` makes one in
``.client-environments/guidellm_load``). Both send chats of random words with outputs of fixed
length, so many at once. guidellm sends the same prompts in every run, so a server must not cache
prefixes. A ratio is ``foretoken bench`` / guidellm; the median of the pairs counts. The exit status
is 1 if one is off by more than 3%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.command import finish, progress

# The most by which the median of the pairs' ratios may differ from 1.
TOLERANCE = 0.03
Figures = dict[str, float]


def ours(options: argparse.Namespace, folder: Path) -> Figures:
    """Return the figures of one run of ``foretoken bench``."""
    file = folder / "ours.json"
    words = ["--url", options.url, "--endpoint", "chat", "--max-concurrency", str(options.concurrency)]
    words += ["--num-prompts", str(options.requests), "--input-len", str(options.input_len)]
    words += ["--output-len", str(options.output_len), "--tokenizer", str(options.tokenizer)]
    words += ["--seed", str(options.seed), "--warmup-requests", "0", "--output-file", str(file)]
    _run([sys.executable, "-m", "foretoken", "bench", *words])
    (row,) = json.loads(file.read_text())["rows"]
    return {
        "TTFT p50, ms": row["ttft_p50_ms"],
        "TPOT p50, ms": row["tpot_p50_ms"],
        "end to end p50, ms": row["e2e_p50_ms"],
        "time per output token p50, ms": 1e3 / row["interactivity_p50"],
        "tok/s": row["tokens_per_s"],
    }


def guidellms(options: argparse.Namespace, folder: Path) -> Figures:
    """Return the figures of one run of guidellm; tok/s from its requests' times, by our formula."""
    file = folder / "guidellm.json"
    lengths = f"prompt_tokens={options.input_len},output_tokens={options.output_len}"
    words = ["--backend", f"kind=openai_http,target={options.url},model={options.model}"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={options.tokenizer}"]
    words += ["--data", f"kind=synthetic_text,{lengths}", "--profile", f"kind=concurrent,streams={options.concurrency}"]
    words += ["--constraint", f"kind=max_requests,count={options.requests}", "--disable-console"]
    _run([str(options.program), "run", *words, "--output", f"kind=json,path={file}"])
    (benchmark,) = json.loads(file.read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    if not requests:
        raise SystemExit(f"guidellm got no answer from {options.url}: does its model have the name {options.model}?")
    metrics = benchmark["metrics"]

    def median(name: str) -> float:
        return float(metrics[name]["successful"]["median"])

    timings = [request["info"]["timings"] for request in requests]
    seconds = max(each["last_token_iteration"] for each in timings) - min(each["request_start"] for each in timings)
    return {
        "TTFT p50, ms": median("time_to_first_token_ms"),
        "TPOT p50, ms": median("inter_token_latency_ms"),
        "end to end p50, ms": 1e3 * median("request_latency"),
        "time per output token p50, ms": median("time_per_output_token_ms"),
        "tok/s": sum(request["output_tokens"] for request in requests) / seconds,
    }


def measure(options: argparse.Namespace, folder: Path) -> list[tuple[Figures, Figures]]:
    """Return the figures of all pairs, ours first; who begins alternates."""
    pairs = []
    for number in range(options.pairs):
        options.seed = number
        turns: list[Callable[[argparse.Namespace, Path], Figures]] = [ours, guidellms]
        found = {turn: turn(options, folder) for turn in (turns if number % 2 == 0 else reversed(turns))}
        pairs.append((found[ours], found[guidellms]))
        progress(f"pair {number + 1}: {pairs[-1]}")
    return pairs


def to_markdown(pairs: Sequence[tuple[Figures, Figures]]) -> tuple[str, list[str]]:
    """Return a table of both tools' medians and ratios, and the figures that differ too much."""
    lines = ["| figure | foretoken bench | guidellm | ratio (least to most) |", "| --- | ---: | ---: | ---: |"]
    off = []
    for name in pairs[0][0]:
        ratios = [one[name] / other[name] for one, other in pairs]
        middle = statistics.median(ratios)
        first, second = (statistics.median(pair[index][name] for pair in pairs) for index in (0, 1))
        lines.append(f"| {name} | {first:.2f} | {second:.2f} | {middle:.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")
        if abs(middle - 1) > TOLERANCE:
            off.append(name)
    return "\n".join(lines) + "\n", off


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.guidellm", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", required=True, help="its name for the model")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--program", type=Path, required=True, help="guidellm")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=40, help="of each run")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of an output")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table, off = to_markdown(measure(options, Path(folder)))
    print(table)
    finish([f"{name}: off by more than {TOLERANCE:.0%}" for name in off])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
