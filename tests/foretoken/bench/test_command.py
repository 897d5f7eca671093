"""``foretoken bench`` as a user types it, against scripted servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from foretoken.bench.report import COMPARED
from foretoken.bench.settings import BenchSettings
from foretoken.config import build
from foretoken.errors import ConfigError
from tests.support.command_line import ENVIRONMENT, foretoken, free_port
from tests.support.scripted_server import STREAM_HEAD, ScriptedServer, chunk, event, scripted_server, usage_event

SPECULATION = {"num_spec_steps": 2, "num_accepted_draft_tokens": 4, "acceptance_histogram": [0, 0, 2]}
OF_FILE = ("--dataset-name", "file", "--dataset-path", "prompts.txt")
FEW = ("--num-prompts", "3", "--warmup-requests", "1", "--clients", "1")


def reply(value: object, status: str = "200 OK") -> Iterator[bytes]:
    text = json.dumps(value)
    yield f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


def serve(body: dict[str, Any]) -> Iterator[bytes]:
    """Answer as a server that speculates: all tokens in two chunks."""
    if body.get("path") == "/v1/models":
        yield from reply({"data": [{"id": "served"}]})
    elif "path" in body:
        yield from reply({}, "404 Not Found")
    elif not body["stream"]:
        yield from reply({"usage": {"prompt_tokens": len(str(body).split())}})
    else:
        yield STREAM_HEAD
        for text in ("a b c", "d e f g"):
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            yield chunk(event({"choices": [choice]}))
        usage = usage_event(body["max_tokens"], prompt=50)
        usage["metrics"] = {"speculative_decoding": SPECULATION}
        yield chunk(event(usage)) + chunk(event(b"[DONE]")) + chunk(b"")


def fail_some(body: dict[str, Any]) -> Iterator[bytes]:
    """Serve, but refuse the prompts that say so."""
    if "bad" in str(body.get("prompt")):
        return reply({"error": "full"}, "503 Service Unavailable")
    return serve(body)


def bench(server: ScriptedServer, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return foretoken("bench", "--url", str(server.address), *FEW, *words, **environment)


def test_a_sweep_prints_a_table_and_writes_json_and_a_picture(tmp_path: Path) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    with scripted_server(serve) as server:
        result = bench(
            server,
            *("--max-concurrency", "1,2", "--request-rate", "200", "--input-len", "9", "--output-len", "7"),
            *("--goodput", "ttft:60000,e2e:60000", "--output-file", str(file), "--picture", str(picture)),
            FORETOKEN_API_KEY="secret other",
        )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["load", "1", "2", "200/s"]
    assert max(map(len, lines)) <= 80
    assert "accepted by position: 100%, 100% (from answers)" in result.stdout
    content = json.loads(file.read_text())
    assert content["servers"] == [{"name": "served", "url": str(server.address), "model": "served"}]
    assert {row["server"] for row in content["rows"]} == {"served"} and "first" not in result.stderr
    for row in content["rows"]:
        # Three requests of 7 tokens by usage; each came in two chunks.
        assert (row["num_requests"], row["num_tokens"], row["num_chunks"]) == (3, 21, 6)
        assert (row["num_prompt_tokens"], row["good_share"]) == (150, 1.0)
        assert row["speculation"]["tokens_per_step"] == 3.0
    assert picture.read_text().startswith("<svg")
    assert set(server.keys) == {"Bearer secret"} and "secret" not in file.read_text() + result.stdout + result.stderr
    prompts = [body["prompt"] for body in server.bodies if body["stream"]]
    assert len(prompts) == len(set(prompts)) == 10
    assert all(
        body["model"] == "served" and body["max_tokens"] == 7 and body["ignore_eos"] for body in server.bodies[-9:]
    )


@pytest.mark.parametrize(("words", "status"), [((), 1), (("--allow-failures",), 0)])
def test_failed_requests_are_named_and_end_with_1(tmp_path: Path, words: tuple[str, ...], status: int) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("good\nbad\nfine\n")
    with scripted_server(fail_some) as server:
        dataset = ("--dataset-name", "file", "--dataset-path", str(file), "--warmup-requests", "0")
        result = bench(server, *dataset, *words)
    assert result.returncode == status
    assert "1 of 3 requests failed: status 503: full" in result.stderr
    table = [line.split("|")[1:3] for line in result.stdout.splitlines() if line.startswith("|")]
    figures = {title.strip(): figure.strip() for title, figure in table}
    assert (figures["requests"], figures["failed"]) == ("3", "1")


def test_two_servers_are_compared_in_pairs(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with scripted_server(serve) as one, scripted_server(serve) as other:
        result = bench(
            one,
            *("--compare-url", f"{other.address}/v1", "--compare-model", "another", "--num-rounds", "2"),
            *("--endpoint", "chat", "--compare-extra-request-body", '{"speculative": {"enabled": false}}'),
            *("--output-file", str(file)),
            FORETOKEN_COMPARE_API_KEY="second",
        )
    assert result.returncode == 0, result.stderr
    assert "first / second:" in result.stdout
    content = json.loads(file.read_text())
    # A round whose two chunks arrived in one read has a TPOT of zero, and no ratio.
    found = {ratio["figure"]: len(ratio["ratios"]) for ratio in content["ratios"]}
    second = [row for row in content["rows"] if row["server"] == "second"]
    assert found == {figure: count for figure in COMPARED if (count := sum(row[figure] > 0 for row in second))}
    assert found["tokens_per_s"] == len(second) == 2
    streamed = [[body for body in server.bodies if body["stream"]][1:] for server in (one, other)]
    assert [body["messages"] for body in streamed[0]] == [body["messages"] for body in streamed[1]]
    assert {body["model"] for body in streamed[1]} == {"another"} and "speculative" not in streamed[0][0]
    assert streamed[1][0]["speculative"] == {"enabled": False} and "cache_salt" not in streamed[1][0]
    assert set(other.keys) == {"Bearer second"} and one.keys == []


def test_one_server_compared_with_itself_reuses_no_prefix() -> None:
    with scripted_server(serve) as server:
        result = bench(server, "--compare-url", str(server.address), "--num-rounds", "1")
    assert result.returncode == 0, result.stderr
    salts = [body["cache_salt"] for body in server.bodies if body["stream"]]
    assert len(salts) == len(set(salts)) == 8


def test_turns_of_a_file_are_conversations(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question_id": "1", "category": "math", "turns": ["one", "two"]}) + "\n")
    words = ("--dataset-name", "speed-bench", "--dataset-path", str(file), "--warmup-requests", "0")
    with scripted_server(serve) as server:
        result = bench(server, *words, "--endpoint", "chat", "--num-prompts", "1")
        refused = bench(server, *words)
    assert result.returncode == 0, result.stderr
    streamed = [body["messages"] for body in server.bodies if body["stream"]]
    assert [[message["content"] for message in messages] for messages in streamed] == [
        ["one"],
        ["one", "a b cd e f g", "two"],
    ]
    assert "math" in result.stdout
    assert refused.returncode == 2 and "give --endpoint chat" in refused.stderr


@pytest.mark.parametrize("words", [(), ("--model", "m"), ("--model", "m", "--disable-ignore-eos", *OF_FILE)])
def test_a_server_that_wants_a_key_says_what_to_set(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Whichever request is the first: for the model, a trial, or of the warm-up."""
    (tmp_path / "prompts.txt").write_text("hello\n")

    def refuse(body: dict[str, Any]) -> Iterator[bytes]:
        return reply({"error": {"message": "no API key", "code": "invalid_api_key"}}, "401 Unauthorized")

    with scripted_server(refuse) as server, scripted_server(serve) as open_server:
        words = tuple(word.replace(OF_FILE[-1], str(tmp_path / "prompts.txt")) for word in words)
        missing, wrong = bench(server, *words), bench(server, *words, FORETOKEN_API_KEY="secret")
        compared = bench(open_server, "--compare-url", str(server.address))
    for result, what in (
        (missing, "status 401: the server wants an API key: set FORETOKEN_API_KEY or --api-key"),
        (wrong, "status 401: no API key (the key comes from FORETOKEN_API_KEY or --api-key)"),
        (compared, "the server wants an API key: set FORETOKEN_COMPARE_API_KEY or --compare-api-key"),
    ):
        (line,) = result.stderr.splitlines()
        assert result.returncode == 1 and line.endswith(what) and "{" not in line and "secret" not in line


