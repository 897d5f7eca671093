"""``make bench-gpu-check``: hold the newest run of benchmarks.gpu.steps against the bars.

    python -m benchmarks.gpu.check [FILE]

The exit status is 0 if every bar is reached, 1 if one is missed, and 2 if the file is refused. A
file is refused if

- a row is missing, is too short, or had too many steps without drafts,
- its rows are from different runs,
- the bars are for another device or model, or
- its commit is not an ancestor of HEAD.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.command import finish
from benchmarks.figures import median
from benchmarks.gpu import bars
from benchmarks.gpu.bars import BARS, GATEWAY_BATCHES, MAX_OVERHEAD, SETTINGS, Key, required_rows
from benchmarks.gpu.checkpoint import LLAMA_3_1_8B

RESULTS = environment.ROOT / "benchmarks" / "gpu" / "results"
FORMAT = 1
# Fields that have one value in all rows of a run.
COMMON = ("invocation", "commit", "gpu", "mode", "dtype", "model_fingerprint")
# Largest relative error of tokens a step against the forced length, and largest share of intervals
# that are no ordinary step.
MAX_LENGTH_ERROR = 0.03
MAX_DROPPED = 0.05
# Largest share of steps without a draft. The median would still be a step with a draft, but with a
# part of the batch in plain decode.
MAX_WITHOUT_DRAFT = 0.05

Row = dict[str, Any]


class CannotJudgeError(Exception):
    """The file cannot be judged. The message has one reason a line."""


def newest(folder: Path) -> Path:
    """Return the file of the run that began last.

    Raises:
        CannotJudgeError: there is no file, or one does not hold a run.
    """
    found = {file: str(load(file).get("began_at", "")) for file in sorted(folder.glob("*.json"))}
    if not found:
        raise CannotJudgeError(f"{folder} has no result")
    return max(found, key=lambda file: found[file])


def load(file: Path) -> dict[str, Any]:
    """Read one run's JSON. Raises CannotJudgeError if the file holds something else."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotJudgeError(f"{file}: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT or not isinstance(result.get("rows"), list):
        raise CannotJudgeError(f"{file} is no result of benchmarks.gpu.steps")
    return result


