"""Fixtures: a tokenizer trained here, a scripted verifier and a real gateway on free ports."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from foretoken.free_ports import free_ports
from gateway.config import GatewaySettings
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from tests.gateway.scripted_verifier import ScriptedVerifier, serving
from tests.support.tcp_clients import JSON_TYPE

MODEL = "tiny"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|user|>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LONG_TOKEN = "<" + "long" * 250 + ">"
TRAINING_TEXT = [
    "def add(first, second):\n    return first + second\n",
    "hello world, héllo wörld 🙂 日本語",
    "stop here",
]


def train_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Train a small byte-level BPE tokenizer in Hugging Face's layout, with added tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT * 3, trainer)
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("é🙂"), AddedToken(LONG_TOKEN)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@dataclass
class Stack:
    """A running gateway with a scripted verifier."""

    settings: GatewaySettings
    gateway: Gateway
    verifier: ScriptedVerifier
    tokenizer: Tokenizer
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.settings.grpc_port}"

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of one sample of /metrics; 0.0 if there is none."""
        text = (await self.http.get("/metrics")).text
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith(name + "{") and all(w in line for w in wanted)]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer(model_folder)


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Iterator[GatewaySettings]:
    port, grpc_port = free_ports(2)
    yield GatewaySettings(
        model=model_folder,
        served_model_name=MODEL,
        verifiers=(f"unix:{tmp_path / 'v.sock'}",),
        port=port,
        grpc_port=grpc_port,
        drain_timeout_s=5,
    )


@pytest.fixture
async def stack(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Stack]:
    async for running in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        yield running


async def run_stack(
    settings: GatewaySettings, tokenizer: Tokenizer, path: Path, max_model_len: int = 128
) -> AsyncIterator[Stack]:
    verifier = ScriptedVerifier(tokenizer.vocab_size, max_model_len)
    async with serving(verifier, path), Gateway(settings) as gateway:
        verifier.gateway = gateway
        await gateway.verifiers.wait_up()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.port}", timeout=None, headers=JSON_TYPE, verify=False
        ) as client:
            yield Stack(settings, gateway, verifier, tokenizer, client)


def events(text: str) -> list[dict[str, Any]]:
    """Return the JSON events of a whole stream, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], text
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-2])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