def test_requests_start_within_the_duration_and_are_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    with scripted_server(serve) as server:
        words = ("--duration", "0.4", "--max-concurrency", "2", "--request-rate", "50", "--input-len", "5")
        result = foretoken("bench", "--url", str(server.address), "--clients", "1", *words, "--output-file", str(file))
        limited = bench(server, "--duration", "300", "--max-concurrency", "2")
    assert result.returncode == 0, result.stderr
    closed, arrivals = json.loads(file.read_text())["rows"]
    assert closed["num_failed"] == arrivals["num_failed"] == 0
    # No prompt was sent twice, however many there were.
    prompts = [body["prompt"] for body in server.bodies if body["stream"]]
    assert len(prompts) == len(set(prompts)) == 4 + closed["num_sent"] + arrivals["num_sent"] + 1 + 3
    assert limited.returncode == 0, limited.stderr


def test_a_server_that_is_not_there_is_one_line() -> None:
    result = foretoken("bench", "--url", f"127.0.0.1:{free_port()}")
    assert result.returncode == 1 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert "127.0.0.1" in result.stderr


def test_nothing_is_left_running_after_ctrl_c() -> None:
    arrived, release = threading.Event(), threading.Event()

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        if body.get("stream"):
            arrived.set()
            release.wait()
        yield from serve(body)

    with scripted_server(script) as server:
        command = [sys.executable, "-P", "-m", "foretoken", "bench", "--url", str(server.address), *FEW]
        child = subprocess.Popen(
            command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        arrived.wait()
        started = psutil.Process(child.pid).children(recursive=True)
        os.killpg(child.pid, signal.SIGINT)
        _, errors = child.communicate()
        release.set()
    assert child.returncode == 1 and "Traceback" not in errors
    _, alive = psutil.wait_procs(started, timeout=60)
    assert started and not alive


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_concurrency": ("1", "x")}, "--max-concurrency: expected a whole number"),
        ({"max_concurrency": "0"}, "--max-concurrency: expected numbers above 0"),
        ({"request_rate": "1,inf"}, "--request-rate: expected numbers above 0"),
        ({"goodput": "itl:5"}, "--goodput: expected ttft:MS, tpot:MS or e2e:MS"),
        ({"extra_request_body": "[1]"}, "--extra-request-body: expected a JSON object"),
        ({"extra_request_body": "{"}, "--extra-request-body: expected a JSON object"),
        ({"dataset_name": "sharegpt"}, "--dataset-path belongs to --dataset-name"),
        ({"dataset_path": "a.json"}, "--dataset-path belongs to --dataset-name"),
        ({"compare_model": "m"}, "need --compare-url"),
        ({"duration_s": 0}, "--duration: "),
        ({"duration_s": "inf"}, "--duration: "),
    ],
)
def test_settings_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(BenchSettings, values)
    assert message in caught.value.message


def test_lists_may_have_commas_or_come_as_lists() -> None:
    for value in ("1,4, 16", ("1", "4,16"), [1, 4, 16]):
        assert build(BenchSettings, {"max_concurrency": value}).max_concurrency == (1, 4, 16)
    bounds = build(BenchSettings, {"goodput": "ttft:500,tpot:2.5"}).bounds
    assert bounds is not None and (bounds.ttft_s, bounds.tpot_s) == (0.5, 0.0025) and bounds.e2e_s > 1e9
    assert build(BenchSettings, {}).bounds is None
