"""The operator's endpoints for corpora: closed without a key, passed on to all verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from foretoken.cli import app
from foretoken.commands import corpus_client
from foretoken.commands.corpus_client import CorpusClient, cut, texts_of
from foretoken.corpora import token_ids_from
from foretoken.errors import ConfigError, ForetokenError, NotFoundError, UnavailableError
from gateway.config import GatewaySettings
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from protos import verifier_pb2
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import ScriptedVerifier, serving
from tests.integration.stack import ENVIRONMENT
from tests.support.tcp_clients import JSON_TYPE

pytestmark = pytest.mark.anyio
KEY = "an operator's key"
URL = "/v1/corpora"
AUTH = {"authorization": f"Bearer {KEY}"}


class CorpusVerifier(ScriptedVerifier):
    """A verifier that keeps corpora as a list of texts by name."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.corpora: dict[str, list[list[int]]] = {}
        # Corpora of drafters other than ``ngram``.
        self.others: list[verifier_pb2.Corpus] = []
        self.drafters: list[str] = []

    async def AddCorpus(self, request: verifier_pb2.AddCorpusRequest, context: Any) -> verifier_pb2.AddCorpusResponse:
        self.drafters.append(request.drafter)
        before = self.corpora.get(request.name, []) if request.append else []
        self.corpora[request.name] = [*before, token_ids_from(request.token_ids).tolist()]
        return verifier_pb2.AddCorpusResponse(corpus=self._corpus(request.name))

    async def RemoveCorpus(
        self, request: verifier_pb2.RemoveCorpusRequest, context: Any
    ) -> verifier_pb2.RemoveCorpusResponse:
        if self.corpora.pop(request.name, None) is None:
            raise NotFoundError(f"there is no corpus {request.name!r}", field="name")
        return verifier_pb2.RemoveCorpusResponse()

    async def ListCorpora(
        self, request: verifier_pb2.ListCorporaRequest, context: Any
    ) -> verifier_pb2.ListCorporaResponse:
        return verifier_pb2.ListCorporaResponse(corpora=[*map(self._corpus, self.corpora), *self.others])

    def _corpus(self, name: str) -> verifier_pb2.Corpus:
        return verifier_pb2.Corpus(name=name, num_tokens=sum(map(len, self.corpora[name])), drafter="ngram")


class Operated:
    """A gateway with operator's endpoints before two verifiers."""

    def __init__(self, verifiers: list[CorpusVerifier], http: httpx.AsyncClient, tokenizer: Tokenizer, key: Path):
        self.verifiers, self.http, self.tokenizer, self.key = verifiers, http, tokenizer, key

    @property
    def corpora(self) -> list[dict[str, list[list[int]]]]:
        return [verifier.corpora for verifier in self.verifiers]


@pytest.fixture
async def operated(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Operated]:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    paths = [tmp_path / f"v{number}.sock" for number in range(2)]
    changes = {"admin_api_key_file": key, "verifiers": tuple(f"unix:{path}" for path in paths)}
    async with contextlib.AsyncExitStack() as stack:
        verifiers = [CorpusVerifier(tokenizer.vocab_size) for _ in paths]
        for verifier, path in zip(verifiers, paths, strict=True):
            await stack.enter_async_context(serving(verifier, path))
        gateway = await stack.enter_async_context(Gateway(settings.model_copy(update=changes)))
        for client in gateway.verifiers.clients:
            await client.wait_up()
        url = f"http://127.0.0.1:{settings.port}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=None, headers=JSON_TYPE, verify=False)
        )
        yield Operated(verifiers, http, tokenizer, key)


CALLS = [("POST", URL), ("GET", URL), ("DELETE", f"{URL}/a")]


@pytest.mark.parametrize(("method", "url"), CALLS)
async def test_without_a_key_file_there_are_no_such_routes(stack: Stack, method: str, url: str) -> None:
    answer = await stack.http.request(method, url, headers=AUTH)
    assert answer.status_code == 404
    document = (await stack.http.get("/openapi.json")).json()
    assert not [path for path in document["paths"] if "corpora" in path]


