"""Keep a number of verifiers as actors of a Ray cluster.

Their addresses are in a file for the gateway.

Ray places the actors and starts them again elsewhere when their node dies. They end with the
process that made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from foretoken.commands.kv_event_endpoints import own_words
from foretoken.ray.command_line import parse
from foretoken.ray.resources import STRATEGY, bundles
from foretoken.ray.verifier_process import EndedError, VerifierProcess
from foretoken.supervisor import CONFIG_ERROR_STATUS

logger = logging.getLogger(__name__)

# How often an actor is asked whether its verifier is up.
ASK_EVERY_S = 0.5
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Order:
    """The wanted verifiers: ``num_verifiers`` with the command line ``words``.

    The dashboard calls them ``name``.
    """

    name: str
    num_verifiers: int
    words: Sequence[str]
    link_token: str | None

    def verifier_name(self, number: int) -> str:
        return f"{self.name}-verifier-{number}"

    def words_of(self, number: int) -> list[str]:
        """Return the command line of verifier ``number``."""
        if self.num_verifiers == 1:
            return list(self.words)
        return [*self.words, *own_words(parse(self.words), number, self.verifier_name(number), self.name)]


class VerifierActor:
    """An actor with one verifier."""

    def __init__(self, words: Sequence[str], folder: str, link_token: str | None) -> None:
        self._process = VerifierProcess(words, ray.util.get_node_ip_address(), folder, link_token)
        self._was_ready = False

    async def address(self) -> str | None:
        """Return the verifier's address, or None before it is ready for the first time.

        Raises EndedError.
        """
        self._was_ready |= await self._process.is_serving()
        return self._process.address if self._was_ready else None

    async def stop(self) -> None:
        await self._process.stop()


async def keep_verifiers(order: Order, file: Path, stop: asyncio.Event) -> None:
    """Run the verifiers until ``stop`` is set.

    The addresses of those that are up are written to ``file``.

    Raises EndedError if one refuses its settings, or ends before any was up.
    """
    shape = bundles(parse(order.words), has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
    names = [order.verifier_name(number) for number in range(order.num_verifiers)]
    groups = [placement_group(shape, strategy=STRATEGY, name=name) for name in names]
    actors = [_start(order, number, group) for number, group in enumerate(groups)]
    addresses: dict[Any, str] = {}
    were_up: set[str] = set()

    def note(actor: Any, address: str | None) -> None:
        if addresses.get(actor) == address:
            return
        if address is None:
            logger.warning("verifier lost", extra={"verifier": addresses.pop(actor)})
        else:
            addresses[actor] = address
            were_up.add(address)
            logger.info("verifier joined", extra={"verifier": address})
        _write(file, addresses.values())

    async def follow(actor: Any) -> None:
        while True:
            try:
                address = await _address(actor)
            except EndedError as error:
                if error.status == CONFIG_ERROR_STATUS or not were_up:
                    raise
                logger.warning("%s", error)
                address = None
                # Ray starts it again.
                ray.kill(actor, no_restart=False)
            note(actor, address)
            await asyncio.sleep(ASK_EVERY_S)

    following = asyncio.gather(*(follow(actor) for actor in actors))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        following.cancel()
        stopping.cancel()
        await asyncio.gather(following, stopping, return_exceptions=True)
        # An actor without a node answers nothing.
        await asyncio.wait([asyncio.ensure_future(_stop(actor)) for actor in actors], timeout=STOP_TIMEOUT_S)


def _start(order: Order, number: int, group: PlacementGroup) -> Any:
    options = {
        "name": order.verifier_name(number),
        "num_cpus": group.bundle_specs[0]["CPU"],
        "num_gpus": group.bundle_specs[0].get("GPU", 0),
        "max_restarts": -1,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    }
    return (
        ray.remote(VerifierActor).options(**options).remote(order.words_of(number), str(Path.cwd()), order.link_token)
    )


async def _address(actor: Any) -> str | None:
    try:
        address: str | None = await actor.address.remote()
        return address
    except RayActorError:
        return None
    except RayTaskError as error:
        raise error.cause from None


async def _stop(actor: Any) -> None:
    with contextlib.suppress(RayActorError):
        await actor.stop.remote()


def _write(file: Path, addresses: Iterable[str]) -> None:
    """Replace the file, so that a reader never finds half of it."""
    new = file.with_suffix(".new")
    new.write_text("".join(f"{address}\n" for address in addresses))
    new.replace(file)
