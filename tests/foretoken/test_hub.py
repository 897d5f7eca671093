"""MODEL is a folder, or an id that a fake hub on this machine serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from foretoken.errors import ConfigError
from foretoken.hub import config_file, default_name, resolve, resolve_file
from tests.support.fake_hub import BRANCH_COMMIT, FakeHub, running_hub

ROOT = Path(__file__).parents[2]
# Wanted files and others.
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "freq_8.pt": b"a map",
    "modeling_evil.py": b"import os",
    "tokenization_evil.py": b"import os",
    "tokenizer.py": b"import os",
    "README.md": b"# model",
    "onnx/config.json": b"{}",
    "consolidated.safetensors": b"weights once more",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "merges.txt", "chat_template.jinja"}
RESOLVE = """
import sys
from foretoken.errors import ConfigError
from foretoken.hub import cached, config_file, resolve, resolve_file
find = {"file": resolve_file, "config": config_file, "cached": cached}.get(sys.argv[1], resolve)
try:
    print(find(*sys.argv[1 if find is resolve else 2 :]))
except ConfigError as error:
    sys.exit(f"ConfigError: {error}")
"""


@dataclass
class Hub:
    """The fake hub and a client with its own cache.

    The client reads its environment once, so each call is a process.
    """

    server: FakeHub
    cache: Path

    def resolve(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", RESOLVE, *arguments],
            env=self.server.environment(self.cache) | environment,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub({"org/model": FILES, "org/bare": {"README.md": b"# bare"}, "old-id": FILES}) as server:
        yield Hub(server, tmp_path / "cache")


def test_a_download_takes_weights_configs_and_tokenizer_only(hub: Hub) -> None:
    result = hub.resolve("org/model")
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert {path.name for path in folder.rglob("*") if path.is_file()} == WANTED
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    fetched = {path.rpartition("/")[2] for path in hub.server.paths if "/resolve/" in path}
    assert fetched == WANTED
    # Progress for the user.
    assert "Fetching" in result.stderr or "%" in result.stderr


def test_a_revision(hub: Hub) -> None:
    result = hub.resolve("org/model", "branch")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).name == BRANCH_COMMIT


def test_offline_mode_takes_the_cache_and_asks_nobody(hub: Hub) -> None:
    first = hub.resolve("org/model")
    num_requests = len(hub.server.paths)
    second = hub.resolve("org/model", HF_HUB_OFFLINE="1")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert len(hub.server.paths) == num_requests


def test_a_hub_that_does_not_answer_leaves_the_cache(hub: Hub) -> None:
    first = hub.resolve("org/model")
    second = hub.resolve("org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert (second.returncode, second.stdout) == (0, first.stdout)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            ("org/model",),
            {"HF_HUB_OFFLINE": "1"},
            "org/model is neither a folder nor a cached model, and the hub does not answer",
        ),
        (
            ("org/model",),
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "org/model is neither a folder nor a cached model",
        ),
        (("org/model", "nowhere"), {}, "--revision: the hub has no 'nowhere' of org/model"),
        (("org/other",), {}, "no folder and no public hub id: org/other"),
        (("org/gated",), {}, "org/gated is gated: accept its terms on the hub"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    hub: Hub, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    result = hub.resolve(*arguments, **environment)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"ConfigError: {message}")
    assert "Traceback" not in result.stderr


def test_without_a_network_nothing_is_retried(hub: Hub) -> None:
    rows = (("folder", "config", "org/model"), ("folder", "org/model"), ("file", "file", "org/model/freq_8.pt"))
    for kind, *words in rows:
        for environment, advice in (
            ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "try again when the hub answers"),
            ({"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"),
        ):
            (line,) = hub.resolve(*words, **environment).stderr.splitlines()
            assert line.endswith(f"the hub does not answer or is switched off; pass a {kind}, or {advice}")


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_stumbles_is_asked_again_in_silence(hub: Hub, status: int) -> None:
    hub.server.failures = [status] * 5
    result = hub.resolve("config", "org/model")
    assert (result.returncode, hub.server.failures) == (0, []), result.stderr
    assert Path(result.stdout.strip()).read_bytes() == FILES["config.json"]
    assert "thrown while requesting" not in result.stderr and "Retry" not in result.stderr
    # Unless the user asks for these lines.
    hub.server.failures = [status] * 5
    loud = hub.resolve("file", "org/model/freq_8.pt", HF_HUB_VERBOSITY="warning")
    assert loud.returncode == 0 and f"HTTP Error {status} thrown while requesting" in loud.stderr


def test_a_name_without_a_slash_is_asked_for_once(hub: Hub) -> None:
    """It is an old id or, more likely, a mistyped folder, for which nobody waits."""
    found = hub.resolve("config", "old-id")
    assert Path(found.stdout.strip()).read_bytes() == FILES["config.json"], found.stderr
    assert hub.resolve("config", "old-id", HF_ENDPOINT="http://127.0.0.1:9").stdout == found.stdout
    hub.server.paths.clear()
    unknown = hub.resolve("config", "nonexist")
    assert [path for path in hub.server.paths if "nonexist" in path] == ["/api/models/nonexist"]
    away = hub.resolve("config", "nonexist", HF_ENDPOINT="http://127.0.0.1:9")
    offline = hub.resolve("config", "nonexist", HF_HUB_OFFLINE="1")
    for result, why in (
        (unknown, "no folder and no public hub id: nonexist"),
        (away, "nonexist is neither a folder nor a cached model, and the hub does not answer"),
        (offline, "nonexist is neither a folder nor a cached model, and the hub does not answer"),
    ):
        # One line: nothing was retried.
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"ConfigError: {why}") and "for a folder" in line and "ORG/NAME" in line
    for way in ("config", "cached"):
        assert "it is not a hub id" in hub.resolve(way, "a--b").stderr


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "a b", "", "-x"])
def test_no_folder_and_no_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(model)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="expected a folder or a hub id, not a file"):
        resolve(str(tmp_path / "model.safetensors"))


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision has no meaning for a folder"):
        resolve(str(tmp_path), "main")


def test_served_names(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert default_name(f"{tmp_path}/my-model/") == "my-model"
    assert default_name("org/model") == "org/model"


def test_the_demo_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (resolve("demo") / "config.json").is_file()
    assert default_name("demo") == "foretoken-demo"
    with pytest.raises(ConfigError, match="--revision has no meaning for the demo model"):
        resolve("demo", "main")
    # An existing folder still means itself.
    (tmp_path / "demo").mkdir()
    assert (resolve("demo"), default_name("demo")) == (Path("demo"), "demo")


def test_one_file_of_the_hub_is_downloaded_alone(hub: Hub, tmp_path: Path) -> None:
    found = hub.resolve("file", "org/model/freq_8.pt")
    assert Path(found.stdout.strip()).read_bytes() == FILES["freq_8.pt"], found.stderr
    assert {path for path in hub.server.paths if "/resolve/" in path} == {"/org/model/resolve/main/freq_8.pt"}
    missing = hub.resolve("file", "org/model/freq_9.pt")
    assert missing.stderr == "ConfigError: there is no file freq_9.pt here or in org/model on the hub\n"
    # A file here wins; a path that is no id is left to its reader.
    local = tmp_path / "map.pt"
    local.touch()
    for name in (str(local), "./none/map.pt", "none.pt", "a/b/c/none.pt"):
        assert resolve_file(name) == Path(name)


def test_a_config_comes_without_the_rest(hub: Hub, tmp_path: Path) -> None:
    found = hub.resolve("config", "org/model", "branch")
    assert Path(found.stdout.strip()).read_bytes() == FILES["config.json"], found.stderr
    assert {path for path in hub.server.paths if "/resolve/" in path} == {"/org/model/resolve/branch/config.json"}
    assert hub.resolve("config", "org/bare").stdout == "None\n"
    assert "no folder and no public hub id: org/none" in hub.resolve("config", "org/none").stderr
    offline = hub.resolve("config", "org/bare", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert "org/bare is neither a folder nor a cached model" in offline.stderr
    assert config_file("demo") == resolve("demo") / "config.json"
    for name in (str(tmp_path), str(tmp_path / "none"), "a/b/c"):
        assert config_file(name) is None
