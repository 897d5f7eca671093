"""Build what answers requests, without a listener."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from foretoken.links import read_credentials
from foretoken.tracing import make_tracer
from gateway.access.keyring import Keyring
from gateway.access.policy import Policy
from gateway.access.quota import Ledger
from gateway.config import GatewaySettings
from gateway.core import GatewayCore
from gateway.discovery.locations import source_of
from gateway.discovery.source import VerifierSource
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool
from gateway.worker_metrics import worker_number


@dataclass(frozen=True)
class Parts:
    """A gateway's parts. ``verifiers.run`` keeps the sessions; ``keyring``: None without keys."""

    core: GatewayCore
    verifiers: VerifierPool
    keyring: Keyring | None


@contextlib.asynccontextmanager
async def assembled(
    settings: GatewaySettings,
    source: VerifierSource | None = None,
    on_change: Callable[[bool], Awaitable[None]] | None = None,
) -> AsyncIterator[Parts]:
    """Load the tokenizer, and yield a gateway's parts.

    Args:
        source: where verifiers are, in place of ``settings.verifiers``.
        on_change: as of the VerifierPool.
    """
    async with contextlib.AsyncExitStack() as stack:
        tracer = make_tracer(settings.otlp_traces_endpoint, "gateway")
        if tracer is not None:
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        tokenizer = await asyncio.to_thread(Tokenizer, settings.model, settings.chat_template)
        verifiers = VerifierPool(
            source or source_of(settings.verifiers, interval_s=settings.discovery_interval_s),
            resume_attempts=settings.resume_attempts,
            wait_s=settings.verifier_wait_s,
            on_change=on_change,
            credentials=read_credentials(settings),
            load_bound=settings.routing_load_bound,
        )
        admin_key = settings.admin_key()
        keyring = _keyring(settings) if settings.needs_key else None
        policy = Policy(
            keyring,
            models=settings.served_model_names,
            operator_key=admin_key,
            probe_key=None if settings.probe_key is None else settings.probe_key.get_secret_value(),
            needs_certificate=settings.ssl_ca_certs is not None,
        )
        core = GatewayCore(settings, tokenizer, verifiers, tracer, admin_key, policy)
        stack.callback(core.metrics.close)
        yield Parts(core, verifiers, keyring)


def _keyring(settings: GatewaySettings) -> Keyring:
    """Return the keys, whose use the gateway's processes count together."""
    path = settings.worker_socket
    ledger = Ledger() if path is None else Ledger(path.parent, worker_number(path), settings.num_workers)
    return Keyring(settings.secrets, settings.api_key_file, ledger)
