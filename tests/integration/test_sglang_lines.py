"""SGLang's command lines start as typed, with small checkpoints in the names' places."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from foretoken import cli, launch_server
from foretoken.free_ports import free_ports
from tests.integration.stack import ENVIRONMENT, Stack
from tests.support.deployments import Targets
from tests.support.fake_hub import running_hub

# By name: M, D and others stand for folders; the prefix is ours or SGLang's command.
EAGLE = "--model M --speculative-algorithm EAGLE --speculative-draft-model-path D --speculative-num-steps 3"
EAGLE_TREE = f"{EAGLE} --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8"
LINES = {
    "short names": "--model M --speculative-algo EAGLE --speculative-draft D --speculative-num-steps 5 "
    "--speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.7 --port=30020",
    "short names, compiled": "--model M --speculative-algo EAGLE --speculative-draft D --speculative-num-steps 5 "
    "--speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.7 "
    "--enable-torch-compile --cuda-graph-max-bs 2 --port=30020",
    "EAGLE": f"{EAGLE_TREE} --log-level warning",
    "EAGLE, compiled": f"{EAGLE_TREE} --enable-torch-compile --torch-compile-max-bs 2 --log-level warning",
    "FR-Spec": f"{EAGLE_TREE} --speculative-token-map MAP DTYPE --log-level warning",
    "EAGLE3": "--model M --speculative-algorithm EAGLE3 --speculative-draft-model-path D3 --speculative-num-steps 5 "
    "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 --cuda-graph-max-bs 2 DTYPE "
    "--log-level warning",
    "MTP": "--model-path MTP --host HOST --trust-remote-code --speculative-algorithm EAGLE --speculative-num-steps 1 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --mem-fraction 0.5 --log-level warning",
    "NEXTN": "--model-path MTP --speculative-algorithm NEXTN --speculative-draft-model-path MTP "
    "--enable-multi-layer-eagle --speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2",
    "LOOKAHEAD": "--model-path M --trust-remote-code --tp 1 --speculative-num-draft-tokens 4 "
    "--speculative-algorithm LOOKAHEAD --speculative-one-branch",
    "NGRAM": "--model-path M --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
    "--speculative-attention-mode decode --max-running-requests 8 --chunked-prefill-size 256",
    "STANDALONE": "--model-path M --speculative-algorithm STANDALONE --speculative-draft-model-path SMALL "
    "--speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7 --mem-fraction-static 0.7 "
    "--speculative-attention-mode prefill",
}
# What the plan names.
NGRAM, MTP = "ngram (NGRAM, in-process)", "mtp (MTP, process)"
DRAFTERS = {"LOOKAHEAD": NGRAM, "NGRAM": NGRAM, "MTP": MTP, "NEXTN": MTP}
DRAFTERS |= {"EAGLE3": "eagle3 (EAGLE3, process)", "STANDALONE": "standalone (STANDALONE, process)"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what stands in the lines' capitals."""
    root = tmp_path_factory.mktemp("sglang")
    targets = Targets(root, steps=0)
    llama, mimo = targets["llama"], targets["mimo"]
    torch.save(list(range(5, 45)), root / "freq_32768.pt")
    return {
        "M": str(llama.folder),
        "D": str(llama.head_folders["EAGLE"]),
        "D3": str(llama.head_folders["EAGLE3"]),
        "SMALL": str(llama.standalone),
        "MTP": str(mimo.folder),
        "MAP": str(root / "freq_32768.pt"),
        # Without keys, other machines may call only if that is said.
        "HOST": "0.0.0.0 --insecure",
        "DTYPE": "--dtype float16",
    }


def words(line: str, folders: dict[str, str]) -> list[str]:
    # A name that is another's beginning must not match, and MTP is an algorithm's name too.
    return [part for word in line.split() for part in folders.get(word, word).split()]


