"""The example programs work as on a first run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from foretoken.config import build
from foretoken.free_ports import free_ports
from gateway.config import GatewaySettings
from tests.gateway.conftest import Stack, run_stack
from tests.gateway.scripted_verifier import Player, steps

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
OPENAI = (str(ROOT / "examples" / "openai_stream.py"),)
GRPC = ("-m", "examples.grpc_stream")


async def run(*words: str) -> tuple[int | None, str, str]:
    """Return exit status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.parametrize("example", [OPENAI, GRPC])
async def test_help_is_no_prompt(example: tuple[str, ...]) -> None:
    status, output, errors = await run(*example, "--help")
    assert (status, errors) == (0, "")
    assert output.startswith("usage: ") and "make serve" not in output


async def test_a_missing_client_is_named_with_what_installs_it() -> None:
    without = f"import runpy, sys; sys.modules['openai'] = None; runpy.run_path({OPENAI[0]!r})"
    status, output, errors = await run("-c", without)
    assert (status, output) == (1, "")
    assert errors == f"there is no package openai here; install it with: {sys.executable} -m pip install openai\n"


@pytest.mark.parametrize(
    "form", ["{}/v1/", *(pytest.param(form, marks=pytest.mark.slow) for form in ("{}", "{}/", "{}/v1"))]
)
async def test_an_address_in_any_of_its_forms(stack: Stack, form: str) -> None:
    stack.verifier.script = steps(stack.ids("hello"))
    status, output, errors = await run(*OPENAI, "say ", form.format(stack.url))
    assert (status, errors) == (0, "")
    assert output.startswith(f"say hello\n\n{len(stack.ids('hello'))} tokens; ")


async def test_an_address_without_a_scheme(stack: Stack) -> None:
    status, output, errors = await run(*OPENAI, "say ", f"127.0.0.1:{stack.settings.port}/v1")
    assert (status, errors) == (0, "") and output.startswith("say ")


async def test_over_grpc(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"))
    status, output, errors = await run(*GRPC, "say ", stack.grpc_address)
    assert (status, errors) == (0, "")
    assert output.startswith("say hello\n\n") and "drafted tokens accepted" in output


async def test_over_grpc_with_a_key(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = build(GatewaySettings, settings.model_dump() | {"api_keys": ["secret"]})
    async for stack in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        stack.verifier.script = steps(stack.ids("hello"))
        status, _, errors = await run(*GRPC, "say ", stack.grpc_address)
        assert status == 1 and "key" in errors
        monkeypatch.setenv("FORETOKEN_API_KEY", "secret")
        status, output, errors = await run(*GRPC, "say ", stack.grpc_address)
        assert (status, errors) == (0, "") and output.startswith("say hello")


@pytest.mark.parametrize("example", [OPENAI, GRPC])
async def test_nothing_answers(example: tuple[str, ...]) -> None:
    (port,) = free_ports(1)
    status, output, errors = await run(*example, "say ", f"127.0.0.1:{port}")
    assert (status, output) == (1, "")
    what, where = ("gRPC server answers", "") if example is GRPC else ("HTTP answer", "http://")
    assert errors.startswith(f"no {what} at {where}127.0.0.1:{port}") and "with: make serve" in errors
    assert errors.count("\n") == 1


async def test_a_port_of_the_other_protocol(stack: Stack) -> None:
    status, _, errors = await run(*OPENAI, "say ", stack.grpc_address)
    assert status == 1 and errors.startswith(f"no HTTP answer at http://{stack.grpc_address} (")
    assert errors.endswith("or name its REST port\n")
    status, _, errors = await run(*GRPC, "say ", f"127.0.0.1:{stack.settings.port}")
    assert status == 1 and errors.startswith("no gRPC server answers at ")


async def test_an_answer_that_is_an_error_is_one_line(stack: Stack) -> None:
    status, output, errors = await run(*OPENAI, "say ", f"{stack.url}/elsewhere")
    assert (status, output) == (1, "")
    assert errors.startswith(f"{stack.url}/elsewhere: Error code: 404") and errors.count("\n") == 1

    async def refuse(player: Player) -> None:
        player.error(grpc.StatusCode.INVALID_ARGUMENT, "not so", "prompt")

    stack.verifier.script = refuse
    for example, address in ((OPENAI, stack.url), (GRPC, stack.grpc_address)):
        status, _, errors = await run(*example, "say ", address)
        assert status == 1 and errors.startswith(f"{address}: ") and "not so" in errors
        assert errors.count("\n") == 1
