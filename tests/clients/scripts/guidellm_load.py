"""guidellm: a short load whose requests all succeed, with the token counts that the server was asked for."""

import json
import subprocess
import sys
from pathlib import Path

import server

program = Path(sys.executable).parent / "guidellm"
subprocess.run(
    [
        str(program),
        "run",
        "--target",
        server.URL,
        "--model",
        server.MODEL,
        "--processor",
        server.TOKENIZER,
        "--data",
        "prompt_tokens=32,output_tokens=16",
        "--profile",
        "concurrent",
        "--rate",
        "2",
        "--max-requests",
        "6",
        "--output-path",
        "report.json",
    ],
    check=True,
)
report = json.loads(Path("report.json").read_text())
requests = report["benchmarks"][0]["requests"]
assert len(requests["successful"]) == 6 and not requests["errored"], {k: len(v) for k, v in requests.items()}
assert all(request["output_tokens"] == 16 for request in requests["successful"])