@pytest.mark.parametrize("command", ["foretoken serve", "python -m foretoken.launch_server"])
@pytest.mark.parametrize("name", LINES)
def test_a_line_passes_as_typed(
    name: str,
    command: str,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = cli.main if command.startswith("foretoken") else launch_server.main
    first = ["foretoken", "serve"] if main is cli.main else [command]
    monkeypatch.setattr(sys, "argv", [*first, *words(LINES[name], folders), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    assert f"drafters   {DRAFTERS.get(name, 'eagle (EAGLE, process)')}\n" in out
    given = re.search(r"num-steps (\d+) .*eagle-topk (\d+) .*num-draft-tokens (\d+)", LINES[name])
    if given:
        levels, children, nodes = given.groups()
        assert f"  trees      levels: {levels}; children of a node: up to {children}; nodes: up to {nodes}, " in out
    said = [line.partition(": ")[2].partition(":")[0] for line in err.splitlines()]
    assert len(said) == len(set(said))
    expected = {
        flag
        for flag in ("--enable-torch-compile", "--trust-remote-code", "--enable-multi-layer-eagle")
        if flag in LINES[name]
    }
    assert expected <= set(said)


def test_a_token_map_comes_from_the_hub(folders: dict[str, str], tmp_path: Path) -> None:
    """SGLang's own example names a file of a repository on the hub: that one file is fetched."""
    places = folders | {"MAP": "org/fr-spec/freq_32768.pt"}
    files = {name: Path(folders["MAP"]).read_bytes() for name in ("freq_32768.pt", "freq_16384.pt")}
    with running_hub({"org/fr-spec": files}) as hub:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "foretoken.launch_server", *words(LINES["FR-Spec"], places), "--dry-run"],
            env=hub.environment(tmp_path / "cache"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert "drafters   eagle (EAGLE, process)\n" in done.stdout
    assert {path for path in hub.paths if "/resolve/" in path} == {"/org/fr-spec/resolve/main/freq_32768.pt"}


@contextmanager
def launched(line: list[str], log: Path) -> Iterator[Stack]:
    """Run a line by SGLang's command; its log has stdout, too."""
    port, grpc_port = free_ports(2)
    ports = ("--port", str(port), "--grpc-port", str(grpc_port), "--gateway-workers", "1", "--threads", "1")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "foretoken.launch_server", *line, *ports],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    stack = Stack(process, port, grpc_port, log)
    try:
        stack.wait_ready()
        yield stack
    finally:
        process.terminate()
        process.wait()
        stack.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_a_line_starts_and_answers(name: str, folders: dict[str, str], tmp_path: Path) -> None:
    """The answer has what SGLang's speed test divides: completion tokens and latency."""
    line = [word for word in words(LINES[name], folders) if not word.startswith("--port")]
    with launched(line, tmp_path / "log") as stack:
        body = {"input_ids": [5, 6, 7, 5, 6, 7, 5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
        meta = httpx.post(f"{stack.url}/generate", json=body, timeout=None).raise_for_status().json()["meta_info"]
        assert meta["completion_tokens"] > 0 and meta["e2e_latency"] > 0
        assert meta["spec_verify_ct"] > 0
        said = (tmp_path / "log").read_text()
        assert said.count("--cuda-graph-max-bs") == ("--cuda-graph-max-bs" in line)
        assert said.count("--trust-remote-code") == ("--trust-remote-code" in line)


def test_usage_names_the_command_as_typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for line, status in ((["--bogus"], 2), (["--help"], 0)):
        monkeypatch.setattr(sys, "argv", ["launch_server", *line])
        with pytest.raises(SystemExit) as ended:
            launch_server.main()
        said = "".join(capsys.readouterr())
        assert ended.value.code == status
        assert "Usage: python -m foretoken.launch_server [OPTIONS] MODEL\n" in said
        assert "launch_server serve" not in said


def test_sglangs_port_is_the_default(monkeypatch: pytest.MonkeyPatch, folders: dict[str, str]) -> None:
    """A flag or a config file wins."""
    seen: list[int] = []
    monkeypatch.setattr("foretoken.stack.check_ports", lambda host, port, grpc_port, are_free: seen.append(port))
    file = Path(folders["MAP"]).with_name("settings.toml")
    file.write_text("port = 4001")
    for more in ((), ("--port", "4002"), ("--config", str(file))):
        monkeypatch.setattr(sys, "argv", ["launch_server", folders["M"], "--dry-run", *more])
        with pytest.raises(SystemExit):
            launch_server.main()
    assert seen == [30000, 4002, 4001]
