"""litellm's proxy in front of the server: a chat, a stream, and a tool call through it."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import openai
import server

# The proxy has no way to choose a free port.
PORT = 20_000 + os.getpid() % 20_000
# The proxy does not start with a weak one.
PROXY_KEY = "sk-" + secrets.token_urlsafe(32)
MODELS = {
    "model_list": [
        {
            "model_name": "ours",
            "litellm_params": {
                "model": f"openai/{server.MODEL}",
                "api_base": server.BASE_URL,
                "api_key": server.KEY,
            },
        }
    ]
}
# JSON is YAML too.
Path("config.yaml").write_text(json.dumps(MODELS))
proxy = subprocess.Popen(
    [
        str(Path(sys.executable).parent / "litellm"),
        "--config",
        "config.yaml",
        "--port",
        str(PORT),
        "--host",
        "127.0.0.1",
    ],
    env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": PROXY_KEY},
)
try:
    while True:
        assert proxy.poll() is None, "the proxy ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/liveliness", timeout=5).close()
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key=PROXY_KEY)
    expected = server.chat_text(40)
    answer = client.chat.completions.create(model="ours", messages=server.MESSAGES, max_tokens=40, temperature=0)
    assert answer.choices[0].message.content == expected
    chunks = client.chat.completions.create(
        model="ours", messages=server.MESSAGES, max_tokens=40, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    call = client.chat.completions.create(
        model="ours", messages=server.MESSAGES, tools=[server.TOOL], tool_choice="required", parallel_tool_calls=False
    )
    assert server.is_forecast(json.loads(call.choices[0].message.tool_calls[0].function.arguments))
finally:
    proxy.terminate()
    proxy.wait()