@pytest.mark.parametrize(("method", "url"), CALLS)
@pytest.mark.parametrize(
    ("header", "status", "kind"),
    [
        (None, 401, "invalid_request_error"),
        (f"Basic {KEY}", 401, "invalid_request_error"),
        ("Bearer x", 401, "invalid_request_error"),
        ("Bearer an operator's kez", 401, "invalid_request_error"),
        (f"Bearer {KEY}x", 401, "invalid_request_error"),
    ],
)
async def test_a_key_is_needed(
    operated: Operated, method: str, url: str, header: str | None, status: int, kind: str
) -> None:
    operated.verifiers[0].corpora["a"] = [[1]]
    # Refused before the body is looked at.
    answer = await operated.http.request(
        method, url, headers={} if header is None else {"authorization": header}, content=b"{"
    )
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert operated.corpora == [{"a": [[1]]}, {}]


async def test_other_endpoints_need_no_key(operated: Operated) -> None:
    assert (await operated.http.get("/v1/models")).status_code == 200


async def test_add_list_remove_on_all_verifiers(operated: Operated) -> None:
    text, more = operated.tokenizer.encode("hello world"), [5, 6, 7]
    answer = await operated.http.post(URL, json={"name": "docs", "text": "hello world"}, headers=AUTH)
    assert answer.json() == {"object": "corpus", "name": "docs", "num_tokens": len(text), "drafter": "ngram"}
    body = {"name": "docs", "token_ids": more, "append": True, "drafter": "ngram"}
    answer = await operated.http.post(URL, json=body, headers=AUTH)
    assert answer.json()["num_tokens"] == len(text) + 3
    assert operated.corpora == [{"docs": [text, more]}] * 2
    assert operated.verifiers[0].drafters == ["", "ngram"]
    listed = (await operated.http.get(URL, headers=AUTH)).json()
    entry = {"object": "corpus", "name": "docs", "num_tokens": len(text) + 3, "drafter": "ngram"}
    assert listed == {"object": "list", "data": [entry]}
    await operated.http.post(URL, json={"name": "docs", "token_ids": more}, headers=AUTH)
    assert operated.corpora == [{"docs": [more]}] * 2
    removed = await operated.http.delete(f"{URL}/docs", headers=AUTH)
    assert removed.json() == {"object": "corpus", "name": "docs", "deleted": True}
    assert operated.corpora == [{}, {}]
    missing = await operated.http.delete(f"{URL}/docs", headers=AUTH)
    assert missing.status_code == 404 and missing.json()["error"]["code"] is None


async def test_the_list_is_of_all_drafters_of_all_verifiers(operated: Operated) -> None:
    await operated.http.post(URL, json={"name": "docs", "token_ids": [1]}, headers=AUTH)
    other = verifier_pb2.Corpus(name="docs", num_tokens=7, drafter="other")
    operated.verifiers[1].others.append(other)
    listed = (await operated.http.get(URL, headers=AUTH)).json()["data"]
    assert [(entry["drafter"], entry["num_tokens"]) for entry in listed] == [("ngram", 1), ("other", 7)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"text": "a"}, "name"),
        ({"name": "A b", "text": "a"}, "name"),
        ({"name": "a"}, "text"),
        ({"name": "a", "text": "a", "token_ids": [1]}, "text"),
        ({"name": "a", "text": ""}, "text"),
        ({"name": "a", "token_ids": []}, "token_ids"),
        ({"name": "a", "token_ids": ["a"]}, "token_ids"),
        ({"name": "a", "token_ids": [-1]}, "token_ids"),
        ({"name": "a", "token_ids": [2**40]}, "token_ids"),
        ({"name": "a", "token_ids": [2**70]}, "token_ids"),
        ({"name": "a", "token_ids": [1] * 1_000_001}, "token_ids"),
        ({"name": "a", "text": "a", "more": 1}, "more"),
        ({"name": "a", "text": "a", "append": "yes"}, "append"),
    ],
)
async def test_refused(operated: Operated, body: dict[str, Any], field: str) -> None:
    answer = await operated.http.post(URL, json=body, headers=AUTH)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert operated.corpora == [{}, {}]


