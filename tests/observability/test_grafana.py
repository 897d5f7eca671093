"""The dashboard and its provisioning, against the models that Grafana publishes of its own schema.

Grafana itself was not run here, for want of its image.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "docker"
GRAFANA = FOLDER / "observability" / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "foretoken.json").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["grafana"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def read_back(dashboard: dict[str, Any]) -> Any:
    """Return what Grafana's models keep of a dashboard."""
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="needs Grafana's models (make test-observability)"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    return json.loads(JSONEncoder().encode(models.Dashboard.from_json(dashboard)))


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are missing or other in ``theirs``."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(left, right, f"{path}/{index}")
    elif ours != theirs:
        yield path


def test_grafana_knows_every_key_of_the_dashboard() -> None:
    assert list(lost(DASHBOARD, read_back(DASHBOARD))) == []


def test_an_unknown_key_would_be_found() -> None:
    wrong = copy.deepcopy(DASHBOARD)
    wrong["panels"][1]["targets"][0]["legend"] = "running"
    wrong["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    assert list(lost(wrong, read_back(wrong))) == ["/panels/1/fieldConfig/defaults/units", "/panels/1/targets/0/legend"]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_panels_ask_the_data_source_that_is_provisioned() -> None:
    folder = GRAFANA / "provisioning" / "datasources"
    files = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    assert all(file["apiVersion"] == 1 for file in files)
    sources = {source["uid"]: source for file in files for source in file["datasources"]}
    assert all({"name", "type", "access", "url"} <= source.keys() for source in sources.values())
    assert {(panel["datasource"]["uid"], panel["datasource"]["type"]) for panel in PANELS} == {
        ("foretoken", sources["foretoken"]["type"])
    }


def test_the_provider_reads_the_folder_where_the_dashboard_is_mounted() -> None:
    file = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "foretoken.yaml").read_text())
    (provider,) = file["providers"]
    assert (file["apiVersion"], provider["type"]) == (1, "file")
    home = SERVICE["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    mounted = {volume.split(":")[0]: volume.split(":")[1] for volume in SERVICE["volumes"]}
    assert mounted["./observability/grafana/foretoken.json"] == home == f"{provider['options']['path']}/foretoken.json"
    assert mounted["./observability/grafana/provisioning"] == "/etc/grafana/provisioning"
