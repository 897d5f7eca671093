"""Stream a completion with the openai client; run `make serve` first.

python examples/openai_stream.py ["def read_json(path):" [http://127.0.0.1:8000]]
"""

import sys

from openai import APIConnectionError, OpenAI

url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
prompt = sys.argv[1] if len(sys.argv) > 1 else "def read_json(path):"
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    sys.exit(f"nothing answers at {url}; start a server with: make serve")

stream = client.completions.create(
    model=model,
    prompt=prompt,
    max_tokens=128,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    # Speculation never changes the text; switch it off to see the difference in speed.
    extra_body={"speculative": {"enabled": True}},
)
print(prompt, end="")
for chunk in stream:
    for choice in chunk.choices:
        print(choice.text, end="", flush=True)
    if chunk.usage is not None:
        print(f"\n\n{chunk.usage.completion_tokens} tokens; {chunk.model_extra}")
