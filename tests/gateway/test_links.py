"""The gateway and a verifier over TCP: its link token, and what it
says of one that wants other credentials.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from foretoken import rpc
from foretoken.links import NO_CREDENTIALS, LinkCredentials, LinkSettings, read_credentials
from gateway.verifier_client import STARTING, VerifierClient
from protos import verifier_pb2_grpc
from tests.gateway.scripted_verifier import ScriptedVerifier
from tests.support.certificates import Authority

pytestmark = pytest.mark.anyio
TOKEN = LinkCredentials("a-token-of-these-tests")


@pytest.fixture
def certified(tmp_path: Path) -> LinkCredentials:
    authority = Authority(tmp_path)
    issued = authority.issue("verifier")
    files = LinkSettings(link_certfile=issued.chain, link_keyfile=issued.key, link_ca=authority.certificate)
    return read_credentials(files)


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_a_verifier_that_does_not_agree_on_tls_is_not_taken_for_one_that_starts(
    is_encrypted: bool, certified: LinkCredentials
) -> None:
    """Its port takes connections too, but it reacts to what is sent."""
    ours, its = (NO_CREDENTIALS, certified) if is_encrypted else (certified, NO_CREDENTIALS)
    server = rpc.link_server("127.0.0.1:0", its)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(vocab_size=100), server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0', its)}"
    client = VerifierClient(address, credentials=ours)
    reasons = [STARTING, "the verifier cannot be reached: UNAVAILABLE"]
    running = asyncio.create_task(client.run())
    try:
        while client.reason != reasons[0]:
            await asyncio.sleep(0)
        await server.start()
        while client.reason != reasons[1]:
            assert not client.is_up
            await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (TOKEN, ""),
        (NO_CREDENTIALS, "the verifier cannot be reached: UNAUTHENTICATED"),
        (LinkCredentials("another-token-of-them"), "the verifier cannot be reached: PERMISSION_DENIED"),
    ],
)
async def test_a_session_needs_the_verifiers_token(shown: LinkCredentials, reason: str) -> None:
    server = rpc.link_server("127.0.0.1:0", TOKEN)
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(ScriptedVerifier(vocab_size=100), server)
    port = rpc.bind(server, "127.0.0.1:0", TOKEN)
    await server.start()
    client = VerifierClient(f"127.0.0.1:{port}", credentials=shown)
    running = asyncio.create_task(client.run())
    try:
        if not reason:
            await client.wait_up()
            return
        while client.reason != reason:
            assert not client.is_up
            await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(None)
