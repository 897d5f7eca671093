"""Call ``/v1/drafters`` for the operator."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from foretoken.commands.operator_client import OperatorClient
from foretoken.limits import check_name

# A running drafter attaches much faster, unless it has to load a model first.
OUTCOME_TIMEOUT_S = 10.0
OUTCOME_EVERY_S = 0.2


class DrafterOf(NamedTuple):
    """One drafter as one verifier sees it."""

    verifier: str
    name: str
    algorithm: str
    transport: str
    address: str
    state: str
    # Why it is not attached; empty if it is, or if the reason is not known yet.
    reason: str

    @property
    def is_decided(self) -> bool:
        """Return whether it is attached, or the reason why not is known."""
        return self.state != "connecting" or bool(self.reason)


class DraftersClient(OperatorClient):
    """Lists, attaches and detaches drafters through one gateway.

    ``verifier``: the address of one verifier; empty: all.
    """

    def attach(self, name: str, address: str, transport: str, verifier: str = "") -> list[DrafterOf]:
        body = {"name": name, "address": address, "transport": transport, "verifier": verifier}
        return _drafters(self._call("POST", "/v1/drafters", json=body))

    def outcome(self, name: str, verifier: str = "", timeout_s: float = OUTCOME_TIMEOUT_S) -> list[DrafterOf]:
        """Wait until a drafter is attached or refused; return its state at each verifier.

        After ``timeout_s`` return its present state.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = [drafter for drafter in self.list(verifier) if drafter.name == name]
            if all(drafter.is_decided for drafter in found) or time.monotonic() >= deadline:
                return found
            time.sleep(OUTCOME_EVERY_S)

    def detach(self, name: str, verifier: str = "") -> None:
        # A name with a slash would not match the route.
        check_name("NAME", name)
        self._call("DELETE", f"/v1/drafters/{name}", params={"verifier": verifier})

    def list(self, verifier: str = "") -> list[DrafterOf]:
        return _drafters(self._call("GET", "/v1/drafters", params={"verifier": verifier}))


def _drafters(answer: dict[str, Any]) -> list[DrafterOf]:
    return [DrafterOf(*(str(entry[key]) for key in DrafterOf._fields)) for entry in answer["data"]]
