"""API keys: their file, their limits, and what separates their tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest
from click.testing import CliRunner

from foretoken.cli import app
from foretoken.config import build, to_environment, to_flags
from foretoken.errors import ConfigError, RateLimitError
from gateway.access.key import ApiKey, digest_of, new_secret
from gateway.access.key_file import entry_text, read_keys
from gateway.access.keyring import Keyring
from gateway.access.quota import Ledger, Quota
from gateway.config import GatewaySettings
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import MODEL, Stack
from tests.gateway.scripted_verifier import Player, steps

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
ALICE, BOB, CAROL, OWN = "alice's secret", "bob's secret", "carol's secret", "own-secret"
BODY = {"prompt": "a", "max_tokens": 2}
AT_LEAST_1 = "must be greater than or equal to 1"
# Carol's key is another server's.
KEYS = (
    entry_text("alice", ALICE),
    entry_text("bob", BOB, requests_per_minute=2, models=["other", MODEL]),
    entry_text("carol", CAROL, models=["other"]),
)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture(name="key_file")
def _key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(KEYS))
    return path


@pytest.fixture
def settings(settings: GatewaySettings, key_file: Path) -> GatewaySettings:
    return build(GatewaySettings, settings.model_dump() | {"api_keys": [OWN], "api_key_file": key_file})


# Keys in calls.


def test_a_given_key_that_the_file_has_too_is_the_files(key_file: Path) -> None:
    """FORETOKEN_API_KEY holds a client's key, and a server
    started in the same terminal reads it as well.
    """
    caller = Keyring([OWN, BOB], key_file).find(BOB.encode())
    assert caller is not None and caller.key is not None
    assert (caller.key.name, caller.key.requests_per_minute) == ("bob", 2)
    own = Keyring([OWN, BOB], key_file).find(OWN.encode())
    assert own is not None and own.key is not None and own.key.name == "api-key"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        ({"authorization": "Bearer"}, 401, "invalid_api_key"),
        ({"x-api-key": ""}, 401, "invalid_api_key"),
        (bearer("alice"), 401, "invalid_api_key"),
        (bearer(ALICE + "x"), 401, "invalid_api_key"),
        ({"authorization": f"Basic {ALICE}"}, 401, "invalid_api_key"),
        (bearer(CAROL), 403, "model_not_found"),
        (bearer(ALICE), 200, None),
        ({"authorization": f"bEARER  {ALICE}"}, 200, None),
        ({"x-api-key": ALICE}, 200, None),
        ({"x-api-key": OWN}, 200, None),
        # A proxy's password beside our key.
        ({"authorization": "Basic dTpw", "x-api-key": ALICE}, 200, None),
        ({"authorization": f"Bearer {ALICE}", "x-api-key": "wrong"}, 200, None),
    ],
)
async def test_a_call_needs_a_key(stack: Stack, headers: dict[str, str], status: int, code: str | None) -> None:
    stack.verifier.script = steps([65, 66])
    answer = await stack.http.post(URL, json=BODY, headers=headers)
    assert answer.status_code == status, answer.text
    assert ("www-authenticate" in answer.headers) is (status == 401)
    if status != 200:
        assert answer.json()["error"]["code"] == code
        assert not stack.verifier.submitted


async def test_the_openai_client_knows_the_errors(stack: Stack) -> None:
    stack.verifier.script = steps([65, 66])
    one = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)

    def client(key: str) -> openai.AsyncOpenAI:
        # They share the first one's connections.
        return one.with_options(api_key=key)

    with pytest.raises(openai.AuthenticationError):
        await client("wrong").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        await client(CAROL).models.list()
    for _ in range(2):
        await client(BOB).completions.create(model=MODEL, prompt="a", max_tokens=2)
    with pytest.raises(openai.RateLimitError) as caught:
        await client(BOB).completions.create(model=MODEL, prompt="a", max_tokens=2)
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
    assert [model.id for model in (await client(ALICE).models.list()).data] == [MODEL]
    await one.close()


async def test_grpc_calls_need_a_key(stack: Stack) -> None:
    stack.verifier.script = steps([65, 66])
    request = gateway_pb2.GenerateRequest(text="a", sampling={"max_tokens": 2})
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def ask(*metadata: tuple[str, str]) -> grpc.StatusCode:
            try:
                async for _ in stub.Generate(request, metadata=metadata):
                    pass
            except grpc.aio.AioRpcError as error:
                assert MODEL not in str(error.details())
                return error.code()
            return grpc.StatusCode.OK

        assert await ask() is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(("authorization", "Bearer wrong")) is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(("x-api-key", CAROL)) is grpc.StatusCode.PERMISSION_DENIED
        assert not stack.verifier.submitted
        answers = [await ask(("authorization", f"Bearer {BOB}")) for _ in range(3)]
        assert answers == [grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModel(gateway_pb2.GetModelRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await stub.GetModel(gateway_pb2.GetModelRequest(), metadata=(("x-api-key", ALICE),))).model == MODEL


async def test_a_key_is_a_tenant_of_its_own(stack: Stack) -> None:
    """No salt of one key is a salt of another: prefix and n-gram caches are kept by salt."""
    stack.verifier.script = steps([65, 66])
    for secret in (ALICE, OWN):
        for salt in (None, "", "x", "api-key", "alice"):
            body = BODY if salt is None else {**BODY, "cache_salt": salt}
            assert (await stack.http.post(URL, json=body, headers=bearer(secret))).status_code == 200
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateRequest(text="a", sampling={"max_tokens": 2}, cache_salt="x")
        async for _ in stub.Generate(request, metadata=(("x-api-key", ALICE),)):
            pass
    salts = [sequence.cache_salt for sequence in stack.verifier.submitted]
    assert len(set(salts[:-1])) == 10 and salts[-1] == salts[2]
    assert all(salts) and max(map(len, salts)) <= 256


async def test_a_name_is_logged_and_counted_and_no_secret_is(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    stack.verifier.script = steps([65, 66])
    for _ in range(3):
        await stack.http.post(URL, json=BODY, headers=bearer(BOB))
    await stack.http.post(URL, json=BODY, headers=bearer("a wrong secret"))
    records = [record for record in caplog.records if record.name == "gateway.core"]
    assert [getattr(record, "key", None) for record in records] == ["bob", "bob", "bob", None]
    name = "foretoken_key_{}_total".format
    metrics = (await stack.http.get("/metrics", headers=bearer(OWN))).text
    stack.http.headers.update(bearer(OWN))
    assert await stack.metric(name("requests"), key="bob", outcome="ok") == 2.0
    assert await stack.metric(name("rejections"), key="bob", reason="resource_exhausted") == 1.0
    assert await stack.metric(name("generation_tokens"), key="bob") == 4.0
    shown = metrics + caplog.text + "".join(str(vars(record)) for record in caplog.records)
    for secret in (ALICE, BOB, OWN, "a wrong secret"):
        assert secret not in shown and digest_of(secret.encode()).hex() not in shown


async def test_metrics_are_not_for_every_tenant(stack: Stack) -> None:
    answers = [(await stack.http.get("/metrics", headers=bearer(secret))).status_code for secret in (ALICE, OWN)]
    assert answers == [403, 200]


async def test_a_request_that_runs_is_counted_until_it_ends(stack: Stack, key_file: Path) -> None:
    key_file.write_text(entry_text("bob", BOB, max_concurrent_requests=1, tokens_per_minute=5))
    stack.gateway.reload()

    async def held(player: Player) -> None:
        player.tokens([65])
        await player.aborted.wait()
        player.finish()

    stack.verifier.script = held
    async with stack.http.stream("POST", URL, json={**BODY, "stream": True}, headers=bearer(BOB)) as answer:
        await anext(answer.aiter_lines())
        refused = await stack.http.post(URL, json=BODY, headers=bearer(BOB))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "at once" in refused.json()["error"]["message"]
    while stack.gateway.core.admission.num_requests:
        await stack.http.get("/health")
    stack.verifier.script = steps([65, 66])
    codes = [(await stack.http.post(URL, json=BODY, headers=bearer(BOB))).status_code for _ in range(2)]
    # Prompt and output of the first, which was cut after one token, and of the second.
    assert codes == [200, 429]


async def test_long_outputs_at_once_cannot_exceed_the_tokens_of_a_key(stack: Stack, key_file: Path) -> None:
    key_file.write_text(entry_text("bob", BOB, tokens_per_minute=100))
    stack.gateway.reload()
    go_on = asyncio.Event()

    async def held(player: Player) -> None:
        player.tokens([65])
        await go_on.wait()
        player.finish()

    stack.verifier.script = held
    body = {**BODY, "n": 2, "max_tokens": 30, "stream": True}
    async with stack.http.stream("POST", URL, json=body, headers=bearer(BOB)) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        refused = await stack.http.post(URL, json={**BODY, "max_tokens": 60}, headers=bearer(BOB))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "its running requests may write 60" in refused.json()["error"]["message"]
        go_on.set()
        assert (await stack.http.post(URL, json={**BODY, "max_tokens": 30}, headers=bearer(BOB))).status_code == 200
        assert "data: [DONE]" in [line async for line in lines]
    # Both wrote next to nothing, and gave back the rest.
    assert (await stack.http.post(URL, json={**BODY, "max_tokens": 60}, headers=bearer(BOB))).status_code == 200


@pytest.mark.parametrize(
    ("secret", "given", "submitted"), [(ALICE, 0, 0), (ALICE, 3, 3), (BOB, 0, -7), (BOB, 2, -5), (OWN, -9, -9)]
)
async def test_a_key_adds_its_priority(stack: Stack, key_file: Path, secret: str, given: int, submitted: int) -> None:
    key_file.write_text(entry_text("alice", ALICE) + entry_text("bob", BOB, priority=-7))
    stack.gateway.reload()
    await stack.http.post(URL, json={**BODY, "priority": given}, headers=bearer(secret))
    assert stack.verifier.submitted[-1].priority == submitted


async def test_a_key_cannot_put_its_requests_before_others(stack: Stack) -> None:
    refused = await stack.http.post(URL, json={**BODY, "priority": -1}, headers=bearer(ALICE))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    request = gateway_pb2.GenerateRequest(text="a", priority=-1)
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request, metadata=(("x-api-key", ALICE),))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# The file.


async def test_a_new_file_counts_from_the_next_call(
    stack: Stack, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def codes() -> list[int]:
        return [
            (await stack.http.get("/v1/models", headers=bearer(secret))).status_code for secret in (ALICE, BOB, OWN)
        ]

    key_file.write_text(KEYS[1])
    assert await codes() == [200, 200, 200]
    stack.gateway.reload()
    assert await codes() == [401, 200, 200]
    for bad in ("keys = 1", KEYS[0] + KEYS[0], "[[keys]]\nname = 'api-key'\nsha256 = '" + "0" * 64 + "'"):
        key_file.write_text(bad)
        stack.gateway.reload()
        assert await codes() == [401, 200, 200]
        assert str(key_file) in caplog.records[-1].reason  # type: ignore[attr-defined]
    key_file.unlink()
    stack.gateway.reload()
    assert await codes() == [401, 200, 200]


DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "keys: must hold at least one table [[keys]]"),
        ("keys = []", "keys: must hold at least one table [[keys]]"),
        ("keys = [1]", "key 1 must be a table"),
        ("[[keys]\n", "is not TOML: "),
        ("key = 1", "there is no field 'key'"),
        ("[[keys]]\nname = 'a'", "key 1: sha256: must be given"),
        (f"[[keys]]\nsha256 = '{DIGEST}'", "key 1: name: must be given"),
        (f"[[keys]]\nname = 'A'\nsha256 = '{DIGEST}'", "key 1: name: must be 1 to 64 characters"),
        ("[[keys]]\nname = 'a'\nsha256 = 'sk-foretoken-plain'", "key 1: sha256: must be 64 hexadecimal digits"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\nrpm = 1", "key 1: rpm: there is no such field"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\nrequests_per_minute = 0", f"requests_per_minute: {AT_LEAST_1}"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\ntokens_per_minute = 1.5", "key 1: tokens_per_minute: "),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\nmodels = 'm'", "key 1: models: "),
        (f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\n" * 2, "name: a is there twice"),
        (
            f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\n[[keys]]\nname = 'b'\nsha256 = '{DIGEST.upper()}'",
            "sha256: a and b have the same key",
        ),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(path)
    assert fault in caught.value.message and str(path) in caught.value.message
    assert "sk-foretoken-plain" not in caught.value.message


def test_a_new_key_is_read_back(tmp_path: Path) -> None:
    path, secret = tmp_path / "keys.toml", new_secret()
    path.write_text(entry_text("a.b-c_1", secret, tokens_per_minute=7, models=['m"1', "m2"], metrics=True, priority=-7))
    key = ApiKey("a.b-c_1", digest_of(secret.encode()), None, 7, None, frozenset({'m"1', "m2"}), -7, metrics=True)
    assert read_keys(path) == [key]
    assert secret != new_secret() and secret not in path.read_text()
    caller = Keyring([], path).find(secret.encode())
    assert caller is not None and caller.name == "a.b-c_1"
    assert Keyring([], path).find(b"") is None


@pytest.mark.parametrize("flag", ["--requests-per-minute", "--tokens-per-minute", "--max-concurrent-requests"])
def test_a_limit_of_zero_makes_no_key(flag: str) -> None:
    result = CliRunner().invoke(app, ["key", "bob", flag, "0"])
    assert str(result.exception) == f"{flag.removeprefix('--').replace('-', '_')}: {AT_LEAST_1}"
    assert result.output == ""


def test_a_secret_leaves_settings_only_for_the_environment_of_the_gateway(settings: GatewaySettings) -> None:
    settings = build(GatewaySettings, settings.model_dump() | {"api_keys": ["first-secret", "second-secret"]})
    assert to_environment(settings) == {"FORETOKEN_API_KEY": "first-secret second-secret"}
    shown = repr(settings) + str(settings) + " ".join(to_flags(settings)) + settings.model_dump_json()
    assert "first-secret" not in shown and "second-secret" not in shown
    with pytest.raises(ConfigError) as caught:
        build(GatewaySettings, settings.model_dump() | {"api_keys": ["a secret with spaces"]})
    assert caught.value.message.startswith("--api-key: ") and "secret with" not in caught.value.message


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ({}, True),
        ({"insecure": True}, False),
        ({"api_keys": [OWN]}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "::"}, True),
    ],
)
def test_other_machines_need_a_key_or_the_owner_s_word(
    settings: GatewaySettings, more: dict[str, object], is_refused: bool
) -> None:
    values = settings.model_dump() | {"host": "0.0.0.0", "api_keys": [], "api_key_file": None}
    exposed = build(GatewaySettings, values | more)
    if not is_refused:
        exposed.check_access()
        return
    with pytest.raises(ConfigError, match=r"^--host .*: other machines could use this server without a key"):
        exposed.check_access()


# Limits.


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 6000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def _clock() -> Iterator[Clock]:
    yield Clock()


def quota(ledger: Ledger, clock: Clock, **limits: int) -> Quota:
    return Quota(ApiKey("a", b"", **limits), ledger.rows(["a"])["a"], clock)


def wait_of(held: Quota) -> float:
    """Return for how long a key must wait; 0 if it may start a request."""
    try:
        held.check()
    except RateLimitError as error:
        return error.retry_after_s
    return 0.0


@pytest.mark.parametrize("second", [0.0, 20.0, 59.0])
def test_requests_may_come_again_after_the_time_that_is_named(clock: Clock, second: float) -> None:
    clock.now += second
    held = quota(Ledger(), clock, requests_per_minute=10)
    for _ in range(10):
        with held.enter(0, 0):
            pass
    wait = wait_of(held)
    assert 0 < wait <= 120
    clock.now += wait - 0.01
    assert wait_of(held) > 0
    clock.now += 0.02
    assert wait_of(held) == 0
    with held.enter(0, 0):
        pass
    # Each further one becomes free a tenth of a minute later.
    assert wait_of(held) == pytest.approx(6, abs=0.1)
    clock.now += 120
    for _ in range(10):
        with held.enter(0, 0):
            pass


def test_tokens_count_when_they_are_known(clock: Clock) -> None:
    held = quota(Ledger(), clock, tokens_per_minute=100)
    with held.enter(60, 0):
        assert wait_of(held) == 0
    held.spend(40)
    assert wait_of(held) > 0
    clock.now += 120
    assert wait_of(held) == 0


def test_requests_that_run_together_cannot_exceed_the_limit(clock: Clock) -> None:
    held = quota(Ledger(), clock, tokens_per_minute=100)
    with held.enter(10, 50):
        with pytest.raises(RateLimitError, match="its running requests may write 50"), held.enter(1, 40):
            pass
        with held.enter(1, 39):
            # All 100 tokens are promised.
            assert wait_of(held) == 0
            with pytest.raises(RateLimitError) as refused, held.enter(1, 0):
                pass
            assert refused.value.retry_after_s == 1
        held.spend(5)
    # The first gave back what it did not write.
    with held.enter(1, 80), pytest.raises(RateLimitError), held.enter(1, 3):
        pass


def test_a_request_alone_may_need_more_than_the_limit(clock: Clock) -> None:
    held = quota(Ledger(), clock, tokens_per_minute=100)
    with held.enter(10, 4000):
        with pytest.raises(RateLimitError), held.enter(1, 1):
            pass
        held.spend(200)
    assert wait_of(held) > 60


def test_processes_count_together(tmp_path: Path, clock: Clock) -> None:
    ledgers = [Ledger(tmp_path, number, 3) for number in range(3)]
    # Each learns the names in another order.
    ledgers[0].rows(["a"])
    ledgers[1].rows(["c", "b", "a"])
    ledgers[2].rows(["b", "a"])
    held = [quota(ledger, clock, requests_per_minute=7, max_concurrent_requests=3) for ledger in ledgers]
    with held[0].enter(0, 0), held[1].enter(0, 0), held[2].enter(0, 0):
        assert [wait_of(each) for each in held] == [1, 1, 1]
    for each in (held[0], held[1], held[2], held[2]):
        with each.enter(0, 0):
            pass
    assert all(wait_of(each) > 1 for each in held)
    other = Quota(ApiKey("b", b"", 1), ledgers[0].rows(["b"])["b"], clock)
    assert wait_of(other) == 0


def test_a_process_that_died_leaves_no_running_request(tmp_path: Path, clock: Clock) -> None:
    first = quota(Ledger(tmp_path, 0, 2), clock, max_concurrent_requests=1, requests_per_minute=2)
    dead = quota(Ledger(tmp_path, 1, 2), clock, max_concurrent_requests=1, requests_per_minute=2)
    request = dead.enter(0, 50)
    request.__enter__()
    assert wait_of(first) == 1
    counting = quota(Ledger(tmp_path, 0, 2), clock, tokens_per_minute=40)
    with pytest.raises(RateLimitError), counting.enter(1, 1):
        pass
    again = quota(Ledger(tmp_path, 1, 2), clock, max_concurrent_requests=1, requests_per_minute=2)
    assert wait_of(first) == wait_of(again) == 0
    with again.enter(0, 0):
        pass
    with counting.enter(1, 1):
        pass
    # What it counted in the minute stays.
    assert wait_of(first) > 1
