"""Commands and programs in the pages run as they stand, against one server of the demo model.

`serve` gets --dry-run, and other services run until their block's end. A block that needs what this
machine may lack says so (docs/site/fenced_blocks.py).
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fenced_blocks import RUN, Block, blocks

from foretoken.free_ports import free_ports
from tests.integration.stack import ENVIRONMENT, Stack, running
from tests.support.certificates import Authority
from tests.support.pages import ROOT, pages

DEMO = ROOT / "models" / "demo"
# By the words that stand for something of the reader's: what of the demo model takes their place.
PLACEHOLDERS = {
    r"\b(FOLDER_OR_HUB_ID|MODEL)\b": DEMO / "target",
    r"\bHEAD\b": DEMO / "eagle3",
    r"\bSMALL\b": DEMO / "standalone",
    r"(?<=--model )M\b": DEMO / "target",
    r"(?<=--speculative-draft )D\b": DEMO / "eagle2",
}
# What starts, or ends, with a test of its own.
ELSEWHERE = {"make serve": "tests/foretoken/test_makefile.py::test_serve_sets_up_once_and_then_uses_no_installer"}
# The operator's key, which all blocks share with the server.
OPERATOR_KEY = "(umask 077; openssl rand -hex 32 > operator.key)"
# A load that shows that the command works.
SHORT = {"foretoken bench": "--num-prompts 2 --input-len 8 --output-len 4 --num-rounds 1 --warmup-requests 1"}
SERVE = re.compile(r"(foretoken serve|python -m foretoken\.launch_server)\b")
SERVICE = re.compile(r"foretoken (drafter|verifier)\b")
# Of `foretoken doctor`: 1 says that something of this machine is at fault.
STATUSES = {"foretoken doctor": (0, 1)}
PARTS = [
    pytest.param(block, id=f"{page}:{block.line}")
    for page, text in pages().items()
    for block in blocks(text)
    if block.language in RUN and not block.needs
]


@dataclass(frozen=True)
class Command:
    """One command of a block, and the lines that the page shows as its output."""

    line: str
    shown: list[str]


def commands(block: Block) -> list[Command]:
    """Return a block's commands; in a block with output those behind a prompt."""
    found: list[Command] = []
    for line in re.sub(r" *\\\n *", " ", block.text).splitlines():
        if block.language != "console":
            found += [Command(line, [])] if line and not line.startswith("#") else []
        elif line.startswith("$ "):
            found.append(Command(line.removeprefix("$ "), []))
        else:
            found[-1].shown.append(line)
    return found


@dataclass(frozen=True)
class Reader:
    """Somebody who types the commands of one block, in a folder that looks like the repository."""

    folder: Path
    stack: Stack
    services: list[subprocess.Popen[bytes]]

    def text(self, text: str) -> str:
        """Return what a reader types: with a model, this server's address, and free ports."""
        text = text.replace("/tmp/", f"{self.folder}/").replace(".venv/bin/", "")
        for word, path in PLACEHOLDERS.items():
            text = re.sub(word, str(path), text)
        text = re.sub(r"(127\.0\.0\.1|localhost):8000\b", f"127.0.0.1:{self.stack.port}", text)
        for port in set(re.findall(r"(?<=\*:)\d+", text)):
            text = text.replace(f"*:{port}", f"*:{free_ports(1)[0]}")
        return text

    def type(self, command: Command) -> None:
        line = self.text(command.line)
        if line in ELSEWHERE or line == OPERATOR_KEY:
            return
        if SERVICE.match(line) is not None:
            self._start(line)
            return
        name = " ".join(line.split()[:2])
        if SERVE.match(line):
            line = shlex.join([*shlex.split(line, comments=True), "--dry-run"])
        done = self._run(f"{line} {SHORT.get(name, '')}")
        assert done.returncode in STATUSES.get(name, (0,)), f"{line}\n{done.stdout}{done.stderr}"
        # Figures differ from machine to machine.
        if command.shown and not re.search(r"\d", "".join(command.shown)):
            assert done.stdout.splitlines() == command.shown

    def _run(self, line: str) -> subprocess.CompletedProcess[str]:
        words = ["bash", "-o", "pipefail", "-c", line]
        return subprocess.run(words, cwd=self.folder, env=self._environment, capture_output=True, text=True)

    def _start(self, line: str) -> None:
        """Start a drafter or a verifier, and wait until it serves."""
        words = shlex.split(line, comments=True)
        name = words[1]
        service_name = f"foretoken.{name}.v1.{name.title()}Service"
        probe = f"foretoken probe {words[words.index('--address') + 1]} --service {service_name}"
        log = self.folder / "log"
        with log.open("w") as errors:
            service = subprocess.Popen(words, cwd=self.folder, env=self._environment, stderr=errors)
        self.services.append(service)
        while self._run(probe).returncode != 0:
            assert service.poll() is None, log.read_text()

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{ENVIRONMENT['PATH']}"
        return ENVIRONMENT | {"PATH": path, "FORETOKEN_URL": self.stack.url, "NO_PROXY": "*"}


@pytest.fixture(scope="module")
def operator_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operator")
    subprocess.run(["bash", "-c", OPERATOR_KEY], cwd=folder, check=True)
    return folder / "operator.key"


@pytest.fixture(scope="module")
def stack(operator_key: Path) -> Iterator[Stack]:
    log = operator_key.with_name("log")
    with running(Path("demo"), log, "--admin-api-key-file", str(operator_key)) as stack:
        yield stack


@pytest.fixture
def reader(stack: Stack, operator_key: Path, tmp_path: Path) -> Iterator[Reader]:
    for name in ("README.md", "docs", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "operator.key").write_bytes(operator_key.read_bytes())
    (tmp_path / "operator.key").chmod(0o600)
    issued = Authority(tmp_path).issue("server")
    (tmp_path / "cert.pem").symlink_to(issued.chain)
    (tmp_path / "key.pem").symlink_to(issued.key)
    (tmp_path / "bin").mkdir()
    for name, words in {"foretoken": "-P -m foretoken", "python": ""}.items():
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        script.chmod(0o755)
    reader = Reader(tmp_path, stack, [])
    yield reader
    # Blocks attach drafters of the same name.
    headers = {"authorization": f"Bearer {operator_key.read_text().strip()}"}
    with httpx.Client(headers=headers, trust_env=False, timeout=None) as client:
        assert client.delete(f"{stack.url}/v1/drafters/second").status_code in (200, 404)
    for service in reader.services:
        with contextlib.suppress(ProcessLookupError):
            service.terminate()
        service.wait()


@pytest.mark.slow
@pytest.mark.parametrize("block", PARTS)
def test_a_block_runs(reader: Reader, block: Block) -> None:
    if block.language == "python":
        program = reader.folder / "program.py"
        program.write_text(reader.text(block.text))
        block = Block(block.line, "bash", (), "python program.py\n")
    for command in commands(block):
        reader.type(command)


def test_blocks_are_many_and_those_that_are_left_to_other_tests_have_one() -> None:
    lines = [command.line for part in PARTS for command in commands(part.values[0])]
    assert len(lines) > 40
    for line, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        assert line in lines
        assert f"def {name}(" in (ROOT / file).read_text()


def test_commands_of_a_block() -> None:
    text = "$ a -b \\\n    -c | d\nout\n\n$ e\n"
    assert commands(Block(1, "console", (), text)) == [Command("a -b -c | d", ["out", ""]), Command("e", [])]
    assert commands(Block(1, "bash", (), "# why\na \\\n  b\n\nc  # d\n")) == [Command("a b", []), Command("c  # d", [])]
