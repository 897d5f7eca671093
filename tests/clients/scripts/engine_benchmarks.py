"""`vllm bench serve`, and SGLang's bench_serving and send_one.

All requests of short loads succeed, and speculation is reported.
"""

import json
import subprocess
import sys
from pathlib import Path

import server


def load(module: str, *arguments: str) -> str:
    """Return what a module printed for a short load. Raises RuntimeError with it if it fails."""
    common = ["--model", server.MODEL, "--tokenizer", server.TOKENIZER]
    size = ["--num-prompts", "6", "--max-concurrency", "2", "--random-input-len", "32", "--random-output-len", "32"]
    return run(module, *common, *size, *arguments)


def run(module: str, *arguments: str) -> str:
    """Return what a module printed. Raises RuntimeError with it if it fails."""
    command = [sys.executable, "-m", *module.split(), "--base-url", server.URL, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])
    return done.stdout


printed = load("vllm.entrypoints.cli.main bench serve", "--dataset-name", "random", "--save-result")
(path,) = Path().glob("openai-*.json")
report = json.loads(path.read_text())
assert (report["completed"], report["failed"]) == (6, 0), printed
assert "Speculative Decoding" in printed and report["spec_decode_num_drafts"] > 0, printed

printed = load(
    "sglang.bench_serving", "--backend", "sglang", "--dataset-name", "random-ids", "--output-file", "sg.jsonl"
)
report = json.loads(Path("sg.jsonl").read_text())
assert report["completed"] == 6 and report["accept_length"] >= 1, printed

# One prompt, with a table of latency, tokens, accepted length and speed.
printed = run("sglang.test.send_one", "--max-new-tokens", "64")
latency, tokens, accept_length, speed = (float(cell) for cell in printed.splitlines()[-2].strip("| ").split("|"))
assert latency > 0 and tokens == 64 and accept_length > 1 and speed > 0, printed
