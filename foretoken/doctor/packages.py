"""The packages that foretoken needs, and whether their versions will do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import Requirement

from foretoken.doctor.finding import Finding, fault, ok

_NAME = "packages"
# Whose versions a report of a problem should name.
SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "grpcio", "llguidance", "triton")


def check_packages(required: Iterable[str], installed: Mapping[str, str]) -> Finding:
    """Compare requirements with installed versions.

    Args:
        required: as a package's metadata has them; requirements of extras count only if installed.
        installed: versions by name.
    """
    problems = []
    for text in required:
        requirement = Requirement(text)
        is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if not is_extra and requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed.get(requirement.name)
        if version is None and not is_extra:
            problems.append(f"{requirement.name} is missing")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if problems:
        return fault(_NAME, ", ".join(problems), "pip install --upgrade foretoken")
    return ok(_NAME, ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed))


def requirements() -> list[str]:
    """Return foretoken's requirements; none if it is not installed as a package."""
    try:
        return metadata.requires("foretoken") or []
    except metadata.PackageNotFoundError:
        return []


def installed_versions(required: Iterable[str]) -> dict[str, str]:
    """Return the versions of those required packages, and of those shown, that are installed."""
    found = {}
    for name in {*SHOWN, *(Requirement(text).name for text in required)}:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
