"""The operator's side of ``/v1/drafters``."""

from __future__ import annotations

from typing import Any, NamedTuple

from foretoken.commands.operator_client import OperatorClient
from foretoken.limits import check_name


class DrafterOf(NamedTuple):
    """One drafter as one verifier sees it."""

    verifier: str
    name: str
    algorithm: str
    transport: str
    address: str
    state: str
    # Why it is not attached; empty where it is.
    reason: str


class DraftersClient(OperatorClient):
    """Lists, attaches and detaches drafters through one gateway; ``verifier``: the address of one, empty for all."""

    def attach(self, name: str, address: str, transport: str, verifier: str = "") -> list[DrafterOf]:
        body = {"name": name, "address": address, "transport": transport, "verifier": verifier}
        return _drafters(self._call("POST", "/v1/drafters", json=body))

    def detach(self, name: str, verifier: str = "") -> None:
        # A path of more parts would be no route at all.
        check_name("NAME", name)
        self._call("DELETE", f"/v1/drafters/{name}", params={"verifier": verifier})

    def list(self, verifier: str = "") -> list[DrafterOf]:
        return _drafters(self._call("GET", "/v1/drafters", params={"verifier": verifier}))


def _drafters(answer: dict[str, Any]) -> list[DrafterOf]:
    return [DrafterOf(*(str(entry[key]) for key in DrafterOf._fields)) for entry in answer["data"]]
