"""The operator's side of ``/v1/drafters``."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from foretoken.commands.operator_client import OperatorClient
from foretoken.limits import check_name

# A drafter that is there is attached in far less, unless it has a model to load first.
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
    # Why it is not attached; empty where it is, and before that is known.
    reason: str

    @property
    def is_decided(self) -> bool:
        """Whether it is attached, or why it is not is known."""
        return self.state != "connecting" or bool(self.reason)


class DraftersClient(OperatorClient):
    """Lists, attaches and detaches drafters through one gateway; ``verifier``: the address of one, empty for all."""

    def attach(self, name: str, address: str, transport: str, verifier: str = "") -> list[DrafterOf]:
        body = {"name": name, "address": address, "transport": transport, "verifier": verifier}
        return _drafters(self._call("POST", "/v1/drafters", json=body))

    def outcome(self, name: str, verifier: str = "", timeout_s: float = OUTCOME_TIMEOUT_S) -> list[DrafterOf]:
        """What became of a drafter that is being attached, at each verifier; after ``timeout_s`` as it stands."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [drafter for drafter in self.list(verifier) if drafter.name == name]
            if all(drafter.is_decided for drafter in found) or time.monotonic() >= deadline:
                return found
            time.sleep(OUTCOME_EVERY_S)

    def detach(self, name: str, verifier: str = "") -> None:
        # A path of more parts would be no route at all.
        check_name("NAME", name)
        self._call("DELETE", f"/v1/drafters/{name}", params={"verifier": verifier})

    def list(self, verifier: str = "") -> list[DrafterOf]:
        return _drafters(self._call("GET", "/v1/drafters", params={"verifier": verifier}))


def _drafters(answer: dict[str, Any]) -> list[DrafterOf]:
    return [DrafterOf(*(str(entry[key]) for key in DrafterOf._fields)) for entry in answer["data"]]
