"""Starts a Ray cluster of several nodes on this machine, and kills and adds nodes.

Ray is imported late: it is not always installed, and it warns of itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foretoken.free_ports import free_ports

ROOT = Path(__file__).parents[2]
APPLICATION = "foretoken"
# Of the head, which is not killed: gateways need it.
GATEWAYS = "gateways"
STORE_BYTES = 80 * 2**20
CORES_OF_NODE = 2
POLL_S = 0.5
PATIENCE_S = 900.0
# Ray gives a node 30 s to start, which is too short where other work has the cores.
NODE_STARTS = 5
ENVIRONMENT = {
    # Nodes are processes of this machine, and their workers import the clone's packages.
    "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    # The workers compute as the machine's other processes do.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A token would be written to the home folder.
    "RAY_AUTH_MODE": "disabled",
    # Notice at once that a node was killed; by default that takes up to half a minute.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A head that runs gateways, and nodes that run verifiers."""

    # Any: Ray's Cluster.
    def __init__(self, cluster: Any, num_nodes: int) -> None:
        self._cluster = cluster
        self._nodes = [self._add() for _ in range(num_nodes)]
        # Oldest last, so that nodes that were added are killed as well.
        self.num_killed = 0

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    @property
    def dashboard_url(self) -> str:
        return f"http://{self._cluster.webui_url}"

    def replace_node(self) -> None:
        """Kill the oldest node with all of its processes, and add a fresh one."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)
        self.num_killed += 1
        self._nodes.append(self._add())

    def _add(self) -> Any:
        return _add_node(self._cluster, num_cpus=CORES_OF_NODE, object_store_memory=STORE_BYTES)


def _add_node(cluster: Any, **options: Any) -> Any:
    """Add a node, the head first; try again if it did not start in Ray's time."""
    for _ in range(NODE_STARTS - 1):
        try:
            return cluster.add_node(**options)
        except Exception as error:  # Ray raises no class of its own
            if "timed out during startup" not in str(error):
                raise
            print(f"a node did not start: {error}")
    return cluster.add_node(**options)


@contextlib.contextmanager
def ray_cluster(num_nodes: int) -> Iterator[RayCluster]:
    """Start a head and ``num_nodes`` nodes, and connect to them.

    End all of them after the block.
    """
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    import ray
    from ray.cluster_utils import Cluster

    (port,) = free_ports(1)
    head = {"num_cpus": 1, "resources": {GATEWAYS: 1}, "object_store_memory": STORE_BYTES}
    cluster = Cluster()
    try:
        _add_node(cluster, **head, include_dashboard=True, dashboard_port=port)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield RayCluster(cluster, num_nodes)
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Application:
    """The Ray Serve application on a cluster, as a YAML file would deploy it."""

    def __init__(self, cluster: RayCluster) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        self._client = ServeSubmissionClient(cluster.dashboard_url)
        (self._port,) = free_ports(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def deploy(self, arguments: dict[str, Any], verifiers: dict[str, Any]) -> None:
        """Deploy, or update what is deployed. ``verifiers``: options of that deployment."""
        gateways = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0, "resources": {GATEWAYS: 0.5}}}
        application = {
            "name": APPLICATION,
            "import_path": "foretoken.ray:app",
            "route_prefix": "/",
            "args": arguments,
            "deployments": [{"name": "Verifier", **verifiers}, {"name": "Gateway", **gateways}],
        }
        self._client.deploy_applications(
            {
                "proxy_location": "HeadOnly",
                "http_options": {"host": "127.0.0.1", "port": self._port},
                "applications": [application],
            }
        )

    async def until(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait until the application's details fulfil ``is_so``; return them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            details = await asyncio.to_thread(self._details)
            if details and is_so(details):
                return details
            assert time.monotonic() < deadline, f"not {what} within {PATIENCE_S:g} s: {details}"
            assert details.get("status") != "DEPLOY_FAILED", details
            await asyncio.sleep(POLL_S)

    def _details(self) -> dict[str, Any]:
        found: dict[str, Any] = self._client.get_serve_details()["applications"].get(APPLICATION, {})
        return found

    def shutdown(self) -> None:
        from ray import serve

        serve.shutdown()


def running(details: dict[str, Any], deployment: str = "Verifier") -> set[str]:
    """Return the ids of a deployment's replicas that run."""
    replicas = details["deployments"].get(deployment, {"replicas": []})["replicas"]
    return {replica["replica_id"] for replica in replicas if replica["state"] == "RUNNING"}


def num_replicas(details: dict[str, Any], deployment: str = "Verifier") -> int:
    """Return how many replicas there are in any state."""
    return len(details["deployments"].get(deployment, {"replicas": []})["replicas"])
