"""Other projects' clients, as their users install them, speak to one server with the demo model.

Each client has a script in scripts/, which runs in an environment of its own and asserts what the
client makes of the answers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients.environment import ROOT, environment, node_modules
from tests.integration.stack import ENVIRONMENT, Stack, running

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]
SCRIPTS = Path(__file__).parent / "scripts"
DEMO = ROOT / "models/demo/target"


class Client(NamedTuple):
    """A client's script and what pip installs for it; ``bare``: without what they require."""

    script: str
    requirements: tuple[str, ...]
    bare: tuple[str, ...] = ()


# What vLLM and SGLang import for their benchmarks: all that they require
# would be gigabytes for GPUs.
IMPORTED_BY_ENGINES = (
    *("torch", "torchvision", "transformers", "datasets", "aiohttp", "apache-tvm-ffi", "cachetools", "cbor2"),
    "cloudpickle",
    *("compressed-tensors", "einops", "fastapi", "gguf", "ipython", "llguidance", "msgspec", "openai"),
    *("openai-harmony", "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil", "py-cpuinfo"),
    *("pybase64", "pydantic", "pyzmq", "requests", "sentencepiece", "uvicorn", "uvloop", "watchfiles", "xgrammar"),
    "tabulate",
)
CLIENTS = (
    Client("openai_sdk", ("openai",)),
    Client("langchain_sdk", ("langchain-openai", "langchain")),
    Client("litellm_sdk", ("litellm",)),
    Client("litellm_proxy", ("litellm[proxy]",)),
    Client("llama_index_sdk", ("llama-index-llms-openai-like",)),
    Client("instructor_modes", ("instructor", "jsonref")),
    Client("pydantic_agents", ("pydantic-ai-slim[openai]",)),
    Client("openai_agents", ("openai-agents",)),
    Client("anthropic_sdk", ("anthropic",)),
    Client("lm_eval_harness", ("torch", "lm-eval[api,hf]")),
    Client("inspect_evals", ("inspect-ai", "openai")),
    Client("guidellm_load", ("torch", "guidellm")),
    Client("aiperf_load", ("aiperf",)),
    Client("engine_benchmarks", IMPORTED_BY_ENGINES, ("vllm", "sglang")),
    Client("grpc_reflection_client", ("grpcio", "grpcio-reflection")),
)
JAVASCRIPT = ("openai", "ai", "@ai-sdk/openai-compatible", "zod")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(DEMO, tmp_path_factory.mktemp("clients") / "log", "--served-model-name", "demo") as stack:
        yield stack


def run_script(stack: Stack, command: list[str], folder: Path, **variables: str) -> None:
    """Run a script with ``folder`` as its working folder.

    Raises AssertionError with what it printed if it fails.
    """
    given = {"FORETOKEN_URL": stack.url, "FORETOKEN_GRPC_ADDRESS": f"127.0.0.1:{stack.grpc_port}"}
    given |= {"FORETOKEN_MODEL": "demo", "FORETOKEN_TOKENIZER": str(DEMO)}
    variables = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONPATH"} | given | variables
    done = subprocess.run(
        command,
        env=variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_client(client: Client, stack: Stack, tmp_path: Path) -> None:
    python = environment(client.script, client.requirements, client.bare) / "bin/python"
    path = f"{python.parent}:{os.environ['PATH']}"
    run_script(stack, [str(python), str(SCRIPTS / f"{client.script}.py")], tmp_path, PATH=path)


@pytest.mark.parametrize("script", ["openai_sdk", "vercel_ai_sdk"])
def test_javascript_client(script: str, stack: Stack, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js with npm")
    folder = node_modules(JAVASCRIPT)
    # Node looks for packages beside the script.
    copy = folder / f"{script}.mjs"
    copy.write_text((SCRIPTS / f"{script}.mjs").read_text())
    run_script(stack, ["node", str(copy)], tmp_path)
