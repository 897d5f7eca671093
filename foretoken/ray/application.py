"""Compose the Ray Serve application ``foretoken.ray:app``: verifiers and gateways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from foretoken.commands import service_settings
from foretoken.commands.given import Given
from foretoken.commands.options import LogOptions
from foretoken.errors import ConfigError
from foretoken.ray.command_line import parse, to_words
from foretoken.ray.http_only import HttpOnly
from foretoken.ray.resources import STRATEGY, bundles
from foretoken.ray.scaling import SEQUENCES
from foretoken.ray.verifier_process import VerifierProcess
from foretoken.telemetry import configure_logging
from gateway.app import create_app
from gateway.assembly import assembled
from gateway.config import GatewaySettings
from gateway.discovery.pushed_set import PushedSet

logger = logging.getLogger(__name__)

# How often a gateway asks which verifiers there are, and how long it waits for all answers.
ASK_EVERY_S = 0.5
ASK_TIMEOUT_S = 5.0
# Beyond the time for streams: for processes to end.
STOP_GRACE_S = 20.0
# Of all verifiers: how many new ones may start before old ones drain, at least one.
SURGE_PERCENT = 25
# Ray refuses to scale beyond it, though no request passes through Ray.
MANY_REQUESTS = 100_000
# Settings of ``serve`` whose work Ray does, or that an application has no use for.
NOT_OF_APPLICATION = {
    *("executor", "num_verifiers", "ray_address", "verifier_address", "dry_run", "discovery_interval_s"),
    *("port", "grpc_port", "gateway_workers", "client_timeout_s", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
}


class Member(NamedTuple):
    """A verifier that takes sequences, and the checkpoint that its gateways must have."""

    address: str
    checkpoint: tuple[str, str | None]


def app(arguments: dict[str, Any]) -> serve.Application:
    """Build the application.

    Args:
        arguments: ``model`` and settings of ``foretoken serve``, by their flags without dashes.

    Raises:
        ConfigError: a setting is unknown or wrong, or has no effect here.
    """
    words = to_words(arguments)
    named = parse(words).values.keys()
    if refused := sorted(NOT_OF_APPLICATION & named):
        raise ConfigError(f"{refused[0].replace('_', '-')}: has no effect in the Ray application")
    if "kv_events" in named:
        raise ConfigError("kv-events: verifiers of the Ray application that share a node would share its port")
    words = ["--executor", "ray", *words]
    given = parse(words)
    settings = _gateway_settings(given)
    timeouts = {"graceful_shutdown_timeout_s": settings.drain_timeout_s + STOP_GRACE_S}
    shape = bundles(given, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
    verifiers = serve.deployment(
        Verifier,
        ray_actor_options={"num_cpus": shape[0]["CPU"], "num_gpus": shape[0].get("GPU", 0)},
        placement_group_bundles=shape,
        placement_group_strategy=STRATEGY,
        max_surge_percent=SURGE_PERCENT,
        max_ongoing_requests=MANY_REQUESTS,
        **timeouts,
    )
    gateways = serve.deployment(
        Gateway,
        max_ongoing_requests=settings.max_concurrent_requests,
        max_surge_percent=SURGE_PERCENT,
        **timeouts,
    )
    own_words = service_settings.words_of_verifier(given)
    return gateways.bind(words, verifiers.bind(own_words, str(Path.cwd()), settings.drain_timeout_s))


class Verifier:
    """A replica with one verifier and its drafters."""

    # Ray awaits constructors.
    async def __init__(  # type: ignore[misc]
        self, words: Sequence[str], folder: str, drain_timeout_s: float
    ) -> None:
        """Return when the verifier takes sequences. Raises EndedError if it cannot.

        Arguments as of VerifierProcess. ``drain_timeout_s``: what
        streams have after Ray stops this.
        """
        given = parse(words)
        configure_logging("verifiers", given.settings(LogOptions).log_level)
        self._checkpoint = _checkpoint(given)
        self._drain_timeout_s = drain_timeout_s
        self._process = VerifierProcess(words, ray.util.get_node_ip_address(), folder)
        await self._process.wait_ready()

    async def member(self) -> Member:
        return Member(self._process.address, self._checkpoint)

    async def check_health(self) -> None:
        """Ask the verifier's own health whether it takes sequences.

        Raises RuntimeError if it does not. Ray then replaces the replica.
        """
        if not await self._process.is_serving():
            raise RuntimeError(f"the verifier at {self._process.address} is not serving")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what ``scaling`` goes by."""
        load = await self._process.load()
        return {} if load is None else {SEQUENCES: load.running + load.waiting}

    async def __del__(self) -> None:
        """Let the streams finish: gateways send no more, since Ray names this replica no longer."""
        await self._process.drain(self._drain_timeout_s)
        await self._process.stop()


@serve.ingress()
class Gateway:
    """A replica with one gateway.

    Ray Serve's proxies bring its requests; it has no ports of its own.
    """

    # Ray awaits constructors.
    async def __init__(  # type: ignore[misc]
        self, words: Sequence[str], verifiers: DeploymentHandle[Any]
    ) -> None:
        """Return when there is a verifier."""
        given = parse(words)
        configure_logging("gateway", given.settings(LogOptions).log_level)
        settings = _gateway_settings(given)
        # Ray runs as many gateways as it is asked to, each in one process.
        own = {"model": service_settings.find_checkpoint(given), "gateway_workers": 1}
        settings = settings.model_copy(update=own)
        self._verifiers = verifiers
        self._checkpoint = _checkpoint(given)
        self._source = PushedSet()
        self._stack = contextlib.AsyncExitStack()
        self._parts = await self._stack.enter_async_context(assembled(settings, self._source))
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._parts.verifiers.run())]
        await self._parts.verifiers.wait_up()

    def __serve_build_asgi_app__(self) -> HttpOnly:
        return HttpOnly(create_app(self._parts.core))

    async def check_health(self) -> None:
        """Raise the error of a task that has ended; then Ray replaces the replica."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def __del__(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _follow(self) -> None:
        """Keep the source up to date, for ever."""
        known: set[str] = set()
        while True:
            with contextlib.suppress(DeploymentUnavailableError, TimeoutError):
                answers = await self._verifiers.broadcast("member").results_async(
                    timeout_s=ASK_TIMEOUT_S, return_exceptions=True
                )
                members = [answer for answer in answers if not isinstance(answer, BaseException)]
                found = {member.address for member in members if member.checkpoint == self._checkpoint}
                if len(members) < len(answers):
                    # A replica that does not answer now may have a verifier that does.
                    found |= known
                # In an update to another model, the old model's verifiers
                # serve until this gateway goes.
                if found and found != known:
                    known = found
                    self._source.set(known)
            await asyncio.sleep(ASK_EVERY_S)


def _gateway_settings(given: Given) -> GatewaySettings:
    return service_settings.gateway_settings(given, verifiers=["unix:/none"])


def _checkpoint(given: Given) -> tuple[str, str | None]:
    return given.values["model"], given.values.get("revision")
