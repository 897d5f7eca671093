"""guidellm: a short load whose requests all succeed, with the
token counts that the server was asked for.
"""

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
        "--backend",
        f"kind=openai_http,target={server.URL},model={server.MODEL}",
        "--tokenizer",
        f"kind=huggingface_auto,model={server.TOKENIZER}",
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        "kind=max_requests,count=6",
        "--output",
        "kind=json,path=report.json",
        "--disable-console",
    ],
    check=True,
)
report = json.loads(Path("report.json").read_text())
requests = report["benchmarks"][0]["requests"]
assert len(requests["successful"]) == 6 and not requests["errored"], {k: len(v) for k, v in requests.items()}
assert all(request["output_tokens"] == 16 for request in requests["successful"])
