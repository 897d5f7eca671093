"""A release: one version everywhere, and a workflow that publishes only tags, with an approval."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import foretoken

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()}
JOBS: dict[str, Any] = WORKFLOWS["release.yml"]["jobs"]
PUBLISHING = [name for name in JOBS if name.startswith("publish-")]


@pytest.fixture(scope="module")
def versions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_version", ROOT / "docker" / "set_version.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_place_has_the_version_of_the_project(versions: ModuleType) -> None:
    """If this fails: python docker/set_version.py."""
    assert versions.changes() == {}
    assert versions.project_version() == foretoken.__version__
    chart = yaml.safe_load((ROOT / "docker/helm/Chart.yaml").read_text())
    assert str(chart["version"]) == str(chart["appVersion"]) == foretoken.__version__


def test_a_new_version_reaches_every_place(versions: ModuleType, tmp_path: Path) -> None:
    for name in ("pyproject.toml", *versions.PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project = tmp_path / "pyproject.toml"
    old = f'version = "{foretoken.__version__}"'
    project.write_text(project.read_text().replace(old, 'version = "7.8.9rc1"', 1))
    found = versions.changes(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in found} == set(versions.PLACES)
    for path, text in found.items():
        path.write_text(text)
    assert versions.changes(tmp_path) == {}
    assert '__version__ = "7.8.9rc1"' in (tmp_path / "foretoken/__init__.py").read_text()
    assert (tmp_path / "CHANGELOG.md").read_text().startswith("# Changelog\n\n## 7.8.9rc1 (")
    assert (tmp_path / "docker/Dockerfile").read_text().count("version=7.8.9rc1") == 2
    # Older sections keep their version.
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 7.8.9rc1 (today)\n\n## 0.1.0 (before)\n")
    assert versions.changes(tmp_path) == {}


def test_a_place_that_is_gone_is_an_error(versions: ModuleType, tmp_path: Path) -> None:
    for name in ("pyproject.toml", *versions.PLACES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docker/helm/Chart.yaml").write_text("name: foretoken\n")
    with pytest.raises(ValueError, match=r"Chart\.yaml states no version"):
        versions.changes(tmp_path)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_commit_and_rights_are_read_only_by_default(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used)


def test_an_action_has_one_commit() -> None:
    lines = "".join((ROOT / ".github" / "workflows" / name).read_text() for name in WORKFLOWS)
    pins = set(re.findall(r"uses: (\S+)@([0-9a-f]{40}) # (v[\d.]+)$", lines, re.MULTILINE))
    assert len({action for action, _, _ in pins}) == len(pins)
    assert lines.count("uses: ") == len(re.findall(r"uses: \S+@[0-9a-f]{40} # v[\d.]+$", lines, re.MULTILINE))


def test_nothing_is_published_but_a_tag_that_was_built_and_checked() -> None:
    assert len(PUBLISHING) == 3
    for name in ("publish-distributions", "publish-images"):
        job = JOBS[name]
        assert job["if"] == "startsWith(github.ref, 'refs/tags/v')"
        assert set(job["needs"]) == {"distributions", "images"}
        # Whose protection rules ask a maintainer.
        assert job["environment"]
    # A job is skipped if one that it needs is.
    assert set(JOBS["publish-release"]["needs"]) == {"publish-distributions", "publish-images"}
    assert all("permissions" not in JOBS[name] for name in JOBS if name not in PUBLISHING)


def test_pypi_trusts_the_workflow_without_a_password() -> None:
    job = JOBS["publish-distributions"]
    assert job["permissions"] == {"id-token": "write"}
    (publish,) = [step for step in job["steps"] if step["uses"].startswith("pypa/gh-action-pypi-publish@")]
    assert "with" not in publish and "secrets" not in str(job)


def test_the_tag_is_compared_and_the_files_are_checked() -> None:
    commands = [step["run"] for step in JOBS["distributions"]["steps"] if "run" in step]
    assert 'python docker/set_version.py --check "${GITHUB_REF_NAME#v}"' in commands and "make dist" in commands
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("dynamic", [])
