"""Sources report the verifiers there are, again after each
change, and stand still when they cannot look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foretoken.errors import UnavailableError
from gateway.discovery.address_file import AddressFile
from gateway.discovery.all_sources import AllSources
from gateway.discovery.dns_addresses import DnsAddresses
from gateway.discovery.dns_services import DnsServices
from gateway.discovery.fixed_list import FixedList
from gateway.discovery.locations import check_location, source_of
from gateway.discovery.looked_up import LookedUp
from gateway.discovery.pushed_set import PushedSet
from gateway.discovery.source import VerifierSource
from tests.gateway.discovery.name_server import name_server

pytestmark = pytest.mark.anyio

FAST_S = 0.01


async def next_set(changes: AsyncIterator[frozenset[str]]) -> set[str]:
    async with asyncio.timeout(60):
        return set(await anext(changes))


async def until_reason(source: VerifierSource, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in source.reason:
            await asyncio.sleep(FAST_S)


async def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "verifiers"
    path.write_text("# zone a\n10.0.0.1:50061\n\nunix:/run/v.sock  # here\n")
    source = source_of([f"file:{path}"], interval_s=FAST_S)
    changes = source.changes()
    assert await next_set(changes) == {"10.0.0.1:50061", "unix:/run/v.sock"} and source.reason == ""
    replacement = tmp_path / "new"
    replacement.write_text("10.0.0.2:50061\n")
    replacement.rename(path)
    assert await next_set(changes) == {"10.0.0.2:50061"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no verifier"),
        ("# all gone\n", "names no verifier"),
        ("10.0.0.3:5\n10.0.0", "line 2: expected unix:"),
    ],
)
async def test_an_empty_or_half_written_file_drains_nothing(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "verifiers"
    path.write_text("10.0.0.1:50061\n")
    source = LookedUp(str(path), AddressFile(path), FAST_S)
    changes = source.changes()
    await next_set(changes)
    following = asyncio.create_task(next_set(changes))
    path.write_text(text)
    await until_reason(source, reason)
    assert not following.done()
    path.write_text("10.0.0.1:50061\n10.0.0.2:50061\n")
    assert await following == {"10.0.0.1:50061", "10.0.0.2:50061"}
    assert source.reason == ""


async def test_a_missing_file_is_awaited(tmp_path: Path) -> None:
    path = tmp_path / "verifiers"
    source = LookedUp(str(path), AddressFile(path), FAST_S)
    following = asyncio.create_task(next_set(source.changes()))
    await until_reason(source, "cannot be read: ")
    path.write_text("10.0.0.1:50061")
    assert await following == {"10.0.0.1:50061"}


async def test_srv_records_are_followed_and_a_failing_name_server_drains_nothing() -> None:
    name = "_verifier._tcp.models.example"
    async with name_server(name) as (server, resolver):
        server.records = [(50061, "v0.models.example"), (50062, "v1.models.example")]
        source = LookedUp(name, DnsServices(name, resolver), FAST_S)
        changes = source.changes()
        assert await next_set(changes) == {"v0.models.example:50061", "v1.models.example:50062"}
        following = asyncio.create_task(next_set(changes))
        for records, reason in ((None, "SERVFAIL"), ([], "does not exist")):
            server.records = records
            await until_reason(source, reason)
            asked = server.num_queries
            while server.num_queries < asked + 3:
                await asyncio.sleep(FAST_S)
            assert not following.done()
        server.records = [(50062, "v1.models.example")]
        assert await following == {"v1.models.example:50062"}


async def test_all_addresses_of_a_name_are_verifiers() -> None:
    """The system's resolver knows localhost, by one record or by two."""
    found = await DnsAddresses("localhost", 50061)()
    assert found and found <= {"127.0.0.1:50061", "[::1]:50061"}
    with pytest.raises(UnavailableError, match="is not resolved"):
        await DnsAddresses("verifiers.invalid", 50061)()


async def test_several_sources_are_one_and_none_waits_for_another(tmp_path: Path) -> None:
    path, pushed = tmp_path / "verifiers", PushedSet()
    file = LookedUp("file", AddressFile(path), FAST_S)
    source = AllSources([FixedList(["a:1"]), file, pushed])
    changes = source.changes()
    assert await next_set(changes) == {"a:1"}
    await until_reason(source, "cannot be read")
    assert "no verifier was reported yet" in source.reason
    path.write_text("b:1\n")
    assert await next_set(changes) == {"a:1", "b:1"}
    pushed.set(["c:1", "a:1"])
    assert await next_set(changes) == {"a:1", "b:1", "c:1"}
    pushed.set([])
    assert await next_set(changes) == {"a:1", "b:1"} and source.reason == ""
    await changes.aclose()  # type: ignore[attr-defined]


async def test_a_fault_in_one_source_is_not_hidden() -> None:
    async def fail() -> frozenset[str]:
        raise ZeroDivisionError

    source = AllSources([FixedList(["a:1"]), LookedUp("faulty", fail, FAST_S)])
    with pytest.raises(ZeroDivisionError):
        async for _ in source.changes():
            pass


def test_a_pushed_address_is_checked() -> None:
    with pytest.raises(ValueError, match="expected unix:/path or host:port"):
        PushedSet().set(["nowhere"])


@pytest.mark.parametrize(
    "location",
    [
        "unix:/v.sock",
        "host:1",
        "[::1]:50061",
        "file:/etc/verifiers",
        "dns://verifier.models:50061",
        "dns+srv://_v._tcp.models",
    ],
)
def test_locations(location: str) -> None:
    assert check_location(location) == location


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("file:verifiers", "absolute path"),
        ("dns://verifier", "unix:/path or host:port"),
        ("dns://:50061", "unix:/path or host:port"),
        ("dns://a/b:50061", "dns://NAME:PORT"),
        ("dns://verifier:0", "port from 1 to 65535"),
        ("dns+srv://verifier:50061", "without a port"),
        ("dns+srv://", "expected a name"),
        ("unix:v.sock", "absolute path"),
    ],
)
def test_wrong_locations(location: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_location(location)
