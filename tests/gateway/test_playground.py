"""The page at /: its files, its headers, and its absence. tests/page opens it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from foretoken.config import build
from gateway.access.key_file import entry_text
from gateway.config import GatewaySettings
from gateway.playground.routes import HEADERS, MEDIA_TYPES, read_assets
from tests.gateway.conftest import Stack

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "gateway/playground/assets"
NAMES = sorted(path.name for path in ASSETS.iterdir())


async def test_the_page_and_its_files_are_served_with_a_strict_policy(stack: Stack) -> None:
    page = await stack.http.get("/")
    assert page.status_code == 200 and page.text == (ASSETS / "index.html").read_text(encoding="utf-8")
    for path in ("/", *(f"/playground/{name}" for name in NAMES)):
        answer = await stack.http.get(path)
        assert answer.status_code == 200, path
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        wanted = MEDIA_TYPES[Path(path).suffix or ".html"]
        assert answer.headers["content-type"] == wanted
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert not {"unsafe-inline", "unsafe-eval", "data:", "blob:", "*", "http:", "https:"} & set(
        re.split(r"[\s;']+", policy)
    )


async def test_a_browser_fetches_a_file_again_only_if_it_has_changed(stack: Stack) -> None:
    first = await stack.http.get("/playground/app.js")
    again = await stack.http.get("/playground/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await stack.http.get("/playground/app.js", headers={"if-none-match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


@pytest.mark.parametrize("name", ["none.js", "..%2froutes.py", "%2e%2e/routes.py", "index.html%00", "assets"])
async def test_nothing_else_is_served(stack: Stack, name: str) -> None:
    answer = await stack.http.get(f"/playground/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["message"]


def test_the_page_keeps_its_own_policy_and_needs_no_network() -> None:
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {link for link in linked if link != "docs"} <= {f"playground/{name}" for name in NAMES}
    for name in NAMES:
        text = (ASSETS / name).read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\"'\s)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert {f"./{path.name}" for path in ASSETS.iterdir()} >= set(re.findall(r'from "([^"]+)"', text))
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|localStorage|cookie", text
        )


def test_the_wheel_and_the_package_have_all_files() -> None:
    inside = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"gateway/playground/assets/{name}" for name in NAMES} <= inside
    assert sorted(read_assets()) == NAMES and len(NAMES) > 5


class TestWithoutThePage:
    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return build(GatewaySettings, settings.model_dump() | {"disable_playground": True})

    async def test_nothing_is_there(self, stack: Stack) -> None:
        for path in ("/", "/playground/app.js"):
            assert (await stack.http.get(path)).status_code == 404
        assert (await stack.http.get("/v1/models")).status_code == 200


class TestWithKeys:
    @pytest.fixture
    def settings(self, settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
        (tmp_path / "keys.toml").write_text(entry_text("alice", "alice's secret"))
        return build(GatewaySettings, settings.model_dump() | {"api_key_file": tmp_path / "keys.toml"})

    async def test_the_page_needs_no_key_but_what_it_calls_does(self, stack: Stack) -> None:
        for path in ("/", "/playground/app.js", "/playground/icon.svg"):
            assert (await stack.http.get(path)).status_code == 200
        for path in ("/version", "/v1/models", "/playground/"):
            assert (await stack.http.get(path)).status_code == 401
        foreign = {"host": "evil.example"}
        assert (await stack.http.get("/", headers=foreign)).status_code == 421
        assert (await stack.http.get("/", headers={"origin": "https://evil.example"})).status_code == 403