def refusals(result: dict[str, Any], is_ancestor: Callable[[str], bool]) -> list[str]:
    """Return the reasons why the run cannot be judged."""
    reasons = []
    rows: list[Row] = result["rows"]
    keys = [_key(row) for row in rows]
    missing = [key for key in required_rows() if key not in keys]
    reasons += [f"missing row: {key}" for key in missing]
    reasons += [f"row twice: {key}" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    for name in COMMON:
        values = sorted({str(row.get(name)) for row in rows})
        if len(values) > 1:
            reasons.append(f"rows of different runs: {name} is {', '.join(values)}")
    for name in ("invocation", "commit"):
        if any(row.get(name) != result.get(name) for row in rows):
            reasons.append(f"rows of another run: {name} is not the file's, {result.get(name)}")
    for key, row in zip(keys, rows, strict=True):
        reasons += [f"{key}: {reason}" for reason in _row_refusals(row, result["workload"]["output_tokens"])]
    reasons += _workload_refusals(result)
    commit = str(result.get("commit") or "")
    if not commit or " " in commit:
        reasons.append(f"the commit is {commit or 'unknown'}: only what is committed can be measured again")
    elif not is_ancestor(commit):
        reasons.append(f"commit {commit} is not an ancestor of HEAD")
    return reasons


def _row_refusals(row: Row, output_tokens: int) -> list[str]:
    reasons = []
    count, dropped = len(row["step_ms"]), row["num_dropped"]
    if count < bars.MIN_STEPS:
        reasons.append(f"{count} step times, at least {bars.MIN_STEPS} are needed")
    if dropped > MAX_DROPPED * (count + dropped):
        reasons.append(f"{dropped} of {count + dropped} intervals were no ordinary step")
    setting = next((setting for setting in SETTINGS if setting.name == row["setting"]), None)
    if setting is None:
        return [*reasons, "there is no such setting"]
    if (row["steps"], row["topk"], row["tokens"]) != (setting.steps, setting.topk, setting.tokens):
        reasons.append(f"its tree is {row['steps']}-{row['topk']}-{row['tokens']}")
    wanted = None if setting.is_plain else setting.accept_length
    if row["simulate_accept_length"] != wanted:
        reasons.append(f"its acceptance was {row['simulate_accept_length']}, not {wanted}")
    if abs(row["tokens_per_step"] / setting.accept_length - 1) > MAX_LENGTH_ERROR:
        reasons.append(f"{row['tokens_per_step']:.2f} tokens a step, not {setting.accept_length:g}")
    if not setting.is_plain:
        sequences = row["num_rounds"] * row["batch"]
        steps = round(sequences * output_tokens / setting.accept_length)
        # The first step of a sequence never has a draft.
        without = row["num_fallback_steps"] - sequences
        if without > MAX_WITHOUT_DRAFT * steps:
            reasons.append(f"{without} of {steps} steps of single sequences had no draft")
    return reasons


def _workload_refusals(result: dict[str, Any]) -> list[str]:
    reasons = []
    workload = result["workload"]
    found = (workload["prompt_tokens"], workload["output_tokens"])
    if found != (bars.PROMPT_TOKENS, bars.OUTPUT_TOKENS):
        reasons.append(f"{found[0]}-token prompts and {found[1]} tokens decoded")
    if bars.GPU not in result["device"]["gpu"]:
        reasons.append(f"the bars are for one {bars.GPU}, this is {result['device']['gpu']}")
    expected = LLAMA_3_1_8B.config()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in (*names, "head_dim", "vocab_size"):
        if result["model"].get(name) != expected[name]:
            reasons.append(f"the bars are for {name} {expected[name]}, this is {result['model'].get(name)}")
    if any(row.get("dtype") != "bfloat16" for row in result["rows"]):
        reasons.append("the bars are for bfloat16")
    return reasons


def judge(result: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a table of medians and bars, and a line for each missed bar."""
    medians = {_key(row): median(row["step_ms"]) for row in result["rows"]}
    missed = []
    lines = ["| ms a step, median | batch | foretoken | must | goal | | peers |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- | --- |")
    for (setting, batch), bar in BARS.items():
        found = medians[Key(setting, batch, "processes")]
        verdict = "goal" if found <= bar.goal else "pass" if found <= bar.must else "**FAIL**"
        peers = ", ".join(f"{name} {value:g}" for name, value in bar.peers)
        lines.append(f"| {setting} | {batch} | {found:.3f} | {bar.must:g} | {bar.goal:g} | {verdict} | {peers} |")
        if found > bar.must:
            missed.append(f"{setting}, batch {batch}: {found:.3f} ms, must be at most {bar.must:g}")
    lines += ["", "| ratio of medians | batch | value | must | |", "| --- | ---: | ---: | ---: | --- |"]
    ratios = [("gateway", setting.name, batch) for setting in SETTINGS for batch in GATEWAY_BATCHES]
    ratios += [("two processes", setting.name, 1) for setting in SETTINGS if not setting.is_plain]
    for what, name, batch in ratios:
        base = medians[Key(name, batch, "processes")]
        if what == "gateway":
            label, ratio = f"{name}: gateway / verifier", medians[Key(name, batch, "gateway")] / base
        else:
            label, ratio = f"{name}: two processes / one", base / medians[Key(name, batch, "in-process")]
        verdict = "pass" if ratio <= MAX_OVERHEAD else "**FAIL**"
        lines.append(f"| {label} | {batch} | {ratio:.3f} | {MAX_OVERHEAD:g} | {verdict} |")
        if ratio > MAX_OVERHEAD:
            missed.append(f"{label}, batch {batch}: {ratio:.3f}, must be at most {MAX_OVERHEAD:g}")
    return "\n".join(lines) + "\n", missed


def is_ancestor(commit: str, root: Path = environment.ROOT) -> bool:
    """Return whether ``commit`` is an ancestor of HEAD; false for an unknown commit."""
    done = subprocess.run(["git", "-C", str(root), "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True)
    return done.returncode == 0


def check(file: Path) -> tuple[str, list[str]]:
    """Check that the run can be judged, then judge it. Raises CannotJudgeError."""
    result = load(file)
    try:
        reasons = refusals(result, is_ancestor)
    except (KeyError, TypeError, AttributeError) as error:
        raise CannotJudgeError(f"{file} is no whole result: {error!r}") from error
    if reasons:
        raise CannotJudgeError("\n".join(reasons))
    return judge(result)


def _key(row: Row) -> Key:
    return Key(row["setting"], row["batch"], row["path"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.check", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="a result; by default the newest one of the repository")
    options = parser.parse_args(arguments)
    try:
        file = options.file or newest(RESULTS)
        table, missed = check(file)
    except CannotJudgeError as error:
        for line in str(error).splitlines():
            print(f"refused: {line}", file=sys.stderr)
        sys.exit(2)
    result = load(file)
    facts = {name: result[name] for name in ("command", "commit", "began_at", "versions")}
    facts |= {"GPU": result["device"]["gpu"], "mode": result["rows"][0]["mode"]}
    print("\n".join(f"- {name}: {value}" for name, value in ({"file": str(file)} | facts).items()))
    print(f"- peers: {bars.PEERS_SOURCE}\n\n{table}")
    finish(missed)


if __name__ == "__main__":
    main()