async def test_a_verifier_that_is_gone(settings: GatewaySettings, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    async with (
        Gateway(settings.model_copy(update={"admin_api_key_file": key})),
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{settings.port}", timeout=None, headers=JSON_TYPE, verify=False
        ) as http,
    ):
        answer = await http.get(URL, headers=AUTH)
    assert answer.status_code == 503 and "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "cannot read .*: No such file"),
        ("", "one line of at least 16 printable characters"),
        ("too short", "one line of at least 16 printable characters"),
        ("a private key\nof two lines", "one line of at least 16 printable characters"),
        ("ümlaute are not ASCII", "it is not ASCII"),
    ],
)
def test_a_bad_operator_key_is_refused_and_not_shown(
    settings: GatewaySettings, tmp_path: Path, text: str | None, fault: str
) -> None:
    key = tmp_path / "key"
    if text is not None:
        key.write_text(text)
    with pytest.raises(ConfigError, match=f"^--admin-api-key-file: .*{fault}") as caught:
        settings.model_copy(update={"admin_api_key_file": key}).admin_key()
    for command in ("corpus", "drafters"):
        result = CliRunner().invoke(app, [command, "list", "--admin-api-key-file", str(key), "--url", "127.0.0.1:1"])
        assert str(result.exception) == caught.value.message
    assert not text or text not in caught.value.message.replace(str(key), "")


async def test_commands(operated: Operated, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "b.txt").write_text("stop here")

    async def run(*words: str) -> tuple[int | None, str, str]:
        options = ("--url", str(operated.http.base_url), "--admin-api-key-file", str(operated.key))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "foretoken", "corpus", *words, *options),
            env=ENVIRONMENT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        return process.returncode, output.decode(), errors.decode()

    first, second = operated.tokenizer.encode("hello world"), operated.tokenizer.encode("stop here")
    assert await run("add", "docs", str(tmp_path / "a.txt")) == (0, f"docs: {len(first)} tokens, drafter ngram\n", "")
    both = (0, f"docs: {len(first) + len(second)} tokens, drafter ngram\n", "")
    assert await run("add", "docs", "--append", str(tmp_path / "b.txt")) == both
    assert operated.corpora == [{"docs": [first, second]}] * 2
    assert await run("list") == both
    assert await run("remove", "docs") == (0, "docs: removed\n", "")
    assert operated.corpora == [{}, {}]
    assert await run("list") == (0, "no corpora\n", "")
    assert await run("remove", "docs") == (1, "", "foretoken: there is no corpus 'docs'\n")
    status, output, errors = await run("remove", "a/b")
    assert (status, output) == (1, "") and errors.startswith("foretoken: NAME must be 1 to 64 characters of a-z")


async def test_long_texts_go_in_parts(operated: Operated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_client, "MAX_TEXT_CHARS", 12)
    for name, data in (("a.txt", b"hello\nworld\n"), ("b.txt", b"stop here"), ("c.bin", b"\xff\xfe")):
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    def add() -> None:
        with CorpusClient(str(operated.http.base_url), KEY) as client:
            client.add("docs", ["old"])
            client.add("docs", texts_of([folder]))

    await asyncio.to_thread(add)
    texts = [operated.tokenizer.decode(ids) for ids in operated.corpora[0]["docs"]]
    assert texts == ["hello\n", "world\n", "stop here"]


async def test_client_errors(stack: Stack) -> None:
    def without_routes() -> None:
        with CorpusClient(stack.url.removeprefix("http://") + "/v1", KEY) as client:
            for call in (client.list, lambda: client.remove("a"), lambda: client.add("a", ["b"])):
                with pytest.raises(ForetokenError, match="--admin-api-key-file"):
                    call()

    await asyncio.to_thread(without_routes)
    with CorpusClient("127.0.0.1:1", KEY) as client, pytest.raises(UnavailableError, match="nothing answers"):
        client.list()


def test_texts_of_files(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "2"), ("c", "")):
        (tmp_path / name).write_text(text)
    assert list(texts_of([tmp_path / "b", tmp_path])) == ["2\n\n1\n\n2\n\n"]
    assert list(texts_of([tmp_path / "c"])) == []
    (tmp_path / "d").write_bytes(b"\xff")
    for bad in ("d", "missing"):
        with pytest.raises(ConfigError):
            list(texts_of([tmp_path / bad]))


def test_cuts_are_at_ends_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_client, "MAX_TEXT_CHARS", 10)
    assert cut("abc\ndef\nghi") == ["abc\ndef\n", "ghi"]
    assert cut("x" * 20) == ["x" * 8, "x" * 8, "x" * 4]
    assert cut("") == [""]
