"""`vllm bench serve` and SGLang's bench_serving: short loads whose
requests all succeed, with speculation reported.
"""

import json
import subprocess
import sys
from pathlib import Path

import server


def run(module: str, *arguments: str) -> str:
    """Return what a module printed for a short load.

    Raises RuntimeError with it if the module fails.
    """
    common = ["--base-url", server.URL, "--model", server.MODEL, "--tokenizer", server.TOKENIZER]
    load = ["--num-prompts", "6", "--max-concurrency", "2", "--random-input-len", "32", "--random-output-len", "32"]
    command = [sys.executable, "-m", *module.split(), *common, *load, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])
    return done.stdout


printed = run("vllm.entrypoints.cli.main bench serve", "--dataset-name", "random", "--save-result")
(path,) = Path().glob("openai-*.json")
report = json.loads(path.read_text())
assert (report["completed"], report["failed"]) == (6, 0), printed
assert "Speculative Decoding" in printed and report["spec_decode_num_drafts"] > 0, printed

printed = run(
    "sglang.bench_serving", "--backend", "sglang", "--dataset-name", "random-ids", "--output-file", "sg.jsonl"
)
report = json.loads(Path("sg.jsonl").read_text())
assert report["completed"] == 6 and report["accept_length"] >= 1, printed
