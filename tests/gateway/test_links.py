"""The gateway shows its link token to a verifier over TCP."""

from __future__ import annotations

import asyncio

import pytest

from foretoken import rpc
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from gateway.verifier_client import VerifierClient
from protos import verifier_pb2_grpc
from tests.gateway.scripted_verifier import ScriptedVerifier

pytestmark = pytest.mark.anyio
TOKEN = LinkCredentials("a-token-of-these-tests")


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
