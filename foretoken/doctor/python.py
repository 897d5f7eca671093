"""The Python that runs foretoken."""

from __future__ import annotations

from foretoken.doctor.finding import Finding, fault, ok, warning

OLDEST, NEWEST = (3, 11), (3, 13)
_NAME = "Python"


def check_python(version: tuple[int, int, int], executable: str) -> Finding:
    """Check Python's version. ``version``: major, minor and micro."""
    found = f"{'.'.join(map(str, version))} at {executable}"
    if version[:2] < OLDEST:
        return fault(_NAME, found, "install Python 3.11, 3.12 or 3.13")
    if version[:2] > NEWEST:
        return warning(_NAME, found, "foretoken is tested with 3.11 to 3.13")
    return ok(_NAME, found)
