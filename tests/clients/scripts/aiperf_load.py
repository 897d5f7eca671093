"""aiperf: a short load whose requests all succeed, with speculation reported."""

import json
import subprocess
import sys
from pathlib import Path

import server

program = Path(sys.executable).parent / "aiperf"
subprocess.run(
    [
        str(program),
        "profile",
        "--model",
        server.MODEL,
        "--url",
        server.URL,
        "--endpoint-type",
        "chat",
        "--streaming",
        "--tokenizer",
        server.TOKENIZER,
        "--concurrency",
        "2",
        "--request-count",
        "6",
        "--synthetic-input-tokens-mean",
        "32",
        "--output-tokens-mean",
        "16",
        "--extra-inputs",
        "ignore_eos:true",
        "--ui",
        "none",
        "--artifact-dir",
        "artifacts",
    ],
    check=True,
)
(path,) = Path("artifacts").rglob("profile_export_aiperf.json")
report = json.loads(path.read_text())
assert report["request_count"]["avg"] == 6 and not report.get("error_summary"), report
assert report["total_spec_decode_steps"]["avg"] > 0
