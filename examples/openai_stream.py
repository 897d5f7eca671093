"""Stream a completion with the openai client.

Run `make serve` and `.venv/bin/pip install openai` first.

.venv/bin/python examples/openai_stream.py ["def read_json(path):" [http://127.0.0.1:8000]]
"""

import argparse
import os
import sys

try:
    from openai import APIConnectionError, OpenAI, OpenAIError
except ModuleNotFoundError as error:
    sys.exit(f"there is no package {error.name} here; install it with: {sys.executable} -m pip install openai")

parser = argparse.ArgumentParser(description="Stream a completion with the openai client.")
parser.add_argument("prompt", nargs="?", default="def read_json(path):", help="text to continue (default: %(default)s)")
parser.add_argument(
    "url",
    nargs="?",
    default="http://127.0.0.1:8000",
    help="URL of the server, with or without /v1 (default: %(default)s)",
)
options = parser.parse_args()
url = options.url.rstrip("/").removesuffix("/v1")
url = url if "://" in url else f"http://{url}"
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("FORETOKEN_API_KEY", "none"))
try:
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model,
        prompt=options.prompt,
        max_tokens=128,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        # Speculation never changes the text. Disable it to compare the speed.
        extra_body={"speculative": {"enabled": True}},
    )
    print(options.prompt, end="")
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.text, end="", flush=True)
        if chunk.usage is not None:
            print(f"\n\n{chunk.usage.completion_tokens} tokens; {chunk.model_extra}")
except APIConnectionError as error:
    # A server without HTTP/1.1, such as the gRPC port, gives this error too.
    sys.exit(
        f"no HTTP answer at {url} ({error.__cause__ or error}); start a server with: make serve, or name its REST port"
    )
except OpenAIError as error:
    # Another server may answer with a page of HTML: print it as one line.
    sys.exit(f"{url}: {' '.join(str(error).split())}")
