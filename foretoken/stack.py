"""Describe the stack that ``foretoken serve`` starts: commands, ports and the ready text.

This module knows only the services' flags and health names.
"""

from __future__ import annotations

import errno
import json
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from foretoken import probes
from foretoken.config import to_flags
from foretoken.errors import ConfigError
from foretoken.hosts import bracketed, reachable
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from foretoken.service import Service

VERIFIER_HEALTH_NAME = "foretoken.verifier.v1.VerifierService"
DRAFTER_HEALTH_NAME = "foretoken.drafter.v1.DrafterService"
VERIFIER_NAME = "verifier"
# A stop ends within 30 s. The gateway first lets running streams finish; then the others have
# little left to do. Times from SIGTERM to SIGKILL of each, one after the other in this order:
GATEWAY_DRAIN_S = 14.0
GATEWAY_GRACE_S = 17.0
VERIFIER_GRACE_S = 8.0
DRAFTER_GRACE_S = 4.0
# All verifiers of a cluster stop at once, and then Ray does.
RAY_GRACE_S = VERIFIER_GRACE_S + DRAFTER_GRACE_S + 4.0
# A busy gateway is not dead, and killing it would cut every stream: its event loop may stand still
# for this long.
GATEWAY_MAX_STALL_S = 30.0
SLOW_NOTICE = "; the first start on a machine compiles kernels, which may take some minutes"
# The environment variables from which clients read their key, and the
# file of roots that they trust.
KEY_VARIABLE = "FORETOKEN_API_KEY"
CA_VARIABLE = "SSL_CERT_FILE"
STOP_NOTICE = "stopping after running streams have finished"
STOP_AGAIN_NOTICE = "Ctrl-C again stops at once"
_EXAMPLE_PROMPT = "def read_json(path):\n"


def command(service: str, settings: BaseModel, extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command of one service, without its secrets.

    ``-P`` ignores a folder called gateway in the user's folder.
    """
    return (sys.executable, "-P", "-m", "foretoken", service, *to_flags(settings), *extra)


def drafter_name(name: str) -> str:
    """Return the name of a drafter's service in messages."""
    return f"drafter {name}"


def drafter(name: str, command: tuple[str, ...], address: str) -> Service:
    """Return a drafter's service. It is not required: without it the stack serves plain decode."""
    probe = probes.GrpcProbe(address, DRAFTER_HEALTH_NAME)
    return Service(drafter_name(name), command, probe, DRAFTER_GRACE_S, required=False)


def verifier(
    command: tuple[str, ...], address: str, credentials: LinkCredentials = NO_CREDENTIALS, drain_s: float = 0.0
) -> Service:
    """Return a verifier's service, whose streams have ``drain_s`` seconds to finish at a stop."""
    probe = probes.GrpcProbe(address, VERIFIER_HEALTH_NAME, credentials)
    return Service(VERIFIER_NAME, command, probe, drain_s + VERIFIER_GRACE_S)


def ray_verifiers(flags: Sequence[str], words: Sequence[str], file: Path, liveness_socket: Path) -> Service:
    """Return the process that keeps verifiers in a Ray cluster and their addresses in ``file``.

    ``words``: a command line of ``foretoken serve``. ``flags``: more flags of the process itself.
    """
    places = ("--file", str(file), "--liveness-socket", str(liveness_socket))
    command = (sys.executable, "-P", "-m", "foretoken.ray", *places, *flags, "--", *words)
    return Service("verifiers", command, probes.FileProbe(file, liveness_socket), RAY_GRACE_S)


def gateway(
    command: tuple[str, ...], probe: probes.GatewayProbe, environment: Mapping[str, str], *, reloads: bool
) -> Service:
    return Service(
        "gateway",
        command,
        probe,
        GATEWAY_GRACE_S,
        environment=environment,
        max_stall_s=GATEWAY_MAX_STALL_S,
        reloads=reloads,
    )


def check_ports(host: str, port: int, grpc_port: int, *, are_free: bool = True) -> None:
    """Check host and ports before anything is loaded or downloaded. Raises ConfigError.

    ``are_free``: also require that nobody listens on the ports.
    """
    if port == grpc_port:
        raise ConfigError(f"--port and --grpc-port are both {port}")
    if not are_free:
        _addresses(host, port)
        return
    for value, flag, variable in ((port, "--port", "PORT"), (grpc_port, "--grpc-port", "GRPC_PORT")):
        check_port_free(host, value, flag, variable)


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(f"--host: cannot resolve {host!r}: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"--host: cannot resolve {host!r}: not a host's name") from None


def check_port_free(host: str, port: int, flag: str, variable: str) -> None:
    """Raise ConfigError naming ``flag`` and the Makefile's ``variable`` if the port is in use."""
    found = _addresses(host, port)
    problems: list[str | None] = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # Lingering connections of an earlier run do not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except PermissionError:
            raise ConfigError(f"no permission to listen on port {port}; choose one above 1023: {flag}") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} is in use; choose another with {flag} (make serve {variable}=...)"
                ) from None
            problems.append(error.strerror)
    # localhost has an IPv6 address even where there is no IPv6; one address that works is enough.
    if len(problems) == len(found):
        raise ConfigError(f"--host: cannot listen on {host}: {problems[0]}")


def _pip(program: str) -> str:
    """Return the command for pip of ``program``'s Python.

    foretoken is spelled as the user typed it.
    """
    folder, _, name = program.rpartition("/")
    return f"{folder}/pip" if folder and name == "foretoken" else "pip"


def ready_text(
    model: str,
    host: str,
    port: int,
    grpc_port: int,
    program: str,
    *,
    certfile: Path | None = None,
    needs_key: bool = False,
) -> str:
    """Return the text for the user when the stack is ready: addresses, and requests to copy.

    ``program``: foretoken as the user typed it. ``certfile``: the server's certificate, for TLS.
    """
    host = bracketed(reachable(host))
    url = f"{'http' if certfile is None else 'https'}://{host}:{port}"
    body = json.dumps({"model": model, "prompt": _EXAMPLE_PROMPT, "max_tokens": 64, "temperature": 0, "stream": True})
    fields = f"model={model!r}, prompt={_EXAMPLE_PROMPT!r}, max_tokens=64, temperature=0, stream=True"
    option = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    key_header = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if needs_key else ""
    imports, client_key = ("import os\n", f'os.environ["{KEY_VARIABLE}"]') if needs_key else ("", '"none"')
    # A certificate that no public authority has signed is its own root. curl may be told of other
    # roots by variables of its own.
    root = certfile and shlex.quote(str(certfile))
    root_option = f" --cacert {root}" if root else ""
    exports = {CA_VARIABLE: root, KEY_VARIABLE: needs_key and "YOUR_KEY"}
    lines = "".join(f"\n  export {name}={value}" for name, value in exports.items() if value)
    return f"""
foretoken is ready: {model} at {url} (OpenAI REST) and {host}:{grpc_port} (gRPC). Ctrl-C stops it.

In another terminal:{lines}
  {program} complete {shlex.quote(_EXAMPLE_PROMPT.strip())} --temperature 0{option}

  curl -N{root_option} {url}/v1/completions{key_header} -H 'content-type: application/json' -d {shlex.quote(body)}

In Python ({_pip(program)} install openai):

{imports}from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={client_key})
for chunk in client.completions.create({fields}):
    print(*(choice.text for choice in chunk.choices), end="", flush=True)
"""
