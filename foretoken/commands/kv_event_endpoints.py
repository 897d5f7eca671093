"""Give each verifier of one command endpoints and a topic of its own for its KV events."""

from __future__ import annotations

from foretoken.commands.given import Given
from foretoken.errors import ConfigError

TCP = "tcp://"
MOST_PORT = 65535


def check(events: str | None, replay: str | None, topic: str, num_verifiers: int) -> None:
    """Raise ConfigError if so many verifiers cannot have endpoints and topics of their own.

    Arguments as of --kv-events, --kv-events-replay and --kv-events-topic.
    """
    if events is None or num_verifiers == 1:
        return
    if topic:
        raise ConfigError("--kv-events-topic names one verifier, and each of --num-verifiers needs a topic of its own")
    given = [endpoint for endpoint in (events, replay) if endpoint is not None]
    endpoints = [endpoint_of(endpoint, number) for endpoint in given for number in range(num_verifiers)]
    # An address may stand for several, so ports must differ.
    places = {endpoint.rpartition(":")[2] for endpoint in endpoints}
    if len(places) < len(endpoints):
        raise ConfigError(
            f"--kv-events and --kv-events-replay need {num_verifiers} ports each, one for each verifier: "
            f"those from {given[0]} and from {given[1]} on overlap"
        )
    for endpoint in endpoints:
        if endpoint.startswith(TCP) and int(endpoint.rpartition(":")[2]) > MOST_PORT:
            raise ConfigError(f"{num_verifiers} verifiers need a port each for KV events: there is no {endpoint}")


def endpoint_of(endpoint: str, number: int) -> str:
    """Return the endpoint of verifier ``number``.

    It has the first verifier's port or socket name, advanced by ``number``.
    """
    if endpoint.startswith(TCP):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + number}"
    return f"{endpoint}-{number}" if number else endpoint


def own_words(given: Given, number: int, name: str, model: str) -> list[str]:
    """Return flags for verifier ``number``, called ``name``, of several.

    They replace those that all have.
    """
    if "kv_events" not in given.values:
        return []
    words = ["--kv-events-topic", f"kv@{name}@{model}"]
    for key, flag in (("kv_events", "--kv-events"), ("kv_events_replay", "--kv-events-replay")):
        if key in given.values:
            words += [flag, endpoint_of(given.values[key], number)]
    return words
